"""Pages of the lists that verbs answer with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.api.pages import CURSOR, LIMIT, NEWEST, ORDERED, USUAL, cursor, place
from posttrain.domain.errors import CursorError


def page(verb: str, named: Mapping[str, Any], project: str, ask: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """The things behind a cursor, and the cursor behind them; None: there are no more.

    Args:
        named: the request's parameters.
        ask: the verb, by its parameters.

    Raises:
        CursorError: it is no place in this list.
    """
    limit = int(named.get(LIMIT, USUAL))
    behind = place(named[CURSOR], project, verb, named) if named.get(CURSOR) else None
    if verb in NEWEST:
        more = {"before": behind[0]} if behind else {}
        found = ask({**named, LIMIT: limit + 1, **more})
        keys = [(NEWEST[verb](one),) for one in found[:limit]]
    else:
        found = ask(named)
        whole = sorted(found.items() if isinstance(found, dict) else found, key=ORDERED[verb])
        try:
            rest = [one for one in whole if behind is None or ORDERED[verb](one) > behind]
        except TypeError as error:
            raise CursorError("cursor must be the `next` of the page before; ask without one for the first") from error
        keys = [ORDERED[verb](one) for one in rest[:limit]]
        found = dict(rest[: limit + 1]) if isinstance(found, dict) else rest
    items = dict(list(found.items())[:limit]) if isinstance(found, dict) else list(found[:limit])
    return {"items": items, "next": cursor(project, verb, named, keys[-1]) if len(found) > limit else None}
