"""What a plan takes a document's length for, against the tokenizer that a model from nothing gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.data.fit import PlanTokenizer, open_tokenizer
from posttrain.domain.kinds import RowNeeds
from posttrain.engine.models.files import character_tokenizer
from posttrain.preflight.data import _lengths

LEARN, PAIRS, ASK = RowNeeds(learn=True), RowNeeds(pairs=True), RowNeeds()
ASKED, ANSWER = {"role": "user", "content": "5 + 3"}, {"role": "assistant", "content": "8"}
ROWS: list[tuple[dict[str, Any], RowNeeds]] = [
    ({"prompt": "5 + 3", "completion": "8"}, LEARN),
    ({"prompt": [ASKED], "completion": [ANSWER]}, LEARN),
    ({"prompt": [{"role": "system", "content": "be brief"}, ASKED], "completion": [ANSWER]}, LEARN),
    ({"messages": [ASKED, ANSWER, ASKED, {"role": "assistant", "content": "eight"}]}, LEARN),
    ({"text": "5 + 3 = 8"}, LEARN),
    ({"prompt": "5 + 3", "chosen": "8", "rejected": "nine"}, PAIRS),
    ({"prompt": [ASKED], "chosen": [ANSWER], "rejected": [{"role": "assistant", "content": "nine"}]}, PAIRS),
    ({"prompt": "5 + 3"}, ASK),
    ({"prompt": [ASKED]}, ASK),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PlanTokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    character_tokenizer("0123456789 +=abcdefghijklmnopqrstuvwxyz").save_pretrained(folder)
    found = open_tokenizer(lambda name: (folder / name).read_bytes() if (folder / name).is_file() else None)
    assert found is not None
    return found


@pytest.mark.parametrize(("row", "needs"), ROWS, ids=[json.dumps(row)[:40] for row, _ in ROWS])
def test_without_a_tokenizer_it_is_what_a_character_tokenizer_gives(
    row: dict[str, Any], needs: RowNeeds, tokenizer: PlanTokenizer
) -> None:
    assert list(_lengths(row, needs, None)) == list(_lengths(row, needs, tokenizer))


def test_short_texts_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer's end is a token: of a document of five characters a fifth."""
    world: World = make_world(tmp_path, monkeypatch)
    world.prepare()
    rows = [{"prompt": f"{at}+1=", "completion": str(at + 1)} for at in range(9)]
    (world.root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    world.write(
        "sums.yaml",
        "name: sums\nowner: ada\nseed: 1\ndata: {train: ./sums.jsonl}\nstages:\n  init: {kind: init_model}\n"
        "  sft: {kind: sft, model: init, data: train, steps: 9, batch_size: 1}\n",
    )
    estimate = world.json("plan", "sums.yaml")["stages"][1]["estimate"]
    assert estimate["tokens"] == pytest.approx(sum(len(r["prompt"]) + len(r["completion"]) + 1 for r in rows), abs=1)
    assert "one per character" in estimate["basis"]
