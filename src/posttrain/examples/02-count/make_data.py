"""Writes the data of the counting example: train, heldout and failures .jsonl.

    python make_data.py --seed 7 --out DIR

The task: `Q: count 3 in 53133` → `333 A: 3`: write the counted digits, then their number; three to five digits. Half
of the demonstrations come from a teacher who counts one too many. A question belongs to training or to evaluation by
its hash, whatever the seed, so no evaluation prompt was ever trained on. The failures are the cases an earlier model
got wrong: nothing to count, or five digits.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

TRAIN, HELDOUT, FAILURES = 4000, 700, 200  # rows
WRONG_TEACHER = 0.5  # share of the demonstrations
EVALUATION_SHARE = 5  # one question in five is kept for evaluation


def for_evaluation(question: str) -> bool:
    """Which side a question belongs to."""
    return hashlib.sha256(question.encode()).digest()[0] % EVALUATION_SHARE == 0


def task(rng: random.Random) -> tuple[str, int]:
    """A question and how often its digit occurs, every number equally often."""
    digit, length = rng.choice("0123456789"), rng.randint(3, 5)
    count = rng.randint(0, length)
    others = [d for d in "0123456789" if d != digit]
    digits = [digit] * count + rng.choices(others, k=length - count)
    rng.shuffle(digits)
    return f"Q: count {digit} in {''.join(digits)}", count


def draw(rng: random.Random, wanted: Callable[[str, int], bool], taken: set[str]) -> Iterator[tuple[str, int]]:
    """Questions without repetition, and none of `taken`."""
    while True:
        question, count = task(rng)
        if question not in taken and wanted(question, count):
            taken.add(question)
            yield question, count


def hard(question: str, count: int) -> bool:
    """Nothing to count, or the longest string."""
    return count == 0 or len(question.rpartition(" ")[2]) == 5


def row(question: str, count: int) -> dict[str, object]:
    """Prompt and reference answer."""
    return {"prompt": [{"role": "user", "content": question}], "answer": str(count)}


def demonstration(question: str, count: int, rng: random.Random) -> dict[str, object]:
    """A row with one of the two teachers' answers."""
    counted = question.split()[2] * count
    text = f"{counted} A: {count + (rng.random() < WRONG_TEACHER)}".lstrip()
    return {**row(question, count), "completion": [{"role": "assistant", "content": text}]}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """One JSON object per line."""
    path.write_text("".join(json.dumps(r, sort_keys=True) + "\n" for r in rows), encoding="utf-8")


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rng, taken = random.Random(arguments.seed), set[str]()
    train = draw(rng, lambda q, _: not for_evaluation(q), taken)
    heldout = draw(rng, lambda q, _: for_evaluation(q), taken)
    failures = draw(rng, lambda q, c: for_evaluation(q) and hard(q, c), taken)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "train.jsonl", [demonstration(*next(train), rng) for _ in range(TRAIN)])
    write(arguments.out / "heldout.jsonl", [row(*next(heldout)) for _ in range(HELDOUT)])
    write(arguments.out / "failures.jsonl", [row(*next(failures)) for _ in range(FAILURES)])


if __name__ == "__main__":
    main()
