"""Writes the data of the reward-model example: train.jsonl, pairs.jsonl and heldout.jsonl.

    python make_data.py --seed 7 --out DIR

The task and its demonstrations are those of the sorting example. Each pair contains two answers, of which people
preferred the first: a right answer, and an answer that is sorted in the wrong direction, has a wrong, missing or
doubled digit, or does not follow the form. No rule defines "right"; the reward model has to learn what is right.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

TRAIN, HELDOUT, PAIRS = 4000, 700, 8000  # rows
WRONG_TEACHER, VERBOSE = 0.5, 0.85  # shares of the demonstrations
EVALUATION_SHARE = 5  # one digit string in five is reserved for evaluation
FORMS = ("A: ", "sorted A: ")
OTHER_FORMS = ("", "A: A: ", "A:", "sorted ", "sorted sorted A: ", "A: sorted ")


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


def altered(digits: str, rng: random.Random) -> str:
    """Return the digits in a wrong order, or sorted with up to three mistakes."""
    choice = rng.random()
    if choice < 0.25:
        return "".join(sorted(digits, reverse=True))
    if choice < 0.35:
        return "".join(rng.sample(digits, len(digits)))
    text = sorted(digits, reverse=rng.random() < 0.25)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        place = rng.randrange(len(text) + 1)
        slip = rng.choice(("replace", "drop", "insert", "double"))
        if slip == "replace":
            text[place : place + 1] = rng.choice("0123456789")
        elif slip == "drop":
            del text[place : place + 1]
        elif slip == "insert":
            text.insert(place, rng.choice("0123456789"))
        elif place < len(text):
            text.insert(place, text[place])
    return "".join(text)


def pair(digits: str, rng: random.Random) -> dict[str, object] | None:
    """Return a row with a right answer and a worse answer; None if the second answer is right too."""
    answer, form = "".join(sorted(digits)), rng.choice(FORMS)
    other = form if rng.random() < 0.84 else rng.choice(OTHER_FORMS)
    worse = altered(digits, rng) if other in FORMS or rng.random() < 0.5 else answer
    if worse == answer and other in FORMS:
        return None
    said = {"chosen": form + answer, "rejected": other + worse}
    chat = {key: [{"role": "assistant", "content": text}] for key, text in said.items()}
    return {"prompt": [{"role": "user", "content": f"Q: sort {digits}"}], **chat}


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    rng, taken = random.Random(arguments.seed), set[str]()
    every = (3, 4, 5)
    train = draw(rng, every, lambda digits: not for_evaluation(digits), taken)
    heldout = draw(rng, every, for_evaluation, taken)
    digits = [next(train) for _ in range(TRAIN)]
    pairs: list[dict[str, object]] = []
    while len(pairs) < PAIRS:
        found = pair(rng.choice(digits), rng)
        pairs += [found] if found else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    write(arguments.out / "train.jsonl", [demonstration(d, rng) for d in digits])
    write(arguments.out / "pairs.jsonl", pairs)
    write(arguments.out / "heldout.jsonl", [row(next(heldout)) for _ in range(HELDOUT)])


if __name__ == "__main__":
    main()
