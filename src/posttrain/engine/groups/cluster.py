"""The Ray cluster of a job's pools: a running cluster, or a local cluster that the job starts on this machine.

A local cluster is reachable from this machine only, requires a token that only its processes have, and ends when its
owner ends, even after `kill -9` (see `groups.reaper`).
"""

import ipaddress
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import psutil

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.engine.groups.port import Backend
from posttrain.engine.groups.reaper import VARIABLE

# Ray reads this variable at import. If it is not 0, Ray uses the machine's outward address and listens on all addresses
_OUTWARD = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ATTEMPTS = "RAY_NUM_REDIS_GET_RETRIES"  # each takes about 40 s; Ray's default of 20 would take a quarter of an hour
_TOKEN = secrets.token_hex(32)  # one per process, because Ray reads it once
_PREPARED = threading.Event()  # set when ray was imported with a local cluster's settings
_LONGEST = 40  # characters of a temporary folder's path; the paths of Ray's sockets in the folder may have at most 107
_GIB = 1024**3
_LEAVING = 40.0  # seconds for the reaper to finish
_COMING_UP = 300.0  # seconds for a local cluster to start; usually 3


@final
@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster that this process is connected to: `Cluster(address="127.0.0.1:41033", local=True)`."""

    address: str
    local: bool

    def resources(self) -> dict[str, float]:
        """Return the resources of all nodes, in use or not, as Ray counts them: `{"CPU": 32.0, "GPU": 8.0, …}`."""
        import ray

        found: dict[str, float] = ray.cluster_resources()
        return found

    def backend(
        self,
        pool: str,
        ranks: int = 1,
        *,
        cpus: float = 1.0,
        gpus: float = 0.0,
        kind: str | None = None,
        threads: int = 1,
        sequence_parallel: int = 1,
        start_seconds: float = 120.0,
        collective_seconds: float = 1800.0,
        collective: bool = True,
    ) -> Backend:
        """Start processes for a pool; `cpus` and `gpus` are those of one rank. See `RayBackend`.

        Raises:
            InputError: the pool would not fit in the cluster even if the cluster were empty.
            InfrastructureError: the cluster had no room within `start_seconds`; processes did not start in time.
        """
        # imported here because ray is an optional package, and `open_cluster` has to prepare its import
        from posttrain.engine.groups.backends.ray import RankResources, RayBackend

        return RayBackend(
            pool,
            ranks,
            RankResources(cpus, gpus, kind),
            threads=threads,
            sequence_parallel=sequence_parallel,
            start_seconds=start_seconds,
            collective_seconds=collective_seconds,
            collective=collective,
        )


@contextmanager
def open_cluster(
    address: str | None = None, *, cpus: int | None = None, store_bytes: int | None = None, seconds: float = 60.0
) -> Iterator[Cluster]:
    """Connect to a running cluster, or start a local one; at the end of the block disconnect, or end the local cluster.

    Args:
        address: `host:port` of a running cluster's head; None starts a local one.
        cpus: CPUs that a local cluster offers; None: those of this machine.
        store_bytes: shared memory of a local cluster; None: a tenth of this machine's memory, at most 8 GiB.
        seconds: maximum wait for a running cluster to accept a connection.

    Raises:
        InputError: ray is not installed, or was imported before a local cluster could be prepared; this process is
            already in a cluster; the address is malformed.
        InfrastructureError: there is no cluster at the address; a local cluster did not start in time.
    """
    with _own(cpus, store_bytes) if address is None else _joined(address, seconds) as cluster:
        yield cluster


@contextmanager
def _joined(address: str, seconds: float) -> Iterator[Cluster]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"ray_address must be host:port of a cluster's head, got {address!r}")
    with _environment({_ATTEMPTS: os.environ.get(_ATTEMPTS, "1")}):
        ray = _ray()
    until, error = time.monotonic() + seconds, _unanswered(host, port, seconds)
    while error is not None and time.monotonic() < until:  # its head may be starting
        time.sleep(0.5)
        error = _unanswered(host, port, seconds)
    if error is not None:
        raise InfrastructureError(
            f"no Ray cluster answered at {address} within {seconds:g} seconds: {error}; start the cluster, or remove "
            "ray_address for a local one"
        ) from error
    _init(
        ray,
        f"the Ray cluster at {address} did not accept this job (ray_address must be the address that its head reports)",
        address=address,
    )
    try:
        yield Cluster(address, local=False)
    finally:
        ray.shutdown()


def _unanswered(host: str, port: str, seconds: float) -> OSError | None:
    try:
        socket.create_connection((host.strip("[]"), int(port)), seconds).close()
    except OSError as error:
        return error
    return None


@contextmanager
def _own(cpus: int | None, store_bytes: int | None) -> Iterator[Cluster]:
    if sys.modules.get("ray") is not None and not _PREPARED.is_set():
        raise InputError(
            "a local Ray cluster must be limited to the loopback interface and its token, but ray was imported before "
            "that could be set; open the cluster before ray is imported"
        )
    folder = _folder()
    reaper = subprocess.Popen(
        [sys.executable, "-P", "-m", "posttrain.engine.groups.reaper", folder, f"{_COMING_UP:g}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # the reaper must outlive the signals that end this process and its group
    )
    try:
        os.environ[_OUTWARD] = "0"  # stays set, because child processes that join the cluster read it too
        settings = {
            VARIABLE: folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _TOKEN,
            "RAY_COLOR_PREFIX": "0",
            "RAY_DEDUP_LOGS": "0",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        with _environment(settings):
            ray = _ray()
            _PREPARED.set()
            _init(
                ray,
                "a local Ray cluster did not start",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=store_bytes or int(min(psutil.virtual_memory().total / 10, 8 * _GIB)),
                _temp_dir=folder,
            )
        _tell(reaper)
        try:
            yield Cluster(_confined(ray), local=True)
        finally:
            ray.shutdown()
    finally:
        assert reaper.stdin is not None
        reaper.stdin.close()
        reaper.wait(_LEAVING)


def _tell(reaper: subprocess.Popen[bytes]) -> None:
    """Report to the reaper that the cluster is up.

    Raises:
        InfrastructureError: the reaper has already given up the cluster.
    """
    assert reaper.stdin is not None
    try:
        reaper.stdin.write(b"up")
        reaper.stdin.flush()
    except OSError as error:
        raise InfrastructureError(f"a local Ray cluster did not start within {_COMING_UP:g} seconds") from error


def _ray() -> Any:
    """Import and return the optional package ray."""
    try:
        import ray
    except ImportError as error:
        raise InputError(
            'pools of several processes need the package ray, which is not installed; pip install "posttrain[ray]"'
        ) from error
    if ray.is_initialized():
        raise InputError(
            "a process must be in at most one Ray cluster, but this process is already in a cluster; leave that "
            "cluster first"
        )
    return ray


def _init(ray: Any, failure: str, **settings: Any) -> None:
    """Call `ray.init`, without its signal handlers: the job handles SIGTERM.

    Call it in a thread that outlives the cluster: Ray's processes die with the thread that started them.
    """
    mine = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(log_to_driver=True, logging_level=logging.WARNING, **settings)
    except Exception as error:  # Ray passes on any error, OSError and RuntimeError among others
        ray.shutdown()
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise InfrastructureError(f"{failure}: {reason}; see the job's log") from error
    finally:
        for number, handler in handlers.items() if mine else ():
            signal.signal(number, handler)


def _confined(ray: Any) -> str:
    """Return the address of a local cluster's head, which must not be reachable from other machines.

    Raises:
        InfrastructureError: the address is reachable from other machines.
    """
    address: str = ray.get_runtime_context().gcs_address
    host = address.rpartition(":")[0].strip("[]")
    if not ipaddress.ip_address(host).is_loopback:
        raise InfrastructureError(
            f"a local Ray cluster must be limited to the loopback interface, got {host}; use a version of ray with "
            f"{_OUTWARD}, or name a running cluster as ray_address"
        )
    return address


def _folder() -> str:
    """Create the cluster's own folder, with a short path."""
    base = tempfile.gettempdir()
    return tempfile.mkdtemp(prefix="ptr-", dir=base if len(base) <= _LONGEST else Path("/tmp"))


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for processes started inside the block; restore them in this process at the end."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
