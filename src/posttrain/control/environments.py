"""The environment that a run's jobs import from: pinned when its first job starts, compared before every other."""

from __future__ import annotations

from pathlib import Path

from posttrain.control.wiring import Wiring
from posttrain.execution.environment import pin, pinned, read_environment
from posttrain.store.atomic import make_folder, read_json, write_json

_RECORD = "environment.json"  # in a run's folder: {"digest"}


def differs(wiring: Wiring, run_id: str) -> str:
    """How the present environment differs from the run's, in one line; empty where it does not, or nobody compares."""
    if not wiring.executor.attests:
        return ""
    present, known = read_environment(), read_json(_record(wiring, run_id))  # takes seconds: the workspace may be gone
    make_folder(wiring.root / "cache", within=wiring.root)
    if known is None:
        pin(present, wiring.root / "cache")
        make_folder(_record(wiring, run_id).parent, within=wiring.root)
        write_json(_record(wiring, run_id), {"digest": present.digest})
        return ""
    if present.digest == known["digest"]:
        pin(present, wiring.root / "cache")  # the cache may be emptied at any time
        return ""
    before = pinned(str(known["digest"]), wiring.root / "cache")
    what = present.differs(before) if before else "another one"
    return f"the environment must be the one that the run began with, got {what}"


def ordered(wiring: Wiring, run_id: str) -> str:
    """The digest that a job of the run must find; empty: it need not compare."""
    known = read_json(_record(wiring, run_id)) if wiring.executor.attests else None
    return str(known["digest"]) if known else ""


def accept(wiring: Wiring, run_id: str) -> None:
    """A person lets the run go on: the next job pins what is there then."""
    _record(wiring, run_id).unlink(missing_ok=True)


def _record(wiring: Wiring, run_id: str) -> Path:
    return wiring.root / "runs" / run_id / _RECORD
