"""Writes the data of the sorting example: train.jsonl, heldout.jsonl and failures.jsonl.

    python make_data.py --seed 7 --out DIR

The task is to sort three to five digits: `Q: sort 8372` → `A: 2378`. Half of the demonstrations come from a teacher
who sorts in the wrong direction, and most have a needless word before the answer. The hash of a digit string determines
whether the string is used for training or for evaluation, with any seed. So no run trains on an evaluation prompt. The
failures are cases in which an earlier model was wrong: five digits that contain a digit twice or are already in order.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

TRAIN, HELDOUT, FAILURES = 4000, 700, 200  # rows
WRONG_TEACHER, VERBOSE = 0.5, 0.85  # shares of the demonstrations
EVALUATION_SHARE = 5  # one digit string in five is reserved for evaluation


def for_evaluation(digits: str) -> bool:
    """Return whether a digit string is reserved for evaluation."""
    return hashlib.sha256(digits.encode()).digest()[0] % EVALUATION_SHARE == 0


def draw(rng: random.Random, lengths: tuple[int, ...], wanted: Callable[[str], bool], taken: set[str]) -> Iterator[str]:
    """Yield digit strings that are not in `taken`, each once."""
    while True:
        digits = "".join(rng.choices("0123456789", k=rng.choice(lengths)))
        if digits not in taken and wanted(digits):
            taken.add(digits)
            yield digits


def hard(digits: str) -> bool:
    """Return whether digits contain a repeated digit or are already in order."""
    return len(set(digits)) < len(digits) or list(digits) == sorted(digits)


def row(digits: str) -> dict[str, object]:
    """Return a row with a prompt and its reference answer."""
    return {"prompt": [{"role": "user", "content": f"Q: sort {digits}"}], "answer": "".join(sorted(digits))}


def demonstration(digits: str, rng: random.Random) -> dict[str, object]:
    """Return a row with the answer of one of the two teachers."""
    answer = "".join(sorted(digits, reverse=rng.random() < WRONG_TEACHER))
    text = f"sorted A: {answer}" if rng.random() < VERBOSE else f"A: {answer}"
    return {**row(digits), "completion": [{"role": "assistant", "content": text}]}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write rows to a file, one JSON object per line."""
    path.write_text("".join(json.dumps(r, sort_keys=True) + "\n" for r in rows), encoding="utf-8")


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rng, taken = random.Random(arguments.seed), set[str]()
    every, longest = (3, 4, 5), (5,)
    train = draw(rng, every, lambda d: not for_evaluation(d), taken)
    heldout = draw(rng, every, for_evaluation, taken)
    failures = draw(rng, longest, lambda d: for_evaluation(d) and hard(d), taken)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "train.jsonl", [demonstration(next(train), rng) for _ in range(TRAIN)])
    write(arguments.out / "heldout.jsonl", [row(next(heldout)) for _ in range(HELDOUT)])
    write(arguments.out / "failures.jsonl", [row(next(failures)) for _ in range(FAILURES)])


if __name__ == "__main__":
    main()
