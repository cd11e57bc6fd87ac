"""Whether the server that the environment names is fit for whoever asks it: what `doctor` says where one is named."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from email.utils import parsedate_to_datetime

from posttrain._version import __version__
from posttrain.client.logins import logged_in
from posttrain.client.transport import Transport
from posttrain.domain.errors import PosttrainError
from posttrain.domain.places import PROJECT_VARIABLE, SERVER_VARIABLE
from posttrain.preflight.cluster_checks import Check

_APART = 60.0  # seconds between two clocks that are told


def asked_server() -> str:
    """The server that commands ask; empty: none, they ask a workspace of this machine."""
    return os.environ.get(SERVER_VARIABLE, "").rstrip("/")


def remote_checks(url: str) -> Iterator[Check]:
    """Whether it answers, of which release it is, whether it is ready, what its clock says, and who one is there."""
    try:
        reply = Transport(url, "").look("/readyz")
    except PosttrainError as error:
        yield Check("server", "fail", str(error), f"check {SERVER_VARIABLE} and the network, or unset it")
        return
    version = reply.headers.get("posttrain-version", "")
    if not version:
        yield Check("server", "fail", f"{url} answers, and is no server of Posttrain", f"correct {SERVER_VARIABLE}")
        return
    other = version != __version__
    remedy = f"this command is Posttrain {__version__}: upgrade the older one" if other else ""
    yield Check("server", "warn" if other else "ok", f"{url} answers, Posttrain {version}", remedy)
    ready = reply.status == 200
    said = "it drives every run" if ready else reply.body.decode("utf-8", "replace")[:200]
    yield Check("ready", "ok" if ready else "fail", said, "" if ready else "whoever runs it: see its log")
    yield from _clock(reply.headers.get("date", ""))
    yield _token(url)


def _clock(said: str) -> Iterator[Check]:
    try:
        apart = time.time() - parsedate_to_datetime(said).timestamp()
    except ValueError:
        return
    bad = abs(apart) > _APART
    which = "ahead of" if apart > 0 else "behind"
    finding = f"{abs(apart):.0f} s {which} the server's" if bad else "as the server's"
    yield Check("clock", "warn" if bad else "ok", finding, "set the clock: times that are shown would be off" * bad)


def _token(url: str) -> Check:
    try:
        control = logged_in(url, os.environ.get(PROJECT_VARIABLE, ""))
        found = control.whoami()
        control.close()
    except PosttrainError as error:
        return Check("token", "fail", str(error), f"posttrain login {url}")
    if found.role is None:
        return Check("token", "fail", f"{found.principal} has no role in {found.project}", "ask an admin of it for one")
    return Check("token", "ok", f"{found.principal}, {found.role} of {found.project}")
