"""Checked types of external ids and names, principals, roles, and names of lock files.

Code that makes a path, a folder or a query from an external name checks the name first. A parameter of a verb is
annotated with a type of this module; `app.control` checks the parameter for every caller, in process and over HTTP. A
value of each type is one printable word of bounded length that is safe as part of a path: it has no `..`, slash, NUL
or other control character.

A principal is a user or a service that acts: `user:ann`, `service:ci`. This module defines the rules for the names of
principals, and which principals a written name may mean. Each role in a project includes the permissions of the roles
before it. Names of lock files are recognised here, since commands check them before they load a workspace.
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
_SHOWN = 80  # characters of a value in errors
DRIVER = "service:posttrain"  # the principal as which the server's driver and upgrades act; it cannot log in
NOBODY = "erased:"  # prefix of an erased principal's name; the principal's id follows
FORM = "user:NAME or service:NAME, without spaces around it and without line breaks"
_KINDS = ("user", "service")
_LONGEST = 200  # characters of a name
SERVER_VARIABLE, PROJECT_VARIABLE = "POSTTRAIN_SERVER", "POSTTRAIN_PROJECT"  # server and project of commands
LOCK_SUFFIX = ".lock.json"


@dataclass(frozen=True, slots=True)
class Id:
    """The constraint on the values of a type."""

    noun: str
    pattern: str  # matches the whole value
    form: str  # the description of the pattern in errors

    def check(self, value: Any, where: str) -> None:
        """Check a value, or each value of a list; None passes.

        Args:
            where: the parameter's name in errors.

        Raises:
            InputError: a value does not match.
        """
        for one in [value] if isinstance(value, str) else value or ():
            if not re.fullmatch(self.pattern, one):
                raise InputError(f"{where}: {self.noun} must be {self.form}, got {one[:_SHOWN]!a}")


_RUN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


_SERIAL = r"[A-Za-z0-9-]{1,64}"


RunId = Annotated[
    str, Id("a run id", _RUN, "1 to 128 characters from A-Z a-z 0-9 . _ - and begin with a letter or digit")
]


StageName = Annotated[
    str,
    Id(
        "a stage",
        r"[a-z0-9][a-z0-9_-]{0,127}",
        "1 to 128 characters from a-z 0-9 _ - and begin with a letter or digit",
    ),
]


SampleId = Annotated[
    str, Id("a sample id", _RUN, "1 to 128 characters from A-Z a-z 0-9 . _ - and begin with a letter or digit")
]


TokenId = Annotated[str, Id("a token id", _SERIAL, "1 to 64 characters from A-Z a-z 0-9 -")]


OperationId = Annotated[str, Id("an operation id", _SERIAL, "1 to 64 characters from A-Z a-z 0-9 -")]


Digest = Annotated[str, Id("a digest", r"sha256:[0-9a-f]{64}", "sha256: and 64 hex digits")]


ProjectId = Annotated[
    str,
    Id("a project", r"[a-z0-9][a-z0-9-]{0,62}", "1 to 63 characters from a-z 0-9 - and begin with a letter or digit"),
]


Tag = Annotated[
    str,
    Id("a tag", r"[a-z0-9][a-z0-9._-]{0,23}", "1 to 24 characters from a-z 0-9 . _ - and begin with a letter or digit"),
]


Name = Annotated[  # of a channel, a sink or a kind of events, or a user's reference to a run
    str,
    Id("a name", r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,128}", "1 to 128 characters without / and \\"),
]


Principal = Annotated[
    str, Id("a principal", r"(?!\.{1,2}$)[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{1,220}", "user:NAME or service:NAME")
]


Word = Annotated[  # RUN/STAGE, KIND:NAME@VERSION, a digest, a path, a URL: parsed elsewhere
    str,
    Id("a word", r"[^\x00-\x1f\x7f-\x9f\ud800-\udfff]{0,4096}", "one line of at most 4096 characters"),
]


TYPES: Mapping[str, Id] = {  # name of a type → its constraint
    name: get_args(kind)[1] for name, kind in globals().copy().items() if get_origin(kind) is Annotated
}


def refuse_control_characters(text: str, where: str) -> None:
    """Reject text with a control character, which is invalid in names, paths and queries.

    Raises:
        InputError: the text contains a control character.
    """
    found = _CONTROL.search(text)
    if found:
        raise InputError(f"{where}: must contain no control characters, got {found[0]!a}; remove it")


def is_principal(name: str) -> bool:
    """Return whether this is a valid name of a principal in a policy, a token or a role."""
    kind, _, rest = name.partition(":")
    return kind in _KINDS and 0 < len(rest) <= _LONGEST and rest[0] != ":" and is_plain(rest)


def is_project(name: str) -> bool:
    """Return whether this is a valid name of a project: 1-63 characters a-z 0-9 -, beginning with a letter or digit."""
    return re.fullmatch(TYPES["ProjectId"].pattern, name) is not None


def is_plain(word: str) -> bool:
    """Return whether a name is unambiguous to read: it has no spaces around it and no invisible characters.

    Joiners (U+200C, U+200D) are allowed, since some languages need them.
    """
    hidden = any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\u200c\u200d" for c in word)
    return word == word.strip() and not hidden


def canonical(name: str) -> str:
    """Return a name normalised in case, width, spaces and invisible characters."""
    seen = "".join(c for c in unicodedata.normalize("NFKC", name) if unicodedata.category(c)[0] != "C")
    kind, colon, rest = " ".join(seen.casefold().split()).partition(":")
    return f"{kind.strip()}{colon}{rest.strip()}"


def meant(word: str) -> set[str]:
    """Return the canonical names of the principals that an owner in a run file may mean.

    For `ada` these are user:ada and service:ada.
    """
    name = canonical(word)
    return (
        {name} if name.startswith((*(f"{kind}:" for kind in _KINDS), NOBODY)) else {f"{kind}:{name}" for kind in _KINDS}
    )


class Role(StrEnum):
    """The permissions of a principal in a project."""

    VIEWER = "viewer"  # read
    SUBMITTER = "submitter"  # submit runs, register assets
    APPROVER = "approver"  # approve releases
    ADMIN = "admin"  # manage roles and policies

    def covers(self, other: Role) -> bool:
        """Return whether this role includes the permissions of the other role."""
        return _RANK[self] >= _RANK[other]


_RANK = {role: place for place, role in enumerate(Role)}


def lower(first: Role, second: Role) -> Role:
    """Return the role with fewer permissions."""
    return second if first.covers(second) else first


def lock_path(path: Path) -> Path:
    """Return the default path of a run file's lock: `run.yaml` → `run.lock.json`."""
    return path.with_name(path.stem + LOCK_SUFFIX)


def is_lock(path: Path) -> bool:
    """Return whether a file has the name of a locked manifest."""
    return path.name.endswith(LOCK_SUFFIX)
