"""Principals, who act: `user:ann`, `service:ci`. What their names must be, and whom a person's word may mean.

Roles in a project: each may do what those before it may.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum

DRIVER = "service:posttrain"  # who acts where no person does: the server's driver and upgrades; never logs in
NOBODY = "erased:"  # how the name of an erased principal begins; its id follows
FORM = "user:NAME or service:NAME, without spaces around it and without line breaks"
_PROJECT = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_KINDS = ("user", "service")
_LONGEST = 200  # characters of a name


def is_principal(name: str) -> bool:
    """Whether a policy, a token or a role may name somebody like this."""
    kind, _, rest = name.partition(":")
    return kind in _KINDS and 0 < len(rest) <= _LONGEST and rest[0] != ":" and is_plain(rest)


def is_project(name: str) -> bool:
    """Whether a project may be called so: 1-63 of a-z 0-9 -, which begin with a letter or digit."""
    return _PROJECT.fullmatch(name) is not None


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
