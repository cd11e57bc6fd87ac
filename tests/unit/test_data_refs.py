"""References as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from posttrain.data.refs import KINDS, AssetRef, Source, local_path, parse_ref
from posttrain.domain.errors import InputError, NotFoundError


@pytest.mark.parametrize(
    ("text", "kind", "expected"),
    [
        ("dataset:sort-train@1", "dataset", AssetRef("dataset", Source.REGISTRY, "sort-train", version=1)),
        ("model:tiny-sort", "model", AssetRef("model", Source.REGISTRY, "tiny-sort")),
        ("./data/train.jsonl", "dataset", AssetRef("dataset", Source.PATH, "./data/train.jsonl")),
        ("train.parquet", "dataset", AssetRef("dataset", Source.PATH, "train.parquet")),
        ("/models/tiny", "model", AssetRef("model", Source.PATH, "/models/tiny")),
        ("hf:org/name@v1.0", "model", AssetRef("model", Source.HUB, "org/name", revision="v1.0")),
        ("hf:org/name@refs/pr/1", "model", AssetRef("model", Source.HUB, "org/name", revision="refs/pr/1")),
        (
            "hf:org/name@v1.0/data/train.jsonl",
            "dataset",
            AssetRef("dataset", Source.HUB, "org/name", revision="v1.0", file="data/train.jsonl"),
        ),
    ],
)
def test_parsed_and_printed_back(text: str, kind: str, expected: AssetRef) -> None:
    ref = parse_ref(text, kind)
    assert ref == expected
    assert str(ref) == text


@pytest.mark.parametrize(
    ("text", "kind", "match"),
    [
        ("datset:x@1", "dataset", r"unknown kind 'datset' \(did you mean 'dataset'\?\)"),
        ("model:x", "dataset", "expected a dataset, got a model"),
        ("tiny-sort", "model", "write model:tiny-sort"),
        ("", "model", "must be kind:name@version"),
        ("dataset:", "dataset", "name must match"),
        ("dataset:Sort Train", "dataset", "name must match"),
        ("dataset:x@", "dataset", "version must be a whole number >= 1, got ''"),
        ("dataset:x@0", "dataset", "version must be a whole number >= 1, got '0'"),
        ("dataset:x@latest", "dataset", "got 'latest'"),
        ("hf:org/name", "model", "must name its revision"),
        ("hf:org/name@", "model", "must name its revision"),
        ("hf:org/name@/x.jsonl", "dataset", "must name its revision"),
        ("hf:org/name@v1/", "dataset", "must name a file, got ''; write hf:org/name@v1/PATH/IN/REPO.jsonl"),
        ("hf:org/name@v1/../x.jsonl", "dataset", "must name a file, got '../x.jsonl'"),
        ("hf:org/name@v1//etc/passwd", "dataset", "must name a file, got '/etc/passwd'"),
        ("hf:../../x@1", "model", "must be hf:org/name@revision"),
        ("hf:org/name@1", "reward", "cannot come from the hub"),
        ("model:x", "modle", r"asset kind must be one of .*did you mean 'model'"),
    ],
)
def test_refused_in_one_line(text: str, kind: str, match: str) -> None:
    with pytest.raises(InputError, match=match) as caught:
        parse_ref(text, kind)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(KINDS), st.from_regex(r"[a-z0-9][a-z0-9_-]{0,20}", fullmatch=True), st.integers(1, 10**6))
def test_registry_refs_round_trip(kind: str, name: str, version: int) -> None:
    ref = AssetRef(kind, Source.REGISTRY, name, version)
    assert parse_ref(str(ref), kind) == ref


@given(st.text(max_size=30), st.sampled_from(KINDS))
def test_any_text_is_a_ref_or_an_input_error(text: str, kind: str) -> None:
    try:
        assert parse_ref(text, kind).kind == kind
    except InputError:
        return


def test_paths_are_relative_to_the_run_file(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").touch()
    assert local_path(parse_ref("./d.jsonl", "dataset"), tmp_path) == tmp_path / "d.jsonl"
    with pytest.raises(NotFoundError, match="no such file or folder"):
        local_path(parse_ref("./absent.jsonl", "dataset"), tmp_path)
    with pytest.raises(InputError, match="names an asset of the workspace"):
        local_path(parse_ref("dataset:x", "dataset"), tmp_path)


def test_hub_refs_come_from_the_local_cache_only(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "abc123"
    snapshot.mkdir(parents=True)
    pointer = tmp_path / "hub" / "models--org--name" / "refs" / "main"
    pointer.parent.mkdir()
    pointer.write_text("abc123")
    environment = {"HF_HOME": str(tmp_path)}
    for revision in ("abc123", "main"):
        assert local_path(parse_ref(f"hf:org/name@{revision}", "model"), tmp_path, environment) == snapshot
    with pytest.raises(NotFoundError, match="fetch it with: hf download org/name --revision v9"):
        local_path(parse_ref("hf:org/name@v9", "model"), tmp_path, environment)
    with pytest.raises(NotFoundError, match=r"hf download --repo-type dataset org/name a/b\.jsonl --revision abc123"):
        local_path(
            parse_ref("hf:org/name@abc123/a/b.jsonl", "dataset"), tmp_path, {"HF_HUB_CACHE": str(tmp_path / "hub")}
        )
    with pytest.raises(InputError, match="revision must be a commit, branch or tag"):
        local_path(parse_ref("hf:org/name@../../x", "model"), tmp_path, environment)
