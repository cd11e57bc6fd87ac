"""Metrics of a server in the text format of Prometheus (`GET /metrics`), and the log of requests.

No label contains a project, a principal, a run or any other name that users choose, so the number of series is bounded,
and the metrics reveal no names. Numbers that require database statements are queried at most once in `AGE` seconds,
however often they are read. The driver publishes its counters in memory that the driver and the server share.

Every request is counted, and writes one line to the log. The log records only values that the server derived from a
request: the name of the route, the status, and the identified caller. Paths, queries, headers and bodies are never
recorded.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import mmap
import os
import platform
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from posttrain._version import __version__
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import PosttrainError
from posttrain.server.logs import facts
from posttrain.store.ledger import LedgerCounts, ledger_counts
from posttrain.store.schema import SCHEMA_VERSION

if TYPE_CHECKING:
    from posttrain.app.workspace import Workspace
    from posttrain.server.authentication import Asker

METRICS_TYPE = CONTENT_TYPE_PLAIN_0_0_4
AGE = 10.0  # seconds for which numbers from the database and the store are reused
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)  # upper limits in seconds
_PROBE = digest_bytes(b"is anybody there?")
_BYTES, _HEAD = 4096, 8
_TRIES = 5
disable_created_metrics()  # type: ignore[no-untyped-call]  # would add a second series for each metric
Processes = Callable[[], Mapping[str, list[int]]]
log = logging.getLogger("posttrain.server.access")
UNKNOWN, CONSOLE = "none", "console"  # the verbs of requests without a route and of pages
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_STATUS = 499  # the client disconnected before there was a status


class Meters:
    """Counts requests, and collects the numbers of the database, the store and the processes when they are read.

    Args:
        workspace: the workspace whose database and store are probed; None: nothing is probed.
        driver: returns the numbers that the driver published.
        processes: returns kind → ids of processes.
    """

    def __init__(
        self,
        workspace: Workspace | None = None,
        driver: Callable[[], Mapping[str, float]] = dict,
        processes: Processes = dict,
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter(
            "posttrain_requests", "Requests that have ended.", ["verb", "status"], registry=registry
        )
        self._seconds = Histogram(
            "posttrain_request_seconds", "Seconds until the response was complete, not including streams.", ["verb"],
            buckets=_BUCKETS, registry=registry,
        )  # fmt: skip
        self._in_flight = Gauge("posttrain_requests_in_flight", "Requests in progress.", registry=registry)
        self._followers = Gauge("posttrain_followers", "Open streams.", registry=registry)
        self._received = Counter("posttrain_received_bytes", "Bytes of request bodies received.", registry=registry)
        self._uploaded = Counter("posttrain_uploaded_bytes", "Bytes of uploads received.", registry=registry)
        self._sent = Counter("posttrain_sent_bytes", "Bytes of response bodies sent.", registry=registry)
        about = {"version": __version__, "schema": SCHEMA_VERSION, "python": platform.python_version()}
        Gauge(
            "posttrain_build_info",
            "Versions of Posttrain, its database schema and Python.",
            list(about),
            registry=registry,
        ).labels(**about).set(1)
        registry.register(_Asked(workspace, driver, processes))

    def begun(self) -> None:
        """Count a request that arrived."""
        self._in_flight.inc()

    def follows(self, number: int) -> None:
        """Add `number` to the number of open streams."""
        self._followers.inc(number)

    def ended(self, verb: str, seen: Seen, seconds: float) -> None:
        """Count a request that was answered or broken off."""
        self._in_flight.dec()
        self._requests.labels(verb, str(seen.status) if 100 <= seen.status < 600 else "other").inc()
        if not seen.follows:
            self._seconds.labels(verb).observe(seconds)
        self._received.inc(seen.received)
        self._sent.inc(seen.sent)
        if verb == "blob_add":
            self._uploaded.inc(seen.received)

    def page(self) -> bytes:
        """Return all metrics as text. Call this in a thread, because it queries the database and the store."""
        return generate_latest(self._registry)


class _Asked:
    """The metrics that are collected on each read."""

    def __init__(
        self, workspace: Workspace | None, driver: Callable[[], Mapping[str, float]], processes: Processes
    ) -> None:
        self._workspace, self._driver, self._processes = workspace, driver, processes
        self._lock = threading.Lock()
        self._at = -AGE
        self._kept: list[Metric] = []
        self._failures = {"database": 0, "store": 0}
        self._seen: dict[int, float] = {}  # waiting object → time at which it was first seen

    def describe(self) -> list[Metric]:
        """Return an empty list, so registration makes no query."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield metrics in the form that `prometheus_client` requires."""
        yield from _driven(self._driver())
        yield from _memory(self._processes())
        if self._workspace is None:
            return
        # a concurrent reader gets the previous numbers, so it does not wait for a database that hangs
        if time.monotonic() - self._at >= AGE and self._lock.acquire(blocking=False):
            try:
                self._kept = list(self._ask(self._workspace))
                self._at = time.monotonic()
            finally:
                self._lock.release()
        yield from self._kept

    def _ask(self, workspace: Workspace) -> Iterator[Metric]:
        ledger, blobs, found = workspace.ledger, workspace.blobs, list[LedgerCounts]()
        up = GaugeMetricFamily("posttrain_up", "1 if the database or the store answers, else 0.", labels=["of"])
        took = GaugeMetricFamily(
            "posttrain_probe_seconds", "Seconds of the last check of the database or the store.", labels=["of"]
        )
        failed = CounterMetricFamily(
            "posttrain_probe_failures", "Failed checks of the database or the store.", labels=["of"]
        )
        looks: Mapping[str, Callable[[], object]] = {
            "database": lambda: found.append(ledger_counts(ledger.database, ledger.clock)),
            "store": lambda: blobs.has(_PROBE),
        }
        for name, look in looks.items():
            began, good = time.perf_counter(), True
            try:
                look()
            except PosttrainError:
                good = False
                self._failures[name] += 1
            up.add_metric([name], float(good))
            took.add_metric([name], time.perf_counter() - began)
            failed.add_metric([name], self._failures[name])
        yield from (up, took, failed)
        yield GaugeMetricFamily(
            "posttrain_disk_free_bytes", "Free bytes on the disk of the workspace.", value=_free(workspace.root)
        )
        for one in found:
            yield from _stood(one, self._waited(one))

    def _waited(self, now: LedgerCounts) -> float:
        """Return the longest wait for a driver, in seconds.

        The wait of an object that is due immediately is measured from the time at which this process first saw it.
        """
        moment = time.monotonic()
        self._seen = {one: self._seen.get(one, moment) for one in now.at_once}
        return max(now.oldest_due, moment - min(self._seen.values(), default=moment))


def _driven(shown: Mapping[str, float]) -> Iterator[Metric]:
    yield GaugeMetricFamily("posttrain_driver_up", "1 if a driver has made a pass, else 0.", value=float(bool(shown)))
    if not shown:
        return
    yield CounterMetricFamily("posttrain_driver_passes", "Passes over all runs.", value=shown["passes"])
    yield CounterMetricFamily("posttrain_driver_pass_seconds", "Seconds spent in passes.", value=shown["seconds"])
    yield CounterMetricFamily("posttrain_driver_errors", "Passes that could not use the ledger.", value=shown["errors"])
    since = max(0.0, time.monotonic() - shown["at"])
    yield GaugeMetricFamily("posttrain_driver_last_pass_seconds", "Seconds since the last pass ended.", value=since)


def _memory(processes: Mapping[str, list[int]]) -> Iterator[Metric]:
    used = GaugeMetricFamily(
        "posttrain_resident_memory_bytes", "Resident memory of the processes of a kind.", labels=["process"]
    )
    there = GaugeMetricFamily("posttrain_processes", "Number of live processes of a kind.", labels=["process"])
    for kind, ids in processes.items():
        sizes = [_resident(one) for one in ids]
        used.add_metric([kind], sum(sizes))
        there.add_metric([kind], sum(size > 0 for size in sizes))
    yield from (used, there)


def _resident(process: int) -> int:
    try:
        return int(psutil.Process(process).memory_info().rss)
    except psutil.Error:
        return 0


def _free(root: Path) -> float:
    try:
        return float(shutil.disk_usage(root).free)
    except OSError:
        return 0.0


def _stood(one: LedgerCounts, waited: float) -> Iterator[Metric]:
    runs = GaugeMetricFamily("posttrain_runs", "Runs by state, at most 100000 of each.", labels=["state"])
    for state, number in one.runs.items():
        runs.add_metric([state], number)
    yield runs
    for name, text, value in (
        ("posttrain_work_due", "Objects that wait for a driver.", one.due),
        ("posttrain_work_oldest_seconds", "Seconds for which the oldest object has waited for a driver.", waited),
        ("posttrain_work_leased", "Objects that a driver has leased.", one.leased),
        ("posttrain_work_leases_expired", "Leases that expired and were not taken over.", one.expired),
        ("posttrain_work_dead", "Objects set aside until a person resumes them (posttrain dead).", one.dead),
        ("posttrain_events_sealed", "Events in the sealed log.", one.sealed),
        ("posttrain_events_unsealed", "Events appended and not sealed.", one.unsealed),
        ("posttrain_events_unsealed_seconds", "Age in seconds of the oldest unsealed event.", one.oldest_unsealed),
    ):
        yield GaugeMetricFamily(name, text, value=value)
    sinks = GaugeMetricFamily("posttrain_sinks", "Sinks by kind and state.", labels=["kind", "state"])
    behind = GaugeMetricFamily(
        "posttrain_sink_behind_events", "Undelivered events of the sink with the most of them.", labels=["kind"]
    )
    failures = GaugeMetricFamily(
        "posttrain_sink_failures", "Consecutive failures of the sink that has the most of them.", labels=["kind"]
    )
    for kind, found in one.sinks.items():
        for state, number in found.states.items():
            sinks.add_metric([kind, state], number)
        behind.add_metric([kind], found.behind)
        failures.add_metric([kind], found.failures)
    yield from (sinks, behind, failures)


class SharedCounters:
    """Shared memory with numbers that one process writes and another reads.

    Args:
        descriptor: the memory's descriptor, from the process that created the memory; None: create new memory.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _made() if descriptor is None else descriptor
        os.set_inheritable(self.descriptor, False)
        self._memory = mmap.mmap(self.descriptor, _BYTES)

    def write(self, numbers: Mapping[str, float]) -> None:
        """Replace the numbers."""
        body = json.dumps(dict(numbers)).encode()
        self._memory[: _HEAD + len(body)] = _head(body) + body

    def read(self) -> dict[str, float]:
        """Return the numbers; empty if none were written yet, or if every try coincided with a write."""
        for _ in range(_TRIES):
            head = bytes(self._memory[:_HEAD])
            body = bytes(self._memory[_HEAD : _HEAD + int.from_bytes(head[:4])])
            if head == _head(body) and body:
                return {str(name): float(value) for name, value in json.loads(body).items()}
        return {}

    def clear(self) -> None:
        """Remove the numbers, because the process that wrote them has ended."""
        self._memory[:_HEAD] = bytes(_HEAD)

    def close(self) -> None:
        """Release the memory."""
        self._memory.close()
        os.close(self.descriptor)


def _head(body: bytes) -> bytes:
    return len(body).to_bytes(4) + zlib.crc32(body).to_bytes(4)


def _made() -> int:
    if hasattr(os, "memfd_create"):
        file = os.memfd_create("posttrain-counters")
    else:
        file, path = tempfile.mkstemp()
        Path(path).unlink()
    os.truncate(file, _BYTES)
    return file


@dataclass(slots=True)
class Seen:
    """The numbers of one request."""

    status: int = 0
    received: int = 0  # bytes of the body
    sent: int = 0
    follows: bool = False
    request: str = ""


class Observing:
    """The outermost middleware: counts and logs each request.

    Args:
        may_name: returns whether a caller's project exists and the caller may see it; otherwise its name is not logged.
        behind_proxy: whether a trusted proxy sets the last address in `X-Forwarded-For`, which is then the client's
            address; earlier addresses are unverified, because the client can send them.
    """

    def __init__(
        self, app: ASGIApp, meter: Meters, may_name: Callable[[Asker], bool], behind_proxy: bool = False
    ) -> None:
        self._app, self._meter, self._may_name, self._behind_proxy = app, meter, may_name, behind_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._believe_proxy(scope)
        seen, began = Seen(), time.perf_counter()

        async def received() -> Message:
            message = await receive()
            seen.received += len(message.get("body", b""))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._started(seen, message)
            seen.sent += len(message.get("body", b""))
            await send(message)

        self._meter.begun()
        try:
            await self._app(scope, received, sent)
        finally:
            seconds, verb = time.perf_counter() - began, verb_of(scope)
            seen.status = seen.status or _NO_STATUS
            if seen.follows:
                self._meter.follows(-1)
            self._meter.ended(verb, seen, seconds)
            log.info("%s %d", verb, seen.status, extra=facts(**self._told(scope, verb, seen, seconds)))

    def _started(self, seen: Seen, message: Message) -> None:
        named = {bytes(name).lower(): bytes(value).decode("latin-1") for name, value in message.get("headers", ())}
        seen.status, seen.request = message["status"], named.get(b"posttrain-request", "")
        seen.follows = named.get(b"content-type", "").startswith("text/event-stream")
        self._meter.follows(int(seen.follows))

    def _told(self, scope: Scope, verb: str, seen: Seen, seconds: float) -> Mapping[str, Any]:
        state: Mapping[str, Any] = scope.get("state", {})
        who: Asker | None = state.get("asker")
        run = scope.get("path_params", {}).get("run_id") if 200 <= seen.status < 300 else None  # otherwise unverified
        return {
            "request": seen.request or state.get("id"),
            "principal": state.get("principal"),
            "project": who.project if who and self._may_name(who) else None,
            "verb": verb,
            "method": scope["method"] if scope["method"] in _METHODS else "other",
            "status": seen.status,
            "milliseconds": round(seconds * 1000, 2),
            "run": run,
            "client": scope["client"][0] if scope.get("client") else None,
        }

    def _believe_proxy(self, scope: Scope) -> None:
        """Replace the client's address and the scheme by those that a trusted proxy reports."""
        if not self._behind_proxy:
            return
        headers = Request(scope).headers
        with suppress(ValueError, IndexError):
            last = headers.getlist("x-forwarded-for")[-1].rpartition(",")[2].strip()
            scope["client"] = (str(ipaddress.ip_address(last)), 0)
        if headers.get("x-forwarded-proto") in ("http", "https"):
            scope["scheme"] = headers["x-forwarded-proto"]


def verb_of(scope: Scope) -> str:
    """Return the name of the route that handled a request; `CONSOLE` for a page of the console."""
    route = scope.get("route")
    return str(route.name) if route is not None else CONSOLE if "endpoint" in scope else UNKNOWN
