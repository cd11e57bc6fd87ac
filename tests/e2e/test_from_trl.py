"""docs/howto/from-trl.md promises a first run of one's own in ten commands and edits at most: its list is played here.

Nothing is typed that the page does not list. The clone and the installation are not repeated: they made the
environment that the test runs in, and the Makefile's own line is compared.
"""

from __future__ import annotations

import json
import random
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from documents import ROOT
from pages import Block, blocks
from workbench import Workbench

PAGE = "docs/howto/from-trl.md"
MOST = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered item of the list: a command to type, or a file to edit."""

    number: int
    title: str
    block: Block

    @property
    def is_edit(self) -> bool:
        return self.title.startswith("Edit")


def steps() -> list[Step]:
    """The page's list, in order."""
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    starts = list(re.finditer(r"^(\d+)\. (.+)$", text, re.MULTILINE))
    lines = [text.count("\n", 0, found.start()) + 1 for found in starts]
    found = []
    for number, (start, line) in enumerate(zip(starts, lines, strict=True)):
        end = lines[number + 1] if number + 1 < len(lines) else line + 10
        inside = [
            block for block in blocks("bash", "python", "yaml") if block.page == PAGE and line <= block.line < end
        ]
        assert len(inside) == 1, f"step {start[1]} must have one block, got {inside}"
        found.append(Step(int(start[1]), start[2], inside[0]))
    return found


def test_the_list_is_numbered_and_short_and_every_step_is_one_command_or_one_edit() -> None:
    listed = steps()
    assert [step.number for step in listed] == list(range(1, len(listed) + 1))
    assert 5 < len(listed) <= MOST
    for step in listed:
        if step.is_edit:
            assert step.block.file, f"step {step.number}: which file?"
        else:
            assert step.block.language == "bash"
            assert len(step.block.text.splitlines()) == 1, f"step {step.number} is more than one command"
            assert not re.search(r"[;|]|&&", step.block.text), f"step {step.number} is more than one command"


def test_what_is_not_played_is_the_clone_and_the_makefiles_installation() -> None:
    first, second, third = (shlex.split(step.block.text) for step in steps()[:3])
    assert first[:2] == ["git", "clone"]
    assert first[3] == "posttrain"
    assert second == ["pip", "install", "-e", first[3], "-c", f"{first[3]}/constraints.txt"]
    assert "--constraint constraints.txt --editable .\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    assert third[:2] == ["posttrain", "init"]


def edited(path: Path, block: Block) -> None:
    """A file as the page tells to edit it: a new one, or keys of a YAML file replaced and stages added."""
    if not path.exists():
        path.write_text(block.text)
        return
    run: dict[str, Any] = yaml.safe_load(path.read_text())
    new = yaml.safe_load(block.text)
    run["stages"] |= new.pop("stages", {})
    path.write_text(yaml.safe_dump(run | new, sort_keys=False))


def make_what_the_reader_has(bench: Workbench) -> None:
    """The script of the page, rows, and a model folder: trained a little elsewhere, exported from there."""
    (script,) = [block for block in blocks("python") if block.page == PAGE and block.file == "train_grpo.py"]
    numbers = random.Random(1).sample(range(100, 1000), 900)
    rows = [{"prompt": str(n), "completion": str(n % 10), "answer": str(n % 10)} for n in numbers]
    elsewhere = Workbench(bench.folder.parent / "elsewhere")
    elsewhere.folder.mkdir()
    for name, part in (("train", rows[:700]), ("heldout", rows[700:])):
        for place in (bench, elsewhere):
            place.write(f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in part))
    elsewhere.write("model.yaml", {"hidden_size": 64, "layers": 2, "heads": 2, "context_length": 64})
    stage = {"kind": "sft", "data": "train", "steps": 40, "optimizer": {"learning_rate": 4.0e-3}}
    known = {"name": "base", "owner": "e2e", "seed": 1, "model": "model:tiny", "data": {"train": "./train.jsonl"}}
    elsewhere.write("run.yaml", {**known, "stages": {"sft": stage}})
    elsewhere.run("init")
    elsewhere.run("asset", "create", "model:tiny", "model.yaml")
    elsewhere.run("run", "run.yaml")
    elsewhere.run("export", "base/sft", str(bench.folder / "base"))
    bench.write("train_grpo.py", script.text)


@pytest.mark.journey
@pytest.mark.slow
def test_the_list_leads_from_a_trl_script_to_a_released_and_exported_model(tmp_path: Path) -> None:
    bench = Workbench(tmp_path / "mine")
    bench.folder.mkdir()
    make_what_the_reader_has(bench)
    printed = {}
    try:
        for step in steps()[2:]:
            if step.is_edit:
                edited(bench.folder / step.block.file, step.block)
                continue
            words = shlex.split(step.block.text)
            assert words[0] == "posttrain"
            printed[words[1]] = bench.run(*words[1:])
        assert "num_generations: 8 → group_size: 8" in printed["init"].out
        assert "warning" not in printed["plan"].out
        assert "accuracy         PASS" in printed["run"].out
        assert "prod now points at" in printed["run"].out
        assert printed["sample"].out.split()[1::3] == ["123", "987"]
        assert (bench.folder / "released-model" / "model.safetensors").is_file()
        run = bench.run("get", bench.run_id(), "-o", "json").json
        assert {stage["name"] for stage in run["stages"]} == {"grpo", "before", "after", "gate", "release"}
    finally:
        bench.clean()
        Workbench(bench.folder.parent / "elsewhere").clean()
