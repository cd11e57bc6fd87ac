"""The server of a model (`posttrain serve-model`): its release, the channel that it follows, and its end.

::

    uvicorn (this process): HTTP, text ⇄ tokens, turns, keys; follows the channel in the workspace's ledger
        ├── pipes ──▶ engine of the release that new requests get
        └── pipes ──▶ engine of the release before it, until its last request is answered

The service reads the channel every second. After a promotion or a rollback, it loads the new release beside the old
one, compares it with the log-probabilities that its evaluation recorded, and serves it. `/health`, the metrics and the
log report a release that cannot be served, and the former release stays. After SIGTERM, the server refuses new requests
and answers those in progress.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.access.authenticators.token import TokenAuthenticator
from posttrain.app.models import NamedModel, named_model, recorded_logprobs
from posttrain.app.workspace import Workspace
from posttrain.data.refs import Source
from posttrain.domain.adapters import base_files, has_adapter
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AuthenticationError, InputError, IntegrityError
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.server import logs
from posttrain.server.connections import Room, is_loopback, most_of, raise_files
from posttrain.server.service import Bind, HttpServer, Systemd, configured, listen
from posttrain.serving.app import Door, Keys, Limits, NoKeys, build
from posttrain.serving.engines import Models, Release, Served
from posttrain.store.trees import tree_listing
from posttrain.workspace.served import Served as Of, announce_model

log = logging.getLogger("posttrain.serving")
_LOOK = 1.0  # seconds between two reads of the channel
_KEY_SECONDS, _MOST_KEYS = 5.0, 10_000  # for which a valid key is not looked up again, and how many are known
# differences between recorded and served log-probabilities, the largest and on average; True: both in float32
_APART = {True: (1e-3, 1e-4), False: (0.5, 0.05)}
_AGAIN = 30.0  # seconds before a release that could not be served is tried again


@dataclass(frozen=True, slots=True)
class Serving:
    """How a model is served."""

    bind: Bind
    limits: Limits = field(default_factory=Limits)
    runtime: Mapping[str, Any] = field(default_factory=dict)  # device, dtype, threads
    kv_cache: int | None = None  # maximum bytes of keys and values of each engine; None: half of the free memory
    name: str = ""  # of the model in requests; "": the channel or the ref
    adapters: Mapping[str, str] = field(default_factory=dict)  # name → a model with an adapter of the same base
    keys: bool = False  # whether callers need a key
    drain: int = 60  # seconds for requests in progress after SIGTERM
    log: logs.Logging = field(default_factory=logs.Logging)

    def checked(self) -> Serving:
        """Return this instance if it is safe.

        Raises:
            InputError: other machines could use the model without a key, or read keys in transit.
        """
        if not self.keys and (self.bind.behind_proxy or not is_loopback(self.bind.host)):
            raise InputError(
                f"serve-model: other machines can reach {self.bind.host}, and no key would be needed; add --keys"
            )
        self.bind.checked()
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
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _heard)  # uvicorn handles these signals, and raises each again afterwards
    service, room = _Service(workspace, word, first, how, say), Room(most_of(raise_files()))
    with listen(how.bind, room) as listening:
        asyncio.run(service.run(listening, room, how.bind.near(listening.getsockname()[1])))


def _heard(*_: object) -> None:
    """Ignore a signal, because the engines end after the server."""


class _Service:
    """A server and its channel."""

    def __init__(
        self, workspace: Workspace, word: str, first: NamedModel, how: Serving, say: Callable[[str], None]
    ) -> None:
        self._workspace, self._how, self._say = workspace, how, say
        self._name = how.name or (first.ref.name if first.ref.source is Source.CHANNEL else word)
        self._first = self._release(first)
        self._made = first.made.run_id if first.made is not None and first.ref.source is Source.RUN else None
        ref = first.ref
        self._channel = ref.name if ref.source is Source.CHANNEL and ref.version is None else None
        settings = {"runtime": dict(how.runtime), "kv_cache": how.kv_cache, "threads": how.runtime.get("threads", 1)}
        self._models = Models(settings, self._check)
        self._own_key = secrets.token_urlsafe(32)  # of commands and of the console, which may read the folder
        channel = ref.name if ref.source is Source.CHANNEL else None
        keys: Keys = _Keys(workspace, channel, self._own_key) if how.keys else NoKeys()
        aliases = [word] if channel is None else [word, channel]
        self._door = Door(self._name, self._models, how.limits, keys, aliases)

    async def run(self, listening: Any, room: Room, url: str) -> None:
        """Load the model, and serve until a signal."""
        systemd = Systemd(os.environ)
        server = _Drained(configured(build(self._door), self._how.bind, room, self._how.drain), systemd)
        server.door = self._door
        self._say(f"loading {self._first.name}")
        loading = asyncio.create_task(self._models.use(self._first))
        serving = asyncio.create_task(server.serve(sockets=[listening]))  # answers /health while the model loads
        await asyncio.wait({loading, serving}, return_when=asyncio.FIRST_COMPLETED)
        follower: asyncio.Task[None] | None = None
        conceal: Callable[[], None] = lambda: None  # noqa: E731 - replaced when there is something to conceal
        try:
            if loading.done():
                await loading
                systemd.ready()
                self._tell(url)
                if self._channel is not None:
                    place = self._workspace.root, self._workspace.ledger.project, self._channel
                    conceal = announce_model(*place, Of(url, self._own_key))
                    follower = asyncio.create_task(self._follow(self._channel))
            await serving
        finally:
            loading.cancel()
            conceal()
            if follower is not None:
                follower.cancel()
            server.should_exit = True
            await asyncio.wait({serving})
            await self._models.close()
            self._say("the server has ended")

    def _tell(self, url: str) -> None:
        served = self._models.served
        assert served is not None
        for reason in served.engine.facts["fallbacks"].values():
            self._say(f"warning: {reason}")
        made = self._made
        if (
            made is not None
            and (run := self._workspace.ledger.run(made)).state != RunState.SUCCEEDED
            and is_final("run", run.state)
        ):
            self._say(
                f"warning: {served.release.name} is of run {run.id}, which is {run.state}; posttrain why {run.id}"
            )
        self._say(f"serving {served.release.name} {served.release.digest} at {url}/v1 as model {self._door.name}")
        for name, one in served.release.adapters.items():
            self._say(f"and its adapter {name}: {one.name} {one.digest}")
        if not self._how.keys:
            self._say("every user of this machine can call it; --keys asks for bearer keys")

    def _release(self, model: NamedModel) -> Release:
        """Return the release of a model, with the adapters of its base.

        Raises:
            NotFoundError, InputError: there is no such adapter, or its base is another one.
        """
        adapters = {name: named_model(self._workspace, word) for name, word in self._how.adapters.items()}
        if taken := adapters.keys() & {self._name, model.pinned.name, model.digest}:
            raise InputError(f"adapter {min(taken)}: must not have the name of the served model; choose another name")
        base = self._base(model) if adapters else None
        for name, one in adapters.items():
            if self._base(one) != base or not has_adapter(tree_listing(self._workspace.blobs, one.digest)):
                raise InputError(
                    f"adapter {name}: {one.word} must be an adapter of the base of {model.word}, got another base or "
                    "no adapter; serve it as a separate model"
                )
        named = {name: self._of(one) for name, one in adapters.items()}
        return replace(self._of(model), adapters=named)

    def _of(self, model: NamedModel) -> Release:
        return Release(model.pinned.name, model.digest, partial(self._folder, model))

    def _folder(self, model: NamedModel) -> Path:
        """Return the files of a model.

        Raises:
            IntegrityError: the files are outside of the store, and changed after the start.
        """
        if model.ref.on_disk and named_model(self._workspace, model.word).digest != model.digest:
            raise IntegrityError(f"{model.word}: its files must not change while it is served; start the server again")
        return model.folder(self._workspace)

    def _base(self, model: NamedModel) -> Any:
        return base_files(tree_listing(self._workspace.blobs, model.digest))

    async def _follow(self, channel: str) -> None:
        """Serve each new live release of the channel."""
        while True:
            await asyncio.sleep(_LOOK)
            try:
                live = await asyncio.to_thread(self._workspace.ledger.channel, channel)
                served = self._models.served
                if live is None or (served is not None and live.model_digest == served.release.digest):
                    if served is not None and served.ready.is_set():
                        self._models.trouble = ""
                    continue
                model = await asyncio.to_thread(named_model, self._workspace, f"channel:{channel}")
                await self._models.use(await asyncio.to_thread(self._release, model))
            except Exception as error:  # whatever it is, the channel is still followed
                if self._models.trouble != str(error):
                    log.error("channel %s: its live release is not served: %s", channel, error)
                self._models.trouble = str(error)
                await asyncio.sleep(_AGAIN)

    async def _check(self, served: Served) -> None:
        """Refuse a release whose log-probabilities differ from those that its evaluation recorded.

        Raises:
            IntegrityError: they differ by more than rounding.
        """
        name, digest = served.release.name, served.release.digest
        most_context = self._how.limits.context
        if most_context is not None and most_context > served.context:
            raise InputError(
                f"--context must be at most {served.context}, that of {name}, got {most_context}; lower it"
            )
        recorded = await asyncio.to_thread(recorded_logprobs, self._workspace, digest)
        if recorded is None:
            log.warning("%s is served without comparison: no evaluation recorded its log-probabilities", name)
            return
        texts = {f"fixed-{place}": text for place, text in enumerate(recorded["texts"])}
        found = await served.engine.score(texts, 0)
        pairs = zip(recorded["logprobs"], (found[name].logprobs for name in texts), strict=True)
        apart = [abs(one - other) for before, now in pairs for one, other in zip(before, now, strict=True)]
        exact = recorded["dtype"] == served.engine.facts["dtype"] == "float32"
        most, mean = _APART[exact]
        if not (max(apart) <= most and sum(apart) / len(apart) <= mean):
            raise IntegrityError(
                f"{name}: its log-probabilities of {len(texts)} fixed texts must be those that its evaluation "
                f"recorded, within {most:g}, got a difference of {max(apart):.3g}; it is not served"
            )
        served.compared = max(apart)


class _Drained(HttpServer):
    """Refuses new requests after a signal, and answers those in progress."""

    door: Door
    announces = False  # it is ready when the model is loaded

    def handle_exit(self, sig: int, frame: object) -> None:
        """See `uvicorn.Server.handle_exit`."""
        self.door.closing = True
        super().handle_exit(sig, frame)


class _Keys:
    """Keys of the workspace's project: tokens of its members, and keys that are for this channel only.

    Args:
        channel: the served channel; None: only members may call the model.
        own: the key of those who may read the workspace's folder.
    """

    def __init__(self, workspace: Workspace, channel: str | None, own: str) -> None:
        self._own = own.encode()
        self._authenticator, self._channel = TokenAuthenticator(workspace.ledger), channel
        self._known: dict[str, tuple[float, str]] = {}  # digest of a key → the moment until which it counts, and whose

    async def check(self, key: str | None) -> str:
        """See `Keys.check`. A revoked key is valid for at most five more seconds."""
        if key is None:
            raise AuthenticationError("a key is needed: send Authorization: Bearer KEY")
        if hmac.compare_digest(key.encode(), self._own):
            return "local"
        digest, now = digest_bytes(key.encode()), time.monotonic()
        until, principal = self._known.get(digest, (0.0, ""))
        if until <= now:
            principal = (await asyncio.to_thread(self._authenticator.may_call, key, self._channel)).principal
            if len(self._known) >= _MOST_KEYS:
                self._known.clear()
            self._known[digest] = now + _KEY_SECONDS, principal
        return principal
