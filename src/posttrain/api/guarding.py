"""Checks that the caller's role covers a verb and that its ids are ids, before it is carried out; nothing else does."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from posttrain.api.assets import Whoami
from posttrain.api.control import VERBS, Control
from posttrain.api.verbs import Asks, Verb
from posttrain.domain.errors import AccessError
from posttrain.domain.ids import TYPES, Id, Role


class Guard:
    """Checks the role and the ids of every verb before it passes the verb on.

    Args:
        asks: carries it out.
        who: the caller, as errors name them.
        role: returns their present role; None: they have none.
    """

    def __init__(self, asks: Asks, who: str, project: str, role: Callable[[], Role | None]) -> None:
        self._asks, self._who, self._project, self._role = asks, who, project, role

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """Carry a verb out.

        Raises:
            AccessError: they may not. InputError: an id or a name is none, a parameter is unknown or missing.
        """
        self.refuse(verb)
        check_ids(verb, verb.given(words, options))
        found = self._asks.ask(verb, *words, **options)
        if isinstance(found, Whoami):  # the role that holds here, a token's limit included
            role = self._role()
            return replace(found, role=role and str(role))
        return found

    def close(self) -> None:
        """Nothing is asked after it."""
        self._asks.close()

    def refuse(self, verb: Verb[..., Any]) -> None:
        """Raise AccessError if the caller's role does not cover this verb."""
        role = self._role()
        if role is None or not role.covers(verb.needs):
            has = f"is {role}" if role else "has no role"
            raise AccessError(
                f"project {self._project}: {verb.typed} needs the role {verb.needs}, and {self._who} {has} "
                "there; ask an admin of it"
            )


@functools.cache
def _ids_of(verb: Verb[..., Any]) -> Mapping[str, Id]:
    """The parameters of a verb that hold ids or names, and what these must be."""
    written = {one.name: re.findall(r"\w+", str(one.annotation)) for one in verb.declared.parameters.values()}
    return {name: TYPES[word] for name, words in written.items() for word in words if word in TYPES}


def check_ids(verb: Verb[..., Any], given: Mapping[str, Any]) -> None:
    """Check the ids and names among a verb's arguments.

    Raises:
        InputError: one is no such id or name.
    """
    for name, kind in _ids_of(verb).items():
        kind.check(given.get(name), f"{verb.typed}: {name}")


def refuse(control: Control, verb: str) -> None:
    """Raise AccessError if the role behind a guarded control does not cover a verb. Carries nothing out."""
    guard = control.asks
    assert isinstance(guard, Guard), "a server asks guarded controls only"
    guard.refuse(VERBS[verb])
