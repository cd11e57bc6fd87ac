"""`python -m mutants`: run the tests of every mutant; at least 95 % of mutants must make a test fail.

python -m mutants                        all mutants, two at a time
python -m mutants control "NaN"          only mutants whose area, file or name contains a given word
python -m mutants --sample 12 --seed 7   twelve mutants by a seed, from every area
python -m mutants --part 2/4             every fourth mutant, beginning with the second
python -m mutants --check                only check that the list fits the sources
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

from mutants.catalogue import LISTS, Mutant, check, load, sample
from mutants.workplace import Trial, Workplace

REQUIRED = 0.95  # required share of noticed mutants, without equivalent ones


def main() -> int:
    """Run the command; return 0 if enough mutants were noticed, 1 if not, 2 if the list or the tests are invalid."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that copies are deleted
    words = arguments()
    everything = load(words.lists)
    problems = check(everything)
    if problems or words.check:
        print(*problems, sep="\n", file=sys.stderr)
        print(f"{len(everything)} mutants, {len(problems)} entries out of order")
        return 2 if problems else 0
    chosen = sample(everything, words.sample, words.seed) if words.sample else everything
    if words.words:
        chosen = [mutant for mutant in chosen if any(word.lower() in str(mutant).lower() for word in words.words)]
    chosen = chosen[words.part]
    alive = [mutant for mutant in chosen if not mutant.equivalent]
    if not alive:
        print(f"error: no mutant's area, file or name holds {' or '.join(words.words) or 'anything'}", file=sys.stderr)
        return 2
    try:
        trials = run(alive, words.jobs, words.limit)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0 if report(chosen, trials) >= REQUIRED else 1


def arguments() -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(prog="python -m mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("words", nargs="*", help="only mutants whose area, file or name holds one of these")
    parser.add_argument("--sample", type=int, default=0, help="so many of them, by --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", type=part, default="1/1", help="K/N: every N-th mutant, beginning with the K-th")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds a mutant's tests may take")
    parser.add_argument("--lists", type=Path, default=LISTS, help="folder of the lists")
    parser.add_argument("--check", action="store_true", help="only whether the list fits the sources")
    return parser.parse_args()


def part(text: str) -> slice:
    """Return the places of the mutants of a part K/N.

    Raises:
        ValueError: the text is not K/N, or K is not in 1..N.
    """
    number, parts = (int(word) for word in text.split("/"))
    if not 1 <= number <= parts:
        raise ValueError(text)
    return slice(number - 1, None, parts)


def run(mutants: Sequence[Mutant], jobs: int, limit: float) -> list[Trial]:
    """Run the mutants' tests, and print one line per mutant.

    Raises:
        ValueError: the tests fail without a mutant, or cannot be run.
    """
    places: SimpleQueue[Workplace] = SimpleQueue()

    @contextmanager
    def taken() -> Iterator[Workplace]:
        place = places.get()
        try:
            yield place
        finally:
            places.put(place)

    def unmutated(tests: Sequence[str]) -> str:
        with taken() as place:
            return place.baseline(tests)

    def one(mutant: Mutant) -> Trial:
        with taken() as place:
            trial = place.trial(mutant)
        print(f"{trial.outcome:8} {trial.seconds:6.1f} s  {mutant}  {trial.word}", flush=True)
        return trial

    with ExitStack() as stack:
        for _ in range(max(1, jobs)):
            places.put(stack.enter_context(Workplace(limit)))
        pool = ThreadPoolExecutor(max(1, jobs))
        stack.callback(pool.shutdown, cancel_futures=True)
        for trouble in pool.map(unmutated, by_file({test for mutant in mutants for test in mutant.tests})):
            if trouble:
                raise ValueError(f"the tests must pass without a mutant, got: {trouble}")
        return list(pool.map(one, mutants))


def by_file(tests: Iterable[str]) -> list[list[str]]:
    """Return the tests of each file, the whole file only once; each list runs in a separate process, like a trial."""
    files: dict[str, list[str]] = {}
    for test in sorted(tests):
        files.setdefault(test.partition("::")[0], []).append(test)
    return [[file] if file in named else named for file, named in files.items()]


def report(chosen: Sequence[Mutant], trials: Sequence[Trial]) -> float:
    """Print the table; return the share of noticed mutants."""
    total, hung = Counter(t.mutant.area for t in trials), Counter(t.mutant.area for t in trials if t.outcome == "hung")
    lost = Counter(trial.mutant.area for trial in trials if trial.outcome == "survived")
    same = Counter(mutant.area for mutant in chosen if mutant.equivalent)
    print(f"\n{'area':12} {'mutants':>8} {'noticed':>8} {'hung':>6} {'survived':>9} {'equivalent':>11} {'share':>7}")
    for area in [*sorted(total | same), "all"]:
        rows = [counts.total() if area == "all" else counts[area] for counts in (total, hung, lost, same)]
        share = (rows[0] - rows[2]) / rows[0] if rows[0] else 1.0
        print(f"{area:12} {rows[0]:8} {rows[0] - rows[2]:8} {rows[1]:6} {rows[2]:9} {rows[3]:11} {100 * share:6.1f} %")
    for trial in trials:
        if trial.outcome == "survived":
            print(f"survived: {trial.mutant}")
    for mutant in chosen:
        if mutant.equivalent:
            print(f"equivalent: {mutant}: {mutant.equivalent}")
    return 1.0 - lost.total() / max(total.total(), 1)


if __name__ == "__main__":
    sys.exit(main())
