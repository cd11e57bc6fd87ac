"""A workspace remembers where its artifacts are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from posttrain.app.workspace import Workspace, init_workspace, open_workspace
from posttrain.domain.errors import InputError, WorkspaceError


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POSTTRAIN_STORE", "POSTTRAIN_WORKSPACE"):
        monkeypatch.delenv(name, raising=False)


def stored(workspace: Workspace) -> str:
    """Store a blob; where."""
    workspace.blobs.put(b"artifact")
    url = workspace.blobs.url
    workspace.close()
    return url


def test_the_store_of_init_is_used_ever_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    monkeypatch.setenv("POSTTRAIN_STORE", str(elsewhere))
    url = stored(init_workspace(tmp_path))
    assert url == elsewhere.as_uri()
    for value in (None, str(elsewhere), elsewhere.as_uri(), f"{elsewhere}/"):
        if value is None:
            monkeypatch.delenv("POSTTRAIN_STORE")
        else:
            monkeypatch.setenv("POSTTRAIN_STORE", value)
        assert stored(open_workspace(tmp_path)) == url
        assert stored(init_workspace(tmp_path)) == url
    record = json.loads((tmp_path / ".posttrain" / "workspace.json").read_text())
    (user,) = (elsewhere / "workspaces").iterdir()  # whoever deletes from the store knows all who use it
    assert (user.name, user.read_text()) == (record.pop("id"), str((tmp_path / ".posttrain").resolve()))
    assert record == {"format": "posttrain.workspace/1", "store": url}


@pytest.mark.parametrize("first", [None, "one"])
def test_another_store_later_is_an_error_that_names_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str | None
) -> None:
    if first:
        monkeypatch.setenv("POSTTRAIN_STORE", str(tmp_path / first))
    url = stored(init_workspace(tmp_path))
    monkeypatch.setenv("POSTTRAIN_STORE", str(tmp_path / "two"))
    for reopen in (open_workspace, init_workspace):
        with pytest.raises(WorkspaceError) as caught:
            reopen(tmp_path)
        assert url in str(caught.value)
        assert (tmp_path / "two").as_uri() in str(caught.value)
    assert not (tmp_path / "two").exists()


def test_a_workspace_with_its_own_store_can_be_moved(tmp_path: Path) -> None:
    stored(init_workspace(tmp_path / "here"))
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert stored(open_workspace(tmp_path / "there")) == (tmp_path / "there/.posttrain/blobs").as_uri()


@pytest.mark.parametrize("url", ["s3://key:secret@bucket/x", "s3://key@bucket", "az://box/x?sig=secret"])
def test_no_secret_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("POSTTRAIN_STORE", url)
    with pytest.raises(InputError, match="must not contain credentials") as caught:
        init_workspace(tmp_path)
    assert "secret" not in str(caught.value)
    assert not (tmp_path / ".posttrain").exists()


def test_a_store_that_cannot_be_opened_leaves_no_half_workspace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POSTTRAIN_STORE", "foo://bar")
    with pytest.raises(InputError, match="foo://bar"):
        init_workspace(tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("POSTTRAIN_STORE")
    stored(init_workspace(tmp_path))


@pytest.mark.parametrize("text", ["[]", "{}"])
def test_a_damaged_record_is_named(tmp_path: Path, text: str) -> None:
    stored(init_workspace(tmp_path))
    (tmp_path / ".posttrain" / "workspace.json").write_text(text)
    with pytest.raises(WorkspaceError, match=r"workspace.json: must name the artifact store"):
        open_workspace(tmp_path)
