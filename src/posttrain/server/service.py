"""The server (`posttrain serve`), its readiness, and its notices to systemd.

One process answers requests, another process drives runs, and workers start and end on demand:

::

    uvicorn (this process) ──▶ threads: reads and small writes
        │ socketpairs
        ├──▶ workers: requests that read files or compute
        └──▶ driver: every unfinished run; started again when it dies

    ROOT/server.lock   held while the server lives
    ROOT/server.json   the server's address, and the key of every user who may read this folder

`/readyz` reports whether a server is ready: its database answers, its store has answered once, and its driver lives.
The server probes the store when it starts, so a mistyped address or key is reported immediately. An unreachable store
is probed until it answers; until then, requests that need the store are delayed or rejected. After the store has
answered once, the response to a request that cannot reach the store is 503, and other requests continue.

The server notifies systemd when it is ready, while it is alive, and when it stops (sd_notify(3)). Without systemd, the
server sends no notifications.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import itertools
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette

from posttrain._version import __version__
from posttrain.access.authenticators.token import issue
from posttrain.app.garbage import ANSWERS_SECONDS
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import ConflictError, InputError, PosttrainError, WorkspaceError
from posttrain.domain.ids import Role
from posttrain.events.ports import public, secrets_of
from posttrain.execution.processes import process_name
from posttrain.server import logs
from posttrain.server.app import build
from posttrain.server.authentication import Authentication
from posttrain.server.connections import (
    Door,
    Peers,
    Room,
    checked_advertised,
    is_loopback,
    kind_of,
    most_of,
    quiet,
    raise_files,
)
from posttrain.server.metrics import Meters, SharedCounters
from posttrain.server.operations import Server
from posttrain.server.workers import Workers, start
from posttrain.store.atomic import Refusal, held, make_folder, write_json
from posttrain.store.blobs import open_blobs
from posttrain.store.ledger import Hosts, Ledger
from posttrain.store.operations import forget_before
from posttrain.store.retries import SOCKET, SOCKETS
from posttrain.workspace.served import LOCK, PLACE, server_of

_PING = 1.0  # seconds between two probes of the database
_LOOK = 5.0  # seconds between two probes of a store that does not answer
_SOCKET, _EVERY, _PROCESS = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
log = logging.getLogger("posttrain.server")
FIRST_TOKEN_SECONDS = 30 * 86400.0
_AGAIN = (0.2, 1.0, 5.0, 30.0)  # seconds until a driver that died is started again
_STEADY = 60.0  # seconds after which the next start of the driver is not delayed further
_END = 120.0  # seconds from the end of the requests to the end of the process; the driver gets 30 of them
_JOIN = 5.0  # seconds that threads beside the server get to end; a store may keep one waiting for minutes
_TIDY = 30.0  # seconds between two checks for idle workers
_FORGET = 120  # number of such checks between two deletions of old requests
_EVERYWHERE = ("0.0.0.0", "::", "")


class StoreLook:
    """Probes a store until it answers once. Until then, `trouble` returns the reason of the failure."""

    def __init__(self, probe: Callable[[], None], over: threading.Event) -> None:
        self._probe, self._over = probe, over
        self._trouble = "the artifact store has not been probed yet"

    def trouble(self) -> str:
        """Return the reason why the store cannot be used; "" if the store has answered."""
        return self._trouble

    def keep_looking(self) -> None:
        """Probe the store until it answers or the server ends; log each reason once."""
        told = ""
        while not self._over.is_set():
            try:
                self._probe()
            except PosttrainError as error:
                line = str(error).splitlines()[0]
                kind = type(error).__name__ + line.partition(": ")[0]  # the rest contains the duration
                if kind != told:
                    log.error("%s; this server is not ready until the store answers", line)
                    told = kind
                self._trouble = "the artifact store does not answer; the server's log has the reason"
                self._over.wait(_LOOK)
                continue
            self._trouble = ""
            if told:
                log.info("the artifact store answers")
            return


class Ready:
    """Reports whether requests are answered and runs are driven; probes the database at most once a second."""

    def __init__(self, ledger: Ledger, *others: Callable[[], str]) -> None:
        self._ledger, self._others = ledger, others
        self._asked, self._away = -_PING, ""
        self._lock = threading.Lock()

    def trouble(self) -> str:
        """Return the reason why the server is not ready; "" if the server is ready."""
        with self._lock:
            if time.monotonic() - self._asked >= _PING:
                try:
                    with self._ledger.database.read() as connection:
                        connection.exec_driver_sql("SELECT 1")
                    self._away = ""
                except PosttrainError as error:
                    log.warning("%s", error)
                    self._away = "the ledger's database does not answer"
                self._asked = time.monotonic()
            return self._away or next((why for why in (ask() for ask in self._others) if why), "")


class Systemd:
    """Notifies the service manager systemd, if the server runs under it.

    Args:
        environment: the environment with systemd's variables. They are removed, so no child process can notify
            systemd for the server.
    """

    def __init__(self, environment: MutableMapping[str, str]) -> None:
        place, every, process = (environment.pop(name, "") for name in (_SOCKET, _EVERY, _PROCESS))
        self._address = "\0" + place[1:] if place.startswith("@") else place
        mine = every.isdigit() and process in ("", str(os.getpid()))
        self._every = int(every) / 2e6 if mine else 0.0  # seconds, half of the time-out
        self._said = 0.0

    def ready(self) -> None:
        """Report that the server answers requests."""
        self._say("READY=1")

    def alive(self) -> None:
        """Report that the event loop runs, as often as systemd requires."""
        now = time.monotonic()
        if self._every and now - self._said >= self._every:
            self._said = now
            self._say("WATCHDOG=1")

    def stopping(self) -> None:
        """Report that the server is stopping, which may take a while."""
        self._say("STOPPING=1")

    def _say(self, word: str) -> None:
        if not self._address:
            return
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as told:
            told.setblocking(False)  # a service manager that does not read causes no delay
            told.connect(self._address)
            told.sendall(word.encode())


@dataclass(frozen=True, slots=True)
class Bind:
    """The address at which a server listens, and the protection of connections to it."""

    host: str = "127.0.0.1"
    port: int = 8460
    certificate: Path | None = None
    key: Path | None = None
    behind_proxy: bool = False  # whether a proxy in front of the server ends TLS
    advertise: str = ""  # URL for servers of other hosts; "" means the address at which this server listens

    def checked(self) -> Bind:
        """Return this instance if it is safe.

        Raises:
            InputError: other machines could read tokens in transit, or a file of TLS does not exist.
        """
        if (self.certificate is None) != (self.key is None):
            raise InputError("serve: TLS needs both --tls-certificate and --tls-key, got only one; give both")
        for path in (self.certificate, self.key):
            if path is not None and not path.is_file():
                raise InputError(f"{path}: must be a PEM file for TLS, got no file; correct the path")
        if not self.secure and not is_loopback(self.host):
            raise InputError(
                f"serve: {self.host} can be reached from other machines, and tokens would be sent unencrypted; "
                "give --tls-certificate and --tls-key, or --behind-proxy where a proxy ends TLS"
            )
        if self.advertise:
            checked_advertised(self.advertise)
        return self

    def near(self, port: int) -> str:
        """Return the URL at which commands and jobs on this machine reach the server."""
        named = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}.get(self.host, _shown(self.host))
        return f"{self.scheme}://{named}:{port}"

    def advertised(self, port: int) -> str:
        """Return the URL at which servers of other hosts reach the server; "" if they cannot reach it."""
        if self.advertise:
            return self.advertise.rstrip("/")
        if self.certificate is None and not is_loopback(self.host):
            return ""  # a proxy ends TLS, and only --advertise could name its address
        named = socket.gethostname() if self.host in _EVERYWHERE else self.host
        return f"{self.scheme}://{_shown(named)}:{port}"

    @property
    def secure(self) -> bool:
        """Whether every client reaches the server over TLS."""
        return self.certificate is not None or self.behind_proxy

    @property
    def scheme(self) -> str:
        """The scheme of the server's URL, http or https."""
        return "https" if self.certificate else "http"


@dataclass(frozen=True, slots=True)
class Telling:
    """The choice of what a server logs and prints."""

    log: logs.Logging = field(default_factory=logs.Logging)
    token: bool = True  # whether to print the first token; false if the output is stored


def serve(workspace: Workspace, bind: Bind, say: Callable[[str], None], how: Telling) -> None:
    """Serve a workspace until SIGTERM, SIGINT or SIGHUP.

    Args:
        say: receives the lines for a person: the address and the first token.

    Raises:
        ConflictError: the workspace is served already.
        InputError: the server cannot listen at this address.
        WorkspaceError: the workspace is read-only.
    """
    bind.checked()
    public(), secrets_of("")  # called first to reject an invalid configuration
    logs.begin(how.log, held=True)
    systemd = Systemd(os.environ)
    if workspace.read_only:
        raise WorkspaceError(f"{workspace.root}: is read-only, so it cannot be served; make it writable")
    room = Room(most_of(raise_files()))
    with ExitStack() as stack:
        stack.enter_context(_alone(workspace.root))
        listening = stack.enter_context(listen(bind, room))
        port = listening.getsockname()[1]
        url = f"{bind.scheme}://{_shown(bind.host)}:{port}"
        key = workspace.ledger.entropy(32).hex()
        first = _first_token(workspace, how.token)
        beside: list[threading.Thread] = []
        stack.callback(_join, beside)  # after the driver's end, which ends them: none may use the database any more
        words = how.log.words()
        workers = Workers(workspace.root, words)
        stack.callback(workers.close)
        driver = _Driver(workspace.root, words)
        stack.callback(driver.close)
        peers, own = Peers(workspace.hosts), {"server": [os.getpid()]}
        meters = Meters(workspace, driver.counters.read, lambda: {**own, **driver.ids(), **workers.ids()})
        auth = Authentication(workspace, key)
        store = StoreLook(open_blobs(workspace.blobs.url).probe, driver.over)
        ready = Ready(workspace.ledger, store.trouble, driver.trouble)
        app = build(Server(workspace, auth, workers, ready.trouble, peers, bind.secure, bind.behind_proxy, meters))
        place = workspace.root / PLACE
        certificate = str(bind.certificate.resolve()) if bind.certificate else ""
        write_json(place, {"url": bind.near(port), "key": key, "pid": os.getpid(), "certificate": certificate})
        stack.callback(place.unlink, missing_ok=True)
        driver.start()
        beside += [_started(store.keep_looking), _started(_tidy, workers, workspace.ledger, driver.over)]
        if workspace.hosts is not None:
            workspace.hosts.announce(bind.advertised(port), process_name())
            stack.callback(_conceal, workspace.hosts)
            beside.append(_started(peers.keep_looking, driver.over))
        say(f"serving {workspace.root} at {url}")
        say(f"console: {url}/ (log in with a token)")
        log.info("serving at %s, Posttrain %s", url, __version__)
        if first:
            say(f"token of {workspace.actor}, admin, shown once: {first}")
            say(f"next: posttrain login {url}")
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, _heard)  # these signals end uvicorn, which raises each signal again afterwards
        sockets = [listening, *stack.enter_context(_listen_for_jobs(workspace, room))]
        server = HttpServer(configured(app, bind, room), systemd)
        signal.signal(signal.SIGHUP, server.handle_exit)
        server.run(sockets=sockets)


def _started(does: Callable[..., None], *words: Any) -> threading.Thread:
    thread = threading.Thread(target=does, args=words, name=does.__name__, daemon=True)
    thread.start()
    return thread


def _join(threads: Iterable[threading.Thread]) -> None:
    until = time.monotonic() + _JOIN
    for one in threads:
        one.join(max(0.0, until - time.monotonic()))


def _conceal(hosts: Hosts) -> None:
    with suppress(PosttrainError):  # the database is unreachable; other hosts notice that no server answers
        hosts.announce("", "")


def configured(app: Starlette, bind: Bind, room: Room | None = None, drain: int = 10) -> uvicorn.Config:
    """Return the configuration of uvicorn, without WebSockets and without uvicorn's log lines, which contain paths.

    The headers of a proxy are read by `Observing`, not by uvicorn.

    Args:
        drain: seconds that requests in progress may take after a signal to end.
    """
    return uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=drain,
        ssl_certfile=bind.certificate, ssl_keyfile=bind.key, server_header=False,
        h11_max_incomplete_event_size=1 << 16, proxy_headers=False, ws="none", http=kind_of(room),
    )  # fmt: skip


class HttpServer(uvicorn.Server):
    """The uvicorn server. It notifies systemd, and ends open streams, which would otherwise keep it from ending."""

    announces = True  # whether it is ready as soon as it listens

    def __init__(self, config: uvicorn.Config, systemd: Systemd) -> None:
        super().__init__(config)
        self._systemd = systemd

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        asyncio.get_running_loop().set_exception_handler(
            quiet(lambda loop, context: loop.default_exception_handler(context))
        )
        await super().startup(sockets)
        # A full garbage collection visits every long-lived object and delays all requests by 0.1 s. Therefore it skips
        # the objects that exist at startup, and is a hundred times rarer; the objects of requests are freed by the
        # collections of young objects.
        gc.freeze()
        gc.set_threshold(5_000, 10, 100)
        if self.announces:
            self._systemd.ready()

    async def on_tick(self, counter: int) -> bool:
        """See `uvicorn.Server.on_tick`. The event loop calls this ten times a second."""
        self._systemd.alive()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: object) -> None:
        """See `uvicorn.Server.handle_exit`. A process that does not end prints where its threads are, and exits."""
        faulthandler.dump_traceback_later((self.config.timeout_graceful_shutdown or 0) + _END, file=2, exit=True)
        self._systemd.stopping()
        self.config.app.state.ending = True  # type: ignore[union-attr]  # the application
        super().handle_exit(sig, frame)  # type: ignore[arg-type]


def _heard(*_: object) -> None:
    """Ignore a signal, because open resources must be closed after the server has ended, not before."""


def _first_token(workspace: Workspace, wanted: bool) -> str:
    """Return an admin's token if no principal has a role yet; "" if a principal has a role or no token is wanted.

    While no principal has a role, every user who can read the workspace's folder is an admin of the project, and no
    other user has access.
    """
    ledger = workspace.ledger
    with ledger.transaction(workspace.actor) as transaction:  # if several servers start, only one issues a token
        transaction.alone()
        if transaction.snapshot.roles():
            return ""
        transaction.set_role(workspace.actor, Role.ADMIN)
    if not wanted:
        return ""
    secret, _ = issue(ledger, workspace.actor, workspace.actor, {ledger.project: Role.ADMIN}, FIRST_TOKEN_SECONDS)
    return secret


def _alone(root: Path) -> AbstractContextManager[None]:
    said = f"{root}: is served already, {server_of(root)}; end that server first"
    return held(root / LOCK, refusal=Refusal(0.0, ConflictError(said)))


@contextmanager
def listen(bind: Bind, room: Room) -> Iterator[Door]:
    """Listen at the address of `bind`.

    Raises:
        InputError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in bind.host else socket.AF_INET
    # if the protocol is given, asyncio sends each write immediately; otherwise a response waits 40 ms for an ACK
    listening = Door(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((bind.host, bind.port))
            listening.listen(2048)
        except OSError as error:
            raise InputError(
                f"cannot listen at {bind.host} port {bind.port}: {error.strerror or error}; name another --port"
            ) from error
        listening.set_inheritable(False)
        listening.room = room
        yield listening
    finally:
        listening.close()


@contextmanager
def _listen_for_jobs(workspace: Workspace, room: Room) -> Iterator[list[socket.socket]]:
    """Listen for jobs in images, which have no network, at a socket in a folder that is mounted in the containers."""
    if not workspace.jobs.executor.images:
        yield []
        return
    folder = workspace.root / SOCKETS
    make_folder(folder)
    (folder / SOCKET).unlink(missing_ok=True)
    place, listening = os.open(folder, os.O_RDONLY | os.O_DIRECTORY), Door(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(f"/proc/self/fd/{place}/{SOCKET}")  # the real path may be too long for a socket
        os.chmod(folder / SOCKET, 0o600)
        listening.listen(2048)
        listening.room = room
        yield [listening]
    finally:
        listening.close()
        os.close(place)
        (folder / SOCKET).unlink(missing_ok=True)


class _Driver:
    """The child process that drives runs; it is restarted whenever it ends."""

    def __init__(self, root: Path, words: list[str]) -> None:
        self._root, self._words = root, words
        self.counters = SharedCounters()
        self.over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._trouble = "the driver is starting"
        self._keeper = threading.Thread(target=self._keep, name="driver-keeper")

    def start(self) -> None:
        """Start the driver, and restart it whenever it ends."""
        self._keeper.start()

    def trouble(self) -> str:
        """Return the reason why no run is driven; "" if runs are driven."""
        return self._trouble

    def ids(self) -> dict[str, list[int]]:
        """Return the driver's process id under its kind, `driver`."""
        return {"driver": [self._process.pid] if self._process is not None else []}

    def close(self) -> None:
        """End the driver. Jobs continue."""
        self.over.set()
        if self._keeper.is_alive():
            self._keeper.join()

    def _keep(self) -> None:
        tries = 0
        while not self.over.is_set():
            try:
                words = [str(self._root), *self._words, str(self.counters.descriptor)]
                process, lifeline = start("posttrain.server.driver", words, 0, passed=(self.counters.descriptor,))
            except OSError as error:
                self._trouble = f"the driver cannot be started: {error.strerror}"
                self.over.wait(_AGAIN[-1])
                continue
            self._process, self._trouble = process, ""
            with lifeline:  # when this process dies, the driver's stdin ends
                tries = 0 if self._lived(process) else tries + 1
            self.counters.clear()
            if not self.over.is_set():
                self._trouble = f"the driver ended with {process.returncode}; it is started again"
                log.error("%s", self._trouble)
                self.over.wait(_AGAIN[min(tries, len(_AGAIN) - 1)])

    def _lived(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait for the end of the process; return whether it lived long enough."""
        lived = 0.0
        while process.poll() is None:
            if self.over.wait(0.2):
                with suppress(ProcessLookupError):
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(30.0)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                return True
            lived += 0.2
        return lived >= _STEADY


def _tidy(workers: Workers, ledger: Ledger, over: threading.Event) -> None:
    for round_ in itertools.count():
        if over.wait(_TIDY):
            return
        with suppress(PosttrainError):  # the database is unreachable; the next round tries again
            workers.tidy()
            if round_ % _FORGET == 0:
                forget_before(ledger, ledger.clock.now() - ANSWERS_SECONDS)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
