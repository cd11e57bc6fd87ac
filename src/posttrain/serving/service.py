"""The server of a model (`posttrain serve-model`): what it serves, the channel that it follows, and its end.

::

    uvicorn (this process): HTTP, text ⇄ tokens, turns, keys; follows the channel in the workspace's ledger
        ├── pipes ──▶ engine of the release that new requests get
        └── pipes ──▶ engine of the release before it, until its last request is answered

A channel is looked at every second. If its live release has changed, by a promotion or a rollback, the new one is
loaded beside the old one, compared with what its gate recorded, and served; one that cannot be served is reported by
`/health`, the metrics and the log, and the former release stays. SIGTERM refuses new requests and answers those in
progress.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.app.models import NamedModel, named_model
from posttrain.app.workspace import Workspace
from posttrain.data.refs import Source
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AuthenticationError, InputError, PosttrainError
from posttrain.server import logs
from posttrain.server.connections import Room, is_loopback, most_of, raise_files
from posttrain.server.service import Bind, HttpServer, Systemd, configured, listen
from posttrain.serving.app import Door, Keys, Limits, NoKeys, build
from posttrain.serving.engines import Models, Release, Served

log = logging.getLogger("posttrain.serving")
_LOOK = 1.0  # seconds between two looks at the channel
_KEY_SECONDS, _MOST_KEYS = 5.0, 10_000  # for which a valid key is not looked up again, and how many are known
_AGAIN = 30.0  # seconds before a release that could not be served is tried again


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served."""

    bind: Bind
    limits: Limits = field(default_factory=Limits)
    runtime: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, threads
    kv_cache: int | None = None  # maximum bytes of keys and values of each engine; None: half of the free memory
    keys: bool = False  # whether callers need a key
    drain: int = 60  # seconds for requests in progress after SIGTERM
    log: logs.Logging = field(default_factory=logs.Logging)

    def checked(self) -> Serving:
        """Return this instance if it is safe.

        Raises:
            InputError: other machines could use the model without a key, or read keys in transit.
        """
        self.bind.checked()
        if not self.keys and (self.bind.behind_proxy or not is_loopback(self.bind.host)):
            raise InputError(
                f"serve-model: {self.bind.host} can be reached from other machines, and no key is needed; add --keys"
            )
        return self


def serve_model(workspace: Workspace, word: str, how: Serving, say: Callable[[str], None]) -> None:
    """Serve a model until SIGTERM or SIGINT.

    Args:
        word: a channel, which is followed, or another name of a model (`app.models.named_model`).
        say: receives the lines for a person.

    Raises:
        NotFoundError, InputError: there is no such model, it cannot be loaded, or the address cannot be used.
    """
    how.checked()
    logs.begin(how.log, held=True)
    first = named_model(workspace, word)
    room = Room(most_of(raise_files()))
    with listen(how.bind, room) as listening:
        url = how.bind.near(listening.getsockname()[1])
        asyncio.run(_Service(workspace, first, how, say).run(listening, room, url))


class _Service:
    """A server and its channel."""

    def __init__(self, workspace: Workspace, first: NamedModel, how: Serving, say: Callable[[str], None]) -> None:
        self._workspace, self._first, self._how, self._say = workspace, first, how, say
        ref = first.ref
        self._channel = ref.name if ref.source is Source.CHANNEL and ref.version is None else None
        settings = {"runtime": dict(how.runtime), "kv_cache": how.kv_cache, "threads": how.runtime.get("threads", 1)}
        self._models = Models(settings, self._check)
        keys: Keys = _Keys(workspace, ref.name if ref.source is Source.CHANNEL else None) if how.keys else NoKeys()
        self._door = Door(self._channel or first.pinned.name, self._models, how.limits, keys)

    async def run(self, listening: Any, room: Room, url: str) -> None:
        """Load the model, and serve until a signal."""
        systemd = Systemd(os.environ)
        server = _Drained(configured(build(self._door), self._how.bind, room, self._how.drain), systemd)
        server.door = self._door
        loading = asyncio.create_task(self._models.use(self._release(self._first)))
        serving = asyncio.create_task(server.serve(sockets=[listening]))  # answers /health while the model loads
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        follower: asyncio.Task[None] | None = None
        try:
            if loading.done():
                await loading
                self._tell(url)
                if self._channel is not None:
                    follower = asyncio.create_task(self._follow(self._channel))
            await serving
        finally:
            loading.cancel()
            if follower is not None:
                follower.cancel()
            server.should_exit = True
            await asyncio.wait({serving})
            await self._models.close()

    def _tell(self, url: str) -> None:
        served = self._models.served
        assert served is not None
        for name, reason in served.engine.facts["fallbacks"].items():
            self._say(f"warning: {name}: {reason}")
        self._say(f"serving {served.release.name} {served.release.digest} at {url}/v1 as model {self._door.name}")
        if not self._how.keys:
            self._say("every user of this machine can call it; --keys asks for bearer keys")

    def _release(self, model: NamedModel) -> Release:
        return Release(model.pinned.name, model.digest, partial(model.folder, self._workspace))

    async def _follow(self, channel: str) -> None:
        """Serve each new live release of the channel."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                live = await asyncio.to_thread(self._workspace.ledger.channel, channel)
                served = self._models.served
                if live is None or (served is not None and live.model_digest == served.release.digest):
                    self._models.trouble = ""
                    continue
                model = await asyncio.to_thread(named_model, self._workspace, f"channel:{channel}")
                await self._models.use(self._release(model))
            except PosttrainError as error:
                if self._models.trouble != str(error):
                    log.error("channel %s: its live release is not served: %s", channel, error)
                self._models.trouble = str(error)
                await asyncio.sleep(_AGAIN)

    async def _check(self, served: Served) -> None:
        """Refuse a release whose log-probabilities differ from those that its gate recorded."""


class _Drained(HttpServer):
    """Refuses new requests after a signal, and answers those in progress."""

    door: Door

    def handle_exit(self, sig: int, frame: object) -> None:
        """See `uvicorn.Server.handle_exit`."""
        self.door.closing = True
        super().handle_exit(sig, frame)


class _Keys:
    """Keys of the workspace's project: tokens of its members, and keys that are for this channel only.

    Args:
        channel: the served channel; None: only members may call the model.
    """

    def __init__(self, workspace: Workspace, channel: str | None) -> None:
        self._authenticator, self._channel = TokenAuthenticator(workspace.ledger), channel
        self._known: dict[str, tuple[float, str]] = {}  # digest of a key → the moment until which it counts, and whose

    async def check(self, key: str | None) -> str:
        """See `Keys.check`. A revoked key counts for at most five seconds more."""
        if key is None:
            raise AuthenticationError("a key is needed: send Authorization: Bearer KEY")
        digest, now = digest_bytes(key.encode()), time.monotonic()
        until, principal = self._known.get(digest, (0.0, ""))
        if until <= now:
            principal = (await asyncio.to_thread(self._authenticator.may_call, key, self._channel)).principal
            if len(self._known) >= _MOST_KEYS:
                self._known.clear()
            self._known[digest] = now + _KEY_SECONDS, principal
        return principal
