"""Writes the data of the counting example: train.jsonl, heldout.jsonl and failures.jsonl.

    python make_data.py --seed 7 --out DIR

The task is to write the counted digits and then their number, for three to five digits: `Q: count 3 in 53133` →
`333 A: 3`. Half of the demonstrations come from a teacher who counts one too many. The hash of a question determines
whether the question is used for training or for evaluation, with any seed. So no run trains on an evaluation prompt.
The failures are cases in which an earlier model was wrong: questions with nothing to count, or with five digits.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

TRAIN, HELDOUT, FAILURES = 4000, 700, 200  # rows
WRONG_TEACHER = 0.5  # share of the demonstrations
EVALUATION_SHARE = 5  # one question in five is reserved for evaluation


def for_evaluation(question: str) -> bool:
    """Return whether a question is reserved for evaluation."""
    return hashlib.sha256(question.encode()).digest()[0] % EVALUATION_SHARE == 0


def task(rng: random.Random) -> tuple[str, int]:
    """Return a question and how often its digit occurs; for each length, all counts are equally likely."""
    digit, length = rng.choice("0123456789"), rng.randint(3, 5)
    count = rng.randint(0, length)
    others = [d for d in "0123456789" if d != digit]
    digits = [digit] * count + rng.choices(others, k=length - count)
    rng.shuffle(digits)
    return f"Q: count {digit} in {''.join(digits)}", count


def draw(rng: random.Random, wanted: Callable[[str, int], bool], taken: set[str]) -> Iterator[tuple[str, int]]:
    """Yield questions that are not in `taken`, each once."""
    while True:
        question, count = task(rng)
        if question not in taken and wanted(question, count):
            taken.add(question)
            yield question, count


def hard(question: str, count: int) -> bool:
    """Return whether a question has nothing to count or has the longest string."""
    return count == 0 or len(question.rpartition(" ")[2]) == 5


def row(question: str, count: int) -> dict[str, object]:
    """Return a row with a prompt and its reference answer."""
    return {"prompt": [{"role": "user", "content": question}], "answer": str(count)}


def demonstration(question: str, count: int, rng: random.Random) -> dict[str, object]:
    """Return a row with the answer of one of the two teachers."""
    counted = question.split()[2] * count
    text = f"{counted} A: {count + (rng.random() < WRONG_TEACHER)}".lstrip()
    return {**row(question, count), "completion": [{"role": "assistant", "content": text}]}


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
    train = draw(rng, lambda q, _: not for_evaluation(q), taken)
    heldout = draw(rng, lambda q, _: for_evaluation(q), taken)
    failures = draw(rng, lambda q, c: for_evaluation(q) and hard(q, c), taken)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "train.jsonl", [demonstration(*next(train), rng) for _ in range(TRAIN)])
    write(arguments.out / "heldout.jsonl", [row(*next(heldout)) for _ in range(HELDOUT)])
    write(arguments.out / "failures.jsonl", [row(*next(failures)) for _ in range(FAILURES)])


if __name__ == "__main__":
    main()
