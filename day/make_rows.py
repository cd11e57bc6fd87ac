"""Writes rows of reasoning-gym: `train.jsonl` with answers as demonstrations, `heldout.jsonl` without.

Item i of a set is generated from seed + i, so the seeds of the two sets are far apart; a word in both sets stays only
in the first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import reasoning_gym


def rows(size: int, seed: int) -> list[dict[str, Any]]:
    """Return rows as the package generates them."""
    made = reasoning_gym.create_dataset("spell_backward", size=size, seed=seed, min_word_len=3, max_word_len=4)
    return [json.loads(json.dumps(entry)) for entry in made]


def main() -> None:
    train, drawn = rows(5000, 1), rows(1500, 10**6)
    seen = {row["question"] for row in train}
    heldout = {row["question"]: row for row in drawn if row["question"] not in seen}
    write("train.jsonl", [{**row, "completion": row["answer"]} for row in train])
    write("heldout.jsonl", list(heldout.values()))


def write(name: str, found: list[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in found))
    print(f"{name}: {len(found)} rows")


if __name__ == "__main__":
    main()
