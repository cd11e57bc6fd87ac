"""Ids and names that come from outside, as types: whatever makes a path, a folder or a query of one has it checked.

A parameter of a verb is annotated with one of the types below; `api.guarding` checks it for every caller, in process
and over HTTP. All of them are one printable word that is part of a path: no `..`, slash, NUL or other control
character, and no more characters than a name has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin

from posttrain.domain.errors import InputError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_SHOWN = 80  # characters of what was given


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
