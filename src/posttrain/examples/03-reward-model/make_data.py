"""Writes the data of the reward-model example: train, pairs and heldout .jsonl.

    python make_data.py --seed 7 --out DIR

The task and its demonstrations are those of the sorting example beside this one. The pairs say which of two answers
people preferred: the right one over one that is sorted the wrong way, has a wrong, missing or doubled digit, or does
not keep to the form. Nobody writes down what "right" means; the reward model has to find that out.
"""

from __future__ import annotations

import argparse
import random
import runpy
from pathlib import Path

SORT = runpy.run_path(str(Path(__file__).resolve().parents[1] / "01-sort" / "make_data.py"))
TRAIN, HELDOUT, PAIRS = 4000, 700, 8000  # rows
FORMS = ("A: ", "sorted A: ")
OTHER_FORMS = ("", "A: A: ", "A:", "sorted ", "sorted sorted A: ", "A: sorted ")


def altered(digits: str, rng: random.Random) -> str:
    """The digits in a wrong order, or an ordering with up to three slips."""
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
    """A right answer and a worse one; None when the second came out right as well."""
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
    draw, kept_back, every = SORT["draw"], SORT["for_evaluation"], (3, 4, 5)
    train = draw(rng, every, lambda digits: not kept_back(digits), taken)
    heldout = draw(rng, every, kept_back, taken)
    digits = [next(train) for _ in range(TRAIN)]
    pairs: list[dict[str, object]] = []
    while len(pairs) < PAIRS:
        found = pair(rng.choice(digits), rng)
        pairs += [found] if found else []
    arguments.out.mkdir(parents=True, exist_ok=True)
    SORT["write"](arguments.out / "train.jsonl", [SORT["demonstration"](d, rng) for d in digits])
    SORT["write"](arguments.out / "pairs.jsonl", pairs)
    SORT["write"](arguments.out / "heldout.jsonl", [SORT["row"](next(heldout)) for _ in range(HELDOUT)])


if __name__ == "__main__":
    main()
