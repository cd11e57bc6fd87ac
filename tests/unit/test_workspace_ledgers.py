"""A workspace remembers where its ledger is. What needs a server: tests/contract/test_workspace_ledger.py."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing, nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from posttrain.app.workspace import has_ledger, init_workspace, open_workspace
from posttrain.cli.main import app
from posttrain.domain.errors import InputError, WorkspaceError
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger
from posttrain.workspace.settings import bind

ADDRESS = "postgresql://ann@localhost:1/ledger"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POSTTRAIN_STORE", "POSTTRAIN_WORKSPACE", "POSTTRAIN_LEDGER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)  # nothing here gets as far as a server


@pytest.mark.parametrize(
    "address",
    [
        "mysql://ann@host/x",
        "ledger.db",
        "postgresql://ann@host",
        "postgresql://ann@host:port/x",
        "postgresql://ann:hidden@host/x",
        "postgres://ann@host/x?password=hidden",
        "postgresql+psycopg://ann@host/x?sslpassword=hidden",
    ],
)
@pytest.mark.parametrize("by", ["option", "environment"])
def test_what_is_no_address_or_holds_a_password_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, by: str
) -> None:
    if by == "environment":
        monkeypatch.setenv("POSTTRAIN_LEDGER", address)
    with pytest.raises(InputError) as caught:
        init_workspace(tmp_path, ledger=address if by == "option" else None)
    assert "hidden" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_option_reaches_the_workspace(tmp_path: Path) -> None:
    ended = CliRunner().invoke(app, ["init", str(tmp_path), "--ledger", "mysql://ann:hidden@host/x"])
    assert ended.exit_code == 2
    assert "ledger address must be postgresql://user@host/database, got 'mysql://…'" in " ".join(ended.stderr.split())
    assert list(tmp_path.iterdir()) == []


def test_a_ledger_that_cannot_be_opened_leaves_no_half_workspace(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match="its driver is not installed; pip install"):
        init_workspace(tmp_path, ledger=ADDRESS)
    assert list(tmp_path.iterdir()) == []
    init_workspace(tmp_path).close()


def test_a_workspace_with_its_own_ledger_takes_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_workspace(tmp_path).close()
    with pytest.raises(WorkspaceError) as caught:
        init_workspace(tmp_path, ledger=ADDRESS)
    root = (tmp_path / ".posttrain").resolve()
    assert str(caught.value) == (
        f"{root}: its ledger is {root / 'ledger.db'}, but --ledger names {ADDRESS}; remove --ledger "
        "(or unset POSTTRAIN_LEDGER), or create another workspace"
    )
    monkeypatch.setenv("POSTTRAIN_LEDGER", ADDRESS)
    with pytest.raises(WorkspaceError, match="POSTTRAIN_LEDGER names"):
        open_workspace(tmp_path)


def test_a_folder_that_names_a_ledger_elsewhere_is_a_workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    init_workspace(tmp_path).close()
    root = tmp_path / ".posttrain"
    (root / "ledger.db").unlink()
    assert not has_ledger(root)
    settings = json.loads((root / "workspace.json").read_text())
    (root / "workspace.json").write_text(json.dumps({**settings, "ledger": ADDRESS}))
    assert has_ledger(root)
    for again in ("postgres://ann@localhost:1/ledger", ADDRESS, "postgresql+psycopg://ann@localhost:1/ledger"):
        monkeypatch.setenv("POSTTRAIN_LEDGER", again)
        with pytest.raises(WorkspaceError, match="its driver is not installed"):
            open_workspace(tmp_path)
    monkeypatch.setenv("POSTTRAIN_LEDGER", ADDRESS + "2")
    with pytest.raises(WorkspaceError, match=f"its ledger is {ADDRESS}, but POSTTRAIN_LEDGER names {ADDRESS}2"):
        open_workspace(tmp_path)


@pytest.mark.parametrize("named", [7, ["x"], "mysql://ann@host/x"])
def test_a_damaged_record_is_named(tmp_path: Path, named: object) -> None:
    init_workspace(tmp_path).close()
    root = tmp_path / ".posttrain"
    settings = json.loads((root / "workspace.json").read_text())
    (root / "workspace.json").write_text(json.dumps({**settings, "ledger": named}))
    with pytest.raises((WorkspaceError, InputError), match="ledger"):
        open_workspace(tmp_path)
    shutil.rmtree(root)


def test_a_copied_workspace_is_refused_and_a_moved_one_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two folders of jobs in one ledger would lose each other's attempts."""
    monkeypatch.setattr(Database, "alone", lambda self: nullcontext())  # SQLite has one writer anyway
    first, second = tmp_path / "first", tmp_path / "second"
    for root in (first, second):
        root.mkdir()
        (root / "workspace.json").write_text('{"id": "same"}')
    with closing(Ledger(Database(tmp_path / "l.db"))) as ledger:
        for _ in range(2):
            bind(ledger, first, "same", "user:ann")
        with pytest.raises(WorkspaceError, match=r"is a copy of the workspace .*:.*first, which has the ledger"):
            bind(ledger, second, "same", "user:ann")
        (first / "workspace.json").unlink()  # moved
        bind(ledger, second, "same", "user:ann")
        assert len(ledger.pending_events("workspace")) == 2
