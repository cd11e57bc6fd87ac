"""Fetches a harness: its packages and the data of its tasks, pinned by digest in one folder (`domain.harnesses`).

The packages are installed by pip into a folder of the harness's own, so they and those of Posttrain never conflict; the
facts record the version and digest of each archive. The harness then loads its tasks once with the network, which
fetches their data, and once more without, which shows that a job needs no network. The archive of the packages is the
same for the same packages.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.harnesses import (
    DATA,
    FACTS,
    INSPECT,
    LM_EVAL,
    PACKAGES,
    PROGRAMS,
    SCHEMA,
    SITE,
    TASKS,
    Harness,
    this_python,
)
from posttrain.execution.processes import without_keys
from posttrain.foreign import harness_facts

VERSIONS: Mapping[str, str] = {LM_EVAL: "0.4.13", INSPECT: "0.3.285"}  # whose results `foreign.evaluations` reads
_NEEDED: Mapping[str, Sequence[str]] = {  # {} is the version
    LM_EVAL: ("lm-eval[api]=={}", "transformers>=5"),
    INSPECT: ("inspect-ai=={}", "openai>=3"),
}
_INSTALLING, _LOADING = 3600.0, 6 * 3600.0  # seconds
_SHOWN = 300  # characters of an error


def fetch_harness(
    program: str,
    tasks: Sequence[str],
    into: Path,
    *,
    version: str = "",
    include: Path | None = None,
    packages: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Harness:
    """Put a harness into an empty folder; return its facts.

    Args:
        tasks: tasks and groups of lm-eval, or tasks of Inspect.
        version: of the harness; "": the one with which Posttrain is tested.
        include: a folder with further tasks.
        packages: further requirements that the tasks need, as pip writes them.
        say: receives progress for a person.

    Raises:
        InputError: the harness, a package or a task does not exist, or the tasks need the network when they run.
    """
    if program not in PROGRAMS:
        raise InputError(f"harness must be one of {', '.join(PROGRAMS)}, got {program!r}{nearest(program, PROGRAMS)}")
    if not tasks:
        raise InputError("harness fetch: name at least one task, got none")
    if include is not None and not include.is_dir():
        raise InputError(f"--include: must be a folder with tasks, got {include}; check the path")
    chosen, site, data = version or VERSIONS[program], into / SITE, into / DATA
    say(f"installing {program} {chosen}")
    found = _install([one.format(chosen) for one in _NEEDED[program]] + list(packages), site, into / "report.json")
    if include is not None:
        shutil.copytree(include, into / TASKS, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    data.mkdir()
    place = into / TASKS if include is not None else into
    say(f"loading {', '.join(tasks)}")
    _load(program, tasks, site, data, place, offline=False)
    loaded = _load(program, tasks, site, data, place, offline=True)
    about = {"program": program, "version": chosen, "python": this_python(), "packages": found, "schema": SCHEMA}
    facts = Harness.from_json({**about, **loaded}, program)
    say("packing")
    _compile(site)
    _pack(site, into / PACKAGES)
    _settle(data)
    (into / "report.json").unlink()
    (into / FACTS).write_text(json.dumps(facts.to_json(), indent=1, sort_keys=True))
    return facts


def _install(requirements: Sequence[str], site: Path, report: Path) -> dict[str, tuple[str, str]]:
    """Install packages into a folder; return their versions and the digests of their archives.

    Raises:
        InputError: pip is missing or failed.
    """
    words = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    words += ["--no-input", "--target", str(site), "--report", str(report), *requirements]
    _run(words, dict(os.environ), _INSTALLING, "pip")
    found = {}
    for one in json.loads(report.read_text())["install"]:
        digest = one["download_info"].get("archive_info", {}).get("hashes", {}).get("sha256", "")
        found[one["metadata"]["name"]] = (one["metadata"]["version"], f"sha256:{digest}" if digest else "")
    return dict(sorted(found.items()))


def _load(program: str, tasks: Sequence[str], site: Path, data: Path, folder: Path, *, offline: bool) -> dict[str, Any]:
    """Return what the harness reports about its tasks.

    Raises:
        InputError: it cannot load them.
    """
    kept = {name: value for name, value in without_keys(os.environ).items() if not name.startswith("PYTHON")}
    token = {"HF_TOKEN": os.environ["HF_TOKEN"]} if "HF_TOKEN" in os.environ and not offline else {}
    places = {"PYTHONPATH": str(site), "HF_HOME": str(data), "PYTHONDONTWRITEBYTECODE": "1"}
    without = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"} if offline else {}
    words = [sys.executable, "-s", "-S", "-P", str(harness_facts.__file__), program, *tasks]
    who = f"{program}, without the network," if offline else program
    return dict(json.loads(_run(words, {**kept, **token, **places, **without}, _LOADING, who, folder)))


def _run(
    words: Sequence[str], environment: Mapping[str, str], seconds: float, who: str, folder: Path | None = None
) -> str:
    try:
        done = subprocess.run(
            words, env=environment, cwd=folder, capture_output=True, text=True, timeout=seconds, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise InputError(f"harness fetch: {who} did not end within {seconds:g} s; try again") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
        why = next((line for line in reversed(lines) if line.startswith("ERROR: ")), lines[-1])
        raise InputError(f"harness fetch: {who} failed: {why[:_SHOWN]}; correct the names, or check the network")
    return done.stdout


def _settle(data: Path) -> None:
    """Leave the files of a cache without links, locks and the copies to which the links lead."""
    for path in [*data.rglob("*")]:
        if path.is_symlink():
            target = path.resolve()
            path.unlink()
            shutil.copyfile(target, path)
        elif path.suffix == ".lock":
            path.unlink()
    for blobs in [*data.glob("hub/*/blobs"), *data.glob("hub/.locks")]:
        shutil.rmtree(blobs)


def _compile(site: Path) -> None:
    """Compile the packages, in files that are valid whatever the times of the sources are."""
    words = [sys.executable, "-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    words += ["-s", str(site), str(site)]
    # packages have files for other versions of Python, which cannot be compiled
    subprocess.run(words, capture_output=True, timeout=_INSTALLING, check=False)


def _pack(site: Path, archive: Path) -> None:
    """Move the packages into one archive, which depends on their names and contents only."""

    def plain(one: tarfile.TarInfo) -> tarfile.TarInfo:
        one.mtime = one.uid = one.gid = 0
        one.uname = one.gname = ""
        one.mode = 0o755 if one.isdir() or one.mode & 0o100 else 0o644
        return one

    with tarfile.open(archive, "w") as packed:
        packed.add(site, ".", filter=plain)
    shutil.rmtree(site)
