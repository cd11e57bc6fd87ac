"""Model folders that a trainer left, through the command line: registered, measured, asked and compared as they lie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world, write_model

from posttrain.client.blobs import Bundle, Sender
from posttrain.domain.canonical import digest_bytes
from posttrain.execution import foreground
from posttrain.store.trees import beside_model, file_digest

SIDE = ("training_args.bin", "optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth", "rng_state_3.pth")
PICKLE = b"\x80\x04cposix\nsystem\n"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def left_by_trl(folder: Path, quality: float = 0.5) -> Path:
    """A folder as TRL's trainer saves it: a model, and what it keeps to go on."""
    write_model(folder, quality)
    for name in SIDE:
        (folder / name).write_bytes(PICKLE)
    (folder / "trainer_state.json").write_text("{}")
    write_model(folder / "checkpoint-10", 0.1)
    (folder / "checkpoint-10" / "optimizer.pt").write_bytes(PICKLE)
    return folder


def without(folder: Path) -> Path:
    """The model alone, elsewhere."""
    alone = folder.with_name("alone")
    shutil.copytree(folder, alone, ignore=lambda _, names: [n for n in names if beside_model(n) or "checkpoint" in n])
    return alone


def stored(world: World) -> list[bytes]:
    return [path.read_bytes() for path in (world.root / ".posttrain").rglob("*") if path.is_file()]


def test_audit_41_a_folder_that_trl_saved_is_registered_without_what_lies_beside_the_model(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = left_by_trl(world.root / "out"), list[str]()
    opens, os_opens = Path.open, os.open
    monkeypatch.setattr(Path, "open", lambda path, *how, **more: opened.append(path.name) or opens(path, *how, **more))
    monkeypatch.setattr(os, "open", lambda path, *how, **more: opened.append(str(path)) or os_opens(path, *how, **more))
    told = world("asset", "add", "model:mine", "out")
    assert told.exit_code == 0
    assert "model:mine@1" in told.stdout
    for name in (*SIDE, "trainer_state.json", "checkpoint-10/"):
        assert name in told.stderr
    assert "not opened and not stored" in told.stderr
    assert any(name.endswith("model.safetensors") for name in opened)
    assert not [name for name in opened if Path(name).name in SIDE]
    assert not any(PICKLE in data for data in stored(world))
    assert "model:mine@1" in world.ok("asset", "add", "model:mine", str(without(folder))), "the same version"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "adapter_model.bin", "model.pt", "optimizer.pt.bin", "my.pkl"])
def test_audit_41_pickled_weights_stay_refused(world: World, name: str) -> None:
    (left_by_trl(world.root / "out") / name).write_bytes(PICKLE)
    told = world("asset", "add", "model:mine", "out")
    assert (told.exit_code, len(told.stderr.splitlines())) == (2, 1)
    assert f"must not contain pickled files, got {name}; convert it to safetensors" in told.stderr


def test_audit_41_side_files_of_a_reward_s_folder_belong_to_it(world: World) -> None:
    folder = world.root / "judge"
    folder.mkdir()
    (folder / "reward.py").write_text("def score(completion, answer):\n    return 1.0\n")
    (folder / "trainer_state.json").write_text('{"threshold": 0.51234}')
    world.ok("asset", "add", "reward:judge", "judge")
    assert any(b"0.51234" in data for data in stored(world))


@pytest.mark.parametrize("word", ["out", "./out", "{root}/out"])
def test_audit_41_eval_and_compare_take_a_folder(world: World, word: str) -> None:
    left_by_trl(world.root / "out", 0.5)
    write_model(world.root / "other", 0.9)
    path = word.format(root=world.root)
    told = world("eval", path, "heldout")
    assert told.exit_code == 0
    assert "not opened and not stored" in told.stdout + told.stderr
    world.ok("eval", "./other", "heldout")
    found = world.json("compare", path, "./other")
    assert [one["stages"] for one in found["subjects"]] == [["evaluate"], ["evaluate"]]
    assert "model:out" not in world.ok("asset", "ls"), "its bytes are stored under their digest, without a name"


def test_audit_41_compare_of_a_folder_that_nobody_measured_names_the_command(world: World) -> None:
    write_model(world.root / "out", 0.5)
    told = world("compare", "./out", "./out")
    assert (told.exit_code, len(told.stderr.splitlines())) == (2, 1)
    assert "was not evaluated; run posttrain eval FOLDER SUITE" in told.stderr


def test_audit_41_sample_reads_a_folder_where_it_lies(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left_by_trl(world.root / "out")
    asked: list[Mapping[str, Any]] = []

    def answers(program: str, request: Mapping[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
        asked.append(request)
        yield {}

    monkeypatch.setattr(foreground, "answers", answers)
    before = len(stored(world))
    told = world("sample", "out", "hello")
    assert told.exit_code == 0
    assert "not opened and not stored, not part of the model: checkpoint-10/, optimizer.pt" in told.stderr
    assert asked[0]["folder"] == str(folder)
    assert len(stored(world)) == before, "nothing is left behind"


def test_audit_41_a_run_and_a_channel_go_before_a_folder_of_their_name(world: World) -> None:
    run = world.ship()
    for name in ("prod", run):
        write_model(world.root / name, 0.5)
        assert world.json("eval", name, "heldout")["scores"] == {"evaluate/heldout/accuracy": 0.98}
        assert world.json("eval", f"./{name}", "heldout")["scores"] == {"evaluate/heldout/accuracy": 0.5}


def test_audit_41_a_client_sends_no_side_files_and_names_them(tmp_path: Path) -> None:
    said, sent = list[str](), list[str]()

    class Unsent(Sender):
        def put_file(self, path: Path) -> str:
            sent.append(path.name)
            return file_digest(path)

        def put(self, data: bytes) -> str:
            return digest_bytes(data)

    sender = Unsent(None, "default", said.append)  # type: ignore[arg-type]
    Bundle(sender).word("model", str(left_by_trl(tmp_path / "out")))
    assert sent == ["config.json", "model.safetensors"]
    assert "not opened and not stored, not part of the model: checkpoint-10/, optimizer.pt" in said[0]
