"""The environment that a run's jobs import from: pinned when its first job starts, compared before every other."""

from __future__ import annotations

from pathlib import Path

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.execution.environment import pin, pinned, read_environment
from posttrain.store.atomic import make_folder, read_json, write_json

_RECORD = "environment.json"  # in a run's folder: {"digest"}


def differs(jobs: Jobs, run_id: str) -> str:
    """How the present environment differs from the run's, in one line; empty where it does not, or nobody compares."""
    if not jobs.executor.attests:
        return ""
    present = read_environment()  # takes seconds: the workspace may be gone
    known = read_json(_record(jobs.folders, run_id))
    make_folder(jobs.folders.root / "cache", within=jobs.folders.root)
    if known is None:
        pin(present, jobs.folders.root / "cache")
        make_folder(_record(jobs.folders, run_id).parent, within=jobs.folders.root)
        write_json(_record(jobs.folders, run_id), {"digest": present.digest})
        return ""
    if present.digest == known["digest"]:
        pin(present, jobs.folders.root / "cache")  # the cache may be emptied at any time
        return ""
    before = pinned(str(known["digest"]), jobs.folders.root / "cache")
    what = present.differs(before) if before else "another one"
    return f"the environment must be the one that the run began with, got {what}"


def ordered(jobs: Jobs, run_id: str) -> str:
    """The digest that a job of the run must find; empty: it need not compare."""
    known = read_json(_record(jobs.folders, run_id)) if jobs.executor.attests else None
    return str(known["digest"]) if known else ""


def accept(folders: AttemptFolders, run_id: str) -> None:
    """A person lets the run go on: the next job pins what is there then."""
    _record(folders, run_id).unlink(missing_ok=True)


def _record(folders: AttemptFolders, run_id: str) -> Path:
    return folders.root / "runs" / run_id / _RECORD
