"""Data and model folders that somebody else made: what is wrong with them is one line, before anything is stored."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world

from posttrain.data.assets import ModelLimits, inspect_model
from posttrain.data.files import file_format, read_file
from posttrain.domain.errors import InputError


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def refused(world: World, *words: str) -> str:
    found = world(*words)
    assert found.exit_code == 2, (found.stdout, found.stderr, found.exception)
    return str(found.stderr)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (b"\0" * 4096, "must be text .* got a NUL byte"),
        ('{"prompt": "a"}\n'.encode("utf-16"), "must be text .* got a NUL byte"),
        (bytes(range(128, 256)) * 8, "must be UTF-8, got byte 0x80"),
        (b'"a\r\rb', "is not CSV|must be JSON"),
        (b'{"prompt": "caf\xe9"}\n', "must be one JSON object per line|must be UTF-8"),
    ],
    ids=["NULs", "UTF-16", "bytes", "quotes", "latin-1"],
)
def test_audit_22_data_that_is_not_text_is_refused_in_one_line(data: bytes, line: str, tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(data)
    with pytest.raises(InputError, match=line) as caught:
        list(read_file(path, "rows"))
    assert "\n" not in str(caught.value)
    if data.startswith(b"\0"):
        with pytest.raises(InputError, match="NUL"):
            file_format(path)


def test_audit_22_a_file_of_nuls_is_refused_by_the_command_and_nothing_is_written(world: World) -> None:
    world.ok("init")
    Path("zeros.jsonl").write_bytes(b"\0" * 1000)
    found = refused(world, "asset", "add", "dataset:d", "zeros.jsonl")
    assert "zeros.jsonl must be text (JSON lines, a JSON list or CSV in UTF-8)" in found
    assert "no assets yet" in world.ok("asset", "ls")


def weights(path: Path, header: dict[str, Any], size: int) -> None:
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data + bytes(size))


def tensor(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["A"], "model_type": "a"}))
    weights(folder / "model.safetensors", {"a": tensor(0, 8, [2]), "b": tensor(8, 24, [2, 2])}, 24)
    return folder


@pytest.mark.parametrize(
    ("header", "size"),
    [
        ({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, 12),
        ({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}, 8),
        ({"a": tensor(0, 8, [2]), "b": tensor(12, 20, [2])}, 20),
        ({"a": tensor(4, 12, [2])}, 12),
        ({"a": tensor(0, 8, [3])}, 8),
        ({"a": tensor(0, 8, [2], "F8_E4M3")}, 8),
    ],
    ids=["overlap", "the same", "gap", "hole at the beginning", "shape", "width"],
)
def test_audit_22_tensors_that_overlap_or_leave_gaps_are_refused(
    model: Path, header: dict[str, Any], size: int
) -> None:
    assert inspect_model(model)["parameters"] == 6
    weights(model / "model.safetensors", header, size)
    with pytest.raises(
        InputError, match=r"model\.safetensors is not safetensors: [ab] must have \d+ bytes from offset \d+"
    ):
        inspect_model(model)


def by_name(path: Path) -> None:
    path.with_suffix(".pt").write_bytes(b"anything")


def by_content(path: Path) -> None:
    path.with_suffix(".json").write_bytes(pickle.dumps({"a": 1}))


def in_an_archive(path: Path) -> None:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("archive/data.pkl", b"x")
    path.with_suffix(".weights").write_bytes(held.getvalue())


@pytest.mark.parametrize("put", [by_name, by_content, in_an_archive])
@pytest.mark.parametrize("depth", [0, 3])
def test_audit_22_pickles_are_refused_at_any_depth(model: Path, put: Callable[[Path], None], depth: int) -> None:
    folder = model.joinpath(*["below"] * depth)
    folder.mkdir(parents=True, exist_ok=True)
    put(folder / "odd")
    with pytest.raises(InputError, match=r"must not contain pickled files, got (below/){0,3}odd\.\w+; convert it"):
        inspect_model(model)


def test_audit_22_a_model_folder_has_limits_that_a_workspace_sets(model: Path, world: World) -> None:
    for limits, line in (
        (ModelLimits(files=1), "at most 1 files, got more; .* posttrain init --model-limit files=N"),
        (ModelLimits(bytes=100), "at most 100 bytes, got more; .* bytes=N"),
    ):
        with pytest.raises(InputError, match=line):
            inspect_model(model, limits)
    model.joinpath(*["d"] * 20).mkdir(parents=True)
    with pytest.raises(InputError, match="must nest at most 16 folders, got more"):
        inspect_model(model)
    world.ok("init", "--model-limit", "depth=30", "--model-limit", "files=3")
    assert "model:m@1" in world.ok("asset", "add", "model:m", str(model))
    (model / "more").touch()
    (model / "yet_more").touch()
    assert "at most 3 files, got more" in refused(world, "asset", "add", "model:m", str(model))
    for odd in ("files=many", "files=0", "names=3"):
        assert "model" in refused(world, "init", "--model-limit", odd)
    world.ok("init", "--model-limit", "none")
    assert "at most 16 folders" in refused(world, "asset", "add", "model:m", str(model))
