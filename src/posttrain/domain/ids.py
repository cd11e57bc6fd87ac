"""Checked types of ids and names that come from outside, principals, roles, and names of lock files.

Whatever makes a path, a folder or a query of an outside name has it checked. A parameter of a verb is annotated with
one of the types below; `api.guarding` checks it for every caller, in process and over HTTP. All of them are one
printable word that is part of a path: no `..`, slash, NUL or other control character, and no more characters than a
name has.

Principals act: `user:ann`, `service:ci`. The rules for their names are here, and which principals a person's word may
mean. Each role in a project may do what those before it may. Names of lock files are known before anything of a
workspace is loaded.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from posttrain.domain.errors import InputError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN = 80  # characters of what was given
DRIVER = "service:posttrain"  # who acts where no person does: the server's driver and upgrades; never logs in
NOBODY = "erased:"  # how the name of an erased principal begins; its id follows
FORM = "user:NAME or service:NAME, without spaces around it and without line breaks"
_KINDS = ("user", "service")
_LONGEST = 200  # characters of a name
SERVER_VARIABLE, PROJECT_VARIABLE = "POSTTRAIN_SERVER", "POSTTRAIN_PROJECT"  # what commands ask
LOCK_SUFFIX = ".lock.json"


@dataclass(frozen=True, slots=True)
class Id:
    """What words of a type must be."""

    noun: str
    pattern: str  # of the whole word
    form: str  # the pattern as errors describe it

    def check(self, value: Any, where: str) -> None:
        """Check a word, or each of several; None is none.

        Args:
            where: the parameter, as errors name it.

        Raises:
            InputError: one is no such word.
        """
        for one in [value] if isinstance(value, str) else value or ():
            if not re.fullmatch(self.pattern, one):
                raise InputError(f"{where}: {self.noun} must be {self.form}, got {one[:_SHOWN]!a}")


_RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


_SERIAL = r"[A-Za-z0-9-]{1,64}"


RunId = Annotated[str, Id("a run id", _RUN, "1-128 of A-Z a-z 0-9 . _ - and begin with a letter or digit")]


StageName = Annotated[str, Id("a stage", r"[a-z0-9][a-z0-9_-]{0,127}", "1-128 of a-z 0-9 _ -")]


SampleId = Annotated[str, Id("a sample id", _RUN, "1-128 of A-Z a-z 0-9 . _ - and begin with a letter or digit")]


TokenId = Annotated[str, Id("a token id", _SERIAL, "1-64 of A-Z a-z 0-9 -")]


OperationId = Annotated[str, Id("an operation id", _SERIAL, "1-64 of A-Z a-z 0-9 -")]


Digest = Annotated[str, Id("a digest", r"sha256:[0-9a-f]{64}", "sha256: and 64 hex digits")]


ProjectId = Annotated[str, Id("a project", r"[a-z0-9][a-z0-9-]{0,62}", "1-63 of a-z 0-9 - and begin with one")]


Tag = Annotated[str, Id("a tag", r"[a-z0-9][a-z0-9._-]{0,23}", "1-24 of a-z 0-9 . _ - and begin with a-z 0-9")]


Name = Annotated[  # of a channel, a sink, a kind of events; a run as a person names it
    str,
    Id("a name", r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}", "1-128 characters without / and \\"),
]


Principal = Annotated[
    str, Id("a principal", r"(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,220}", "user:NAME or service:NAME")
]


Word = Annotated[  # RUN/STAGE, KIND:NAME@VERSION, a digest, a path, a URL: its own parser takes it apart
    str,
    Id("a word", r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{0,4096}", "one line of at most 4096 characters"),
]


TYPES: Mapping[str, Id] = {  # name of a type → what its words must be
    name: get_args(kind)[1] for name, kind in globals().copy().items() if get_origin(kind) is Annotated
}


def refuse_control_characters(text: str, where: str) -> None:
    """Refuse text in which a character stands that no name, path or query has.

    Raises:
        InputError: it has one.
    """
    found = _CONTROL.search(text)
    if found:
        raise InputError(f"{where}: must hold no control characters, got {found[0]!a}; remove it")


def is_principal(name: str) -> bool:
    """Whether a policy, a token or a role may name somebody like this."""
    kind, _, rest = name.partition(":")
    return kind in _KINDS and 0 < len(rest) <= _LONGEST and rest[0] != ":" and is_plain(rest)


def is_project(name: str) -> bool:
    """Whether a project may be called so: 1-63 of a-z 0-9 -, which begin with a letter or digit."""
    return re.fullmatch(TYPES["ProjectId"].pattern, name) is not None


def is_plain(word: str) -> bool:
    """Whether two people who read it read the same: no spaces around it, and nothing that is not seen.

    What joins letters (U+200C, U+200D) is part of how some languages are written.
    """
    hidden = any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\u200c\u200d" for c in word)
    return word == word.strip() and not hidden


def canonical(name: str) -> str:
    """A name without what two spellings of it may differ in: case, width, spaces around it, and what is not seen."""
    seen = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c)[0] != "C")
    kind, colon, rest = " ".join(seen.casefold().split()).partition(":")
    return f"{kind.strip()}{colon}{rest.strip()}"


def meant(word: str) -> set[str]:
    """Whom the owner of a run file may be, as canonical names: `ada` is user:ada or service:ada."""
    name = canonical(word)
    return (
        {name} if name.startswith((*(f"{kind}:" for kind in _KINDS), NOBODY)) else {f"{kind}:{name}" for kind in _KINDS}
    )


class Role(StrEnum):
    """What a principal may do in a project."""

    VIEWER = "viewer"  # look
    SUBMITTER = "submitter"  # run things, register things
    APPROVER = "approver"  # answer for what is live
    ADMIN = "admin"  # say who may do what, and what every release must pass

    def covers(self, other: Role) -> bool:
        """Whether whoever has this role may do what the other may."""
        return _RANK[self] >= _RANK[other]


_RANK = {role: place for place, role in enumerate(Role)}


def lower(first: Role, second: Role) -> Role:
    """The one that may do less."""
    return second if first.covers(second) else first


def lock_path(path: Path) -> Path:
    """Where the lock of a run file goes by default: `run.yaml` → `run.lock.json`."""
    return path.with_name(path.stem + LOCK_SUFFIX)


def is_lock(path: Path) -> bool:
    """Whether a file holds a locked manifest: its name says so."""
    return path.name.endswith(LOCK_SUFFIX)
