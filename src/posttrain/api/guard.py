"""The one place that checks, before a verb is carried out, the caller's role and the form of ids."""

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
        asks: carries out the verbs.
        who: the caller's name in errors.
        role: returns the caller's current role; None: no role.
    """

    def __init__(self, asks: Asks, who: str, project: str, role: Callable[[], Role | None]) -> None:
        self._asks, self._who, self._project, self._role = asks, who, project, role

    def ask(self, verb: Verb[..., Any], /, *words: Any, **options: Any) -> Any:
        """Carry a verb out, and return its result.

        Raises:
            AccessError: the caller's role does not cover the verb.
            InputError: an id or name is invalid, or a parameter is unknown or missing.
        """
        self.refuse(verb)
        check_ids(verb, verb.given(words, options))
        found = self._asks.ask(verb, *words, **options)
        if isinstance(found, Whoami):  # the role that applies here, limited by the token
            role = self._role()
            return replace(found, role=role and str(role))
        return found

    def close(self) -> None:
        """Close the component that carries out the verbs; no verb may be called afterwards."""
        self._asks.close()

    def refuse(self, verb: Verb[..., Any]) -> None:
        """Raise AccessError if the caller's role does not cover this verb."""
        role = self._role()
        if role is None or not role.covers(verb.needs):
            has = f"is {role}" if role else "has no role"
            raise AccessError(
                f"project {self._project}: {verb.typed} needs the role {verb.needs}, and {self._who} {has} "
                "there; ask an admin of the project"
            )


@functools.cache
def _ids_of(verb: Verb[..., Any]) -> Mapping[str, Id]:
    """Return the parameters of a verb that are ids or names, and the required form of each."""
    written = {one.name: re.findall(r"\w+", str(one.annotation)) for one in verb.declared.parameters.values()}
    return {name: TYPES[word] for name, words in written.items() for word in words if word in TYPES}


def check_ids(verb: Verb[..., Any], given: Mapping[str, Any]) -> None:
    """Check the ids and names among a verb's arguments.

    Raises:
        InputError: an id or name is invalid.
    """
    for name, kind in _ids_of(verb).items():
        kind.check(given.get(name), f"{verb.typed}: {name}")


def refuse(control: Control, verb: str) -> None:
    """Raise AccessError if the role behind a guarded control does not cover a verb; the verb is not carried out."""
    guard = control.asks
    assert isinstance(guard, Guard), "a server asks guarded controls only"
    guard.refuse(VERBS[verb])
