"""Whether the server of a workspace, and what it needs, are fit: what `doctor` says of them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

from posttrain._version import __version__
from posttrain.client.transport import Transport
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import PosttrainError
from posttrain.preflight.checks import Check
from posttrain.store.standing import FAILING, PAUSED, standing
from posttrain.workspace.opened import OpenWorkspace
from posttrain.workspace.served import is_served, served_at

_LATE = 300.0  # seconds that a run may wait for a driver, and an event to be sealed
_PROBE = digest_bytes(b"is anybody there?")


def server_checks(root: Path) -> Iterator[Check]:
    """Of a workspace that is being served: whether its server answers, of which release it is, and drives runs."""
    if not is_served(root):
        return
    place = served_at(root)
    if place is None:
        yield Check("server", "warn", "is starting, or could not say where it listens", "look at its log")
        return
    try:
        reply = Transport(place.url, "").look("/readyz")
    except PosttrainError as error:
        yield Check("server", "fail", str(error), "look at its log; a server that hangs may be killed, jobs go on")
        return
    version = reply.headers.get("posttrain-version", "")
    other = version != __version__
    remedy = f"this command is Posttrain {__version__}: upgrade the older one" if other else ""
    yield Check("server", "warn" if other else "ok", f"{place.url} answers, Posttrain {version or '?'}", remedy)
    if reply.status == 200:
        yield Check("driver", "ok", "the server drives every run")
    else:
        why = json.loads(reply.body).get("status", "")
        yield Check("driver", "fail", f"{why}", "look at the lines of posttrain.driver in the server's log")


def standing_checks(workspace: OpenWorkspace) -> Iterator[Check]:
    """Queue, sinks and store of a workspace, whether it is served or not."""
    try:
        now = standing(workspace.ledger.database, workspace.ledger.clock)
    except PosttrainError as error:
        yield Check("queue", "fail", str(error), "see to the database")
    else:
        late = now.oldest_due > _LATE or now.oldest_unsealed > _LATE
        waits = f", the first for {now.oldest_due:.0f} s" if now.oldest_due else ""
        said = f"{now.due} wait for a driver{waits}; {now.leased} under way; {now.unsealed} events not sealed"
        yield Check("queue", "warn" if late else "ok", said, "see who drives: posttrain ls" if late else "")
        states = [state for one in now.sinks.values() for state in one.states.items()]
        bad = sum(number for state, number in states if state in (FAILING, PAUSED))
        if states:
            said = f"{sum(number for _, number in states) - bad} deliver, {bad} fail or are paused"
            yield Check("sinks", "warn" if bad else "ok", said, "posttrain sink ls" if bad else "")
    began = time.perf_counter()
    try:
        workspace.blobs.has(_PROBE)
    except PosttrainError as error:
        yield Check("store", "fail", str(error), "see to the store; runs wait for it")
    else:
        took = (time.perf_counter() - began) * 1000
        yield Check("store", "ok", f"{workspace.blobs.url} answers in {took:.0f} ms")
