"""The environment that a run's jobs import from: pinned when its first job starts, compared before every other.

Of the installed packages those count that jobs of the run can import: Posttrain, what its rewards and dataflows import,
packages that add to one of these by entry points, and what all of them require.
"""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from posttrain.control.jobs import AttemptFolders, Jobs
from posttrain.control.stores import Stores
from posttrain.domain.errors import PosttrainError
from posttrain.domain.manifest import InputRef, Manifest
from posttrain.domain.sinks import RUN_ENVIRONMENT
from posttrain.execution.environment import normalised, pin, pinned, read_environment
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.store.trees import tree_listing

_RECORD = "environment.json"  # in a run's folder: {"digest"}
_CODE = ("reward", "recipe")  # slots; a run's rewards with weights are `rewards.NAME`


def differs(stores: Stores, jobs: Jobs, manifest: Manifest, run_id: str) -> str:
    """How the present environment differs from the run's, in one line; empty where it does not, or nobody compares."""
    if not jobs.executor.attests:
        return ""
    cache, record = jobs.folders.root / "cache", _record(jobs.folders, run_id)
    known = read_json(record)
    before = pinned(str(known["digest"]), cache) if known else None
    imported = imported_by(stores, manifest)
    packages = (
        before.packages if before else tuple(sorted(closure({name for own in imported.values() for name in own})))
    )
    # takes seconds: the workspace may be gone
    present = read_environment(packages=packages, known=before.files if before else ())
    make_folder(cache, within=jobs.folders.root)
    if known is None:
        pin(present, cache)
        make_folder(record.parent, within=jobs.folders.root)
        told = stores.ledger.events_about(run_id, RUN_ENVIRONMENT)  # by a driver that died before it wrote the record
        if not told or told[-1].payload["digest"] != present.digest:
            payload = {"digest": present.digest, "packages": _versions(imported)}
            with stores.ledger.transaction(stores.actor) as transaction:
                transaction.append_event(RUN_ENVIRONMENT, run_id, payload)
        write_json(record, {"digest": present.digest})
        return ""
    if present.digest == known["digest"]:
        pin(present, cache)  # the cache may be emptied at any time
        return ""
    what = present.differs(before) if before else "another one"
    return f"the environment must be the one that the run began with, got {what}"


def imported_by(stores: Stores, manifest: Manifest) -> dict[str, set[str]]:
    """Each reward and dataflow of a run → names of the installed packages that its sources import."""
    owners = importlib.metadata.packages_distributions()
    found: dict[str, set[str]] = {}
    for _, slot, ref in manifest.assets():
        if slot.partition(".")[0].rstrip("s") in _CODE:
            for source in _sources(stores, ref):
                own = (owner for module in _modules(source) for owner in owners.get(module, ()))
                found.setdefault(ref.name, set()).update(own)
    return found


def _versions(imported: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    return {
        name: [f"{package} {importlib.metadata.version(package)}" for package in sorted(packages)]
        for name, packages in imported.items()
        if packages
    }


def closure(names: set[str]) -> set[str]:
    """Normalised names of Posttrain, of these packages, of those that add to one of them by entry points, and of
    everything that they require here. Extras count where they are asked for.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    adding: dict[str, set[str]] = {}  # the first word of an entry point's group → packages that have one
    for package in importlib.metadata.distributions():
        for group in {entry.group for entry in package.entry_points}:
            adding.setdefault(normalised(group.partition(".")[0]), set()).add(package.name)
    waiting, seen = [("posttrain", "ray"), *((name, "") for name in ("posttrain", *names))], set[tuple[str, str]]()
    while waiting:
        name, extra = waiting.pop()
        if (normalised(name), extra) in seen:
            continue
        seen.add((normalised(name), extra))
        waiting += [(other, "") for other in adding.get(normalised(name), ())]
        try:
            required = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in required:
            try:
                one = Requirement(text)
            except InvalidRequirement:
                continue
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                waiting += [(one.name, wanted) for wanted in ("", *one.extras)]
    return {name for name, _ in seen}


def _sources(stores: Stores, ref: InputRef) -> Iterator[bytes]:
    try:
        if ref.form == "file":
            yield stores.blobs.get(str(ref.digest))
            return
        for name, file in tree_listing(stores.blobs, str(ref.digest)).items():
            if name.endswith(".py"):
                yield stores.blobs.get(file.digest)
    except PosttrainError:
        return  # whoever runs it says what is missing


def _modules(source: bytes) -> Iterator[str]:
    """First words of the modules that a source names in its imports, also inside functions."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def ordered(jobs: Jobs, run_id: str) -> str:
    """The digest that a job of the run must find; empty: it need not compare."""
    known = read_json(_record(jobs.folders, run_id)) if jobs.executor.attests else None
    return str(known["digest"]) if known else ""


def accept(folders: AttemptFolders, run_id: str) -> None:
    """A person lets the run go on: the next job pins what is there then."""
    _record(folders, run_id).unlink(missing_ok=True)


def _record(folders: AttemptFolders, run_id: str) -> Path:
    return folders.root / "runs" / run_id / _RECORD
