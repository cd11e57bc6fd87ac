"""How a person names an asset: `dataset:sort-train@1`, `model:tiny-sort`, `./heldout.jsonl`, `hf:org/name@revision`,
`hf:org/name@revision/path/in/repo.jsonl`; and a model that this workspace made: `channel:prod`, `channel:prod@3`,
`run:sort-b0ed9b49/sft`, `model:sort/sft@2`; and a reward of an installed package, `trl.rewards:accuracy_reward`. A data
set's path may be a folder or a pattern: `./shards/train-*.jsonl`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path

from posttrain.data.confining import refuse_elsewhere
from posttrain.data.parts import PACKED, SUFFIXES, is_pattern
from posttrain.data.signatures import WORD
from posttrain.domain.errors import InputError, NotFoundError, nearest

KINDS = ("dataset", "model", "reward", "history")
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_TRAINED = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}/[a-z0-9][a-z0-9._-]{0,62}(/best)?")  # a run's name, a stage of it
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FOLDERS = {"dataset": "datasets", "model": "models"}
_MADE = {"channel": NAME, "run": re.compile(r"[a-z0-9][a-z0-9._-]{0,79}")}  # models of the workspace; their names


class Source(StrEnum):
    """Where a referenced thing lies."""

    REGISTRY = "registry"  # a version registered in this workspace
    PATH = "path"  # a local file or folder
    HUB = "hub"  # the local cache of the Hugging Face hub
    CHANNEL = "channel"  # what a release channel of this workspace points at, or pointed at
    RUN = "run"  # what a stage of a run of this workspace made
    MODULE = "module"  # a reward that an installed package has


@dataclass(frozen=True, slots=True)
class AssetRef:
    """A parsed reference: `AssetRef("dataset", Source.REGISTRY, "sort-train", version=1)`."""

    kind: str
    source: Source
    name: str  # registry name, path or module as written, org/name on the hub, channel, or run (id, prefix of it, name)
    version: int | None = None  # registry: None is the latest; channel: the release number, None is the live one
    revision: str | None = None  # hub only
    file: str | None = None  # hub data sets only: a file, folder or pattern in the repository; None: all of it
    stage: str | None = None  # run only; None: the one whose model the run is for

    @property
    def made(self) -> bool:
        """Whether it names what a run made: by a channel, by the run, or as a version that a stage trained."""
        return self.source in (Source.CHANNEL, Source.RUN) or (self.source is Source.REGISTRY and "/" in self.name)

    @property
    def on_disk(self) -> bool:
        """Whether its files lie outside the workspace, where they were named."""
        return self.source in (Source.PATH, Source.HUB)

    def __str__(self) -> str:
        if self.source is Source.HUB:
            return f"hf:{self.name}@{self.revision}" + (f"/{self.file}" if self.file else "")
        if self.source in (Source.PATH, Source.MODULE):
            return self.name
        if self.source is Source.RUN:
            return f"run:{self.name}" + (f"/{self.stage}" if self.stage else "")
        head = "channel" if self.source is Source.CHANNEL else self.kind
        return f"{head}:{self.name}" + (f"@{self.version}" if self.version is not None else "")


def parse_ref(text: str, kind: str) -> AssetRef:
    """Read a reference where an asset of `kind` is expected.

    A text with a slash, a leading dot or tilde, or a suffix of a known file type is a path.

    Raises:
        InputError: an unknown or other kind (with the nearest known one), an ill-formed name or version, a hub
        reference
            without revision.
    """
    if kind not in KINDS:
        raise InputError(f"asset kind must be one of {', '.join(KINDS)}, got {kind!r}{nearest(kind, KINDS)}")
    head, colon, rest = text.partition(":")
    if colon and head == "hf":
        return _hub_ref(rest, kind, text)
    if colon and head in _MADE:
        return _made_ref(Source(head), rest, kind, text)
    name, at, version = rest.partition("@")
    trained = head == kind == "model" and _TRAINED.fullmatch(name)
    if _is_path(text) and not trained:
        return AssetRef(kind, Source.PATH, text)
    if not colon:
        raise InputError(
            f"ref must be kind:name@version, hf:org/name@revision or a path, got {text!r}; write {kind}:{text}"
        )
    if kind == "reward" and WORD.fullmatch(text) and ("." in head or not get_close_matches(head, KINDS)):
        return AssetRef(kind, Source.MODULE, text)
    if head not in KINDS:
        raise InputError(f"ref {text!r}: unknown kind {head!r}{nearest(head, KINDS)}; expected {kind}:NAME@VERSION")
    if head != kind:
        raise InputError(f"ref {text!r}: a {kind} is expected here, got a {head}; write {kind}:NAME@VERSION")
    if not (NAME.fullmatch(name) or trained):
        raise InputError(f"ref {text!r}: name must match {NAME.pattern}, got {name!r}")
    return AssetRef(kind, Source.REGISTRY, name, _number("version", version, text) if at else None)


def _number(what: str, written: str, text: str) -> int:
    if not (written.isascii() and written.isdigit() and len(written) <= 9 and int(written) >= 1):
        raise InputError(f"ref {text!r}: {what} must be a whole number >= 1, got {written!r}")
    return int(written)


def _made_ref(source: Source, rest: str, kind: str, text: str) -> AssetRef:
    """`channel:NAME[@RELEASE]` or `run:RUN[/STAGE]`."""
    if kind != "model":
        raise InputError(f"ref {text!r}: a {kind} is expected here, and a {source} names a model; write {kind}:NAME")
    name, mark, more = rest.partition("@" if source is Source.CHANNEL else "/")
    if not _MADE[source].fullmatch(name) or (mark and not more):
        form = "channel:NAME or channel:NAME@RELEASE" if source is Source.CHANNEL else "run:RUN or run:RUN/STAGE"
        raise InputError(f"ref {text!r}: must be {form}, got {rest!r}")
    if source is Source.CHANNEL:
        return AssetRef(kind, source, name, version=_number("release", more, text) if mark else None)
    return AssetRef(kind, source, name, stage=more or None)


def _hub_ref(rest: str, kind: str, text: str) -> AssetRef:
    name, _, revision = rest.partition("@")
    if kind not in _HUB_FOLDERS:
        raise InputError(f"ref {text!r}: a {kind} cannot come from the hub; give a Python file or {kind}:NAME@VERSION")
    if not _HUB_NAME.fullmatch(name):
        raise InputError(f"ref {text!r}: must be hf:org/name@revision, got name {name!r}")
    file = None
    if kind == "dataset":  # a repository holds several files: one is the data set
        revision, slash, file = revision.partition("/")
        file = file if slash else None
    if not revision:
        raise InputError(f"ref {text!r}: a hub ref must name its revision, got none; write hf:{name}@COMMIT")
    if file is not None and not all(part not in ("", ".", "..") for part in file.split("/")):
        raise InputError(f"ref {text!r}: must name a file, got {file!r}; write hf:{name}@{revision}/PATH/IN/REPO.jsonl")
    return AssetRef(kind, Source.HUB, name, revision=revision, file=file)


def _is_path(text: str) -> bool:
    return text.startswith((".", "~", "/")) or "/" in text or text.endswith((*SUFFIXES, *PACKED, ".py"))


def local_path(ref: AssetRef, base: Path, environment: Mapping[str, str] = os.environ) -> Path:
    """Where the files of a path or hub reference lie on this machine.

    Args:
        base: folder that relative paths are relative to: the run file's.
        environment: read for the hub's cache folder (HF_HUB_CACHE, HF_HOME).

    Raises:
        InputError: a registry reference, which has no path.
        NotFoundError: no such file; for the hub, with the command that fetches it.
    """
    if not ref.on_disk:
        raise InputError(f"ref {ref} names what is in the workspace, not a file")
    if ref.source is Source.PATH:
        try:
            path = base / Path(ref.name).expanduser()
            refuse_elsewhere(ref.name, path)
            there = path.exists() or (ref.kind == "dataset" and is_pattern(path))
        except (OSError, RuntimeError, ValueError) as error:  # too long a name, a folder closed to us, no such ~user
            raise InputError(f"{ref.kind} {ref.name[:60]}: is no path that can be read: {error}") from error
        if not there:
            hub = ref.kind in _HUB_FOLDERS and ref.name.count("/") == 1 and _HUB_NAME.fullmatch(ref.name)
            way = f"write hf:{ref.name}@REVISION for the hub's, or " if hub else ""
            raise NotFoundError(f"{ref.kind} {ref.name}: no such file or folder ({path}); {way}check the path")
        return path
    return _hub_snapshot(ref, environment)


def _hub_snapshot(ref: AssetRef, environment: Mapping[str, str]) -> Path:
    home = Path(environment.get("HF_HOME") or Path(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    cache = Path(environment.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = cache / f"{_HUB_FOLDERS[ref.kind]}--{ref.name.replace('/', '--')}"
    revision = ref.revision or ""
    if ".." in revision.split("/") or revision.startswith("/"):
        raise InputError(f"ref {ref}: revision must be a commit, branch or tag, got {revision!r}")
    pointer = folder / "refs" / revision
    commit = pointer.read_text().strip() if pointer.is_file() else revision
    snapshot = folder / "snapshots" / commit
    found = snapshot / ref.file if ref.file else snapshot
    there = any(found.parent.glob(found.name)) if is_pattern(found) else found.exists() if ref.file else found.is_dir()
    if not there:
        only = f" --include '{ref.file}'" if is_pattern(found) else f" {ref.file}" if ref.file else ""
        what = f"--repo-type dataset {ref.name}{only}" if ref.kind == "dataset" else ref.name
        command = f"hf download {what} --revision {revision}"
        raise NotFoundError(f"ref {ref}: not in the local cache {cache}; fetch it with: {command}")
    return found
