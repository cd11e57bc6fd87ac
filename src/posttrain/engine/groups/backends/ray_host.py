"""What runs in each process of a Ray pool: one host, with the workers of every role that lives there."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, final

import psutil
import ray
import torch
import torch.distributed as dist

from posttrain.domain.errors import InputError
from posttrain.engine.groups.payload import Parcel, pack, unpack
from posttrain.engine.groups.port import Process
from posttrain.engine.groups.rank_context import RankContext


@final
@dataclass(frozen=True, slots=True)
class Failure:
    """An exception on its way to the controller."""

    pickled: bytes | None  # None: it cannot be rebuilt elsewhere
    summary: str  # `ValueError: no such token`
    traceback: str


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended; without an answer when it failed, or when the answer stays in the object store."""

    started: float  # seconds since the epoch
    seconds: float
    answer: Parcel | None = None
    failure: Failure | None = None


@final
class Host:
    """One rank. Ray makes it an actor with one thread, so calls run one at a time, in the order they were made.

    Args:
        context: what its workers get.
        paths: the controller's `sys.path`; what is missing here is appended.
        threads: of torch.
    """

    def __init__(self, context: RankContext, paths: Sequence[str], threads: int) -> None:
        sys.path.extend(path for path in paths if path not in sys.path)
        torch.set_num_threads(threads)
        self._context = context
        self._address = ray.util.get_node_ip_address()
        self._workers: dict[str, Any] = {}
        self._store: Any = None  # a TCPStore; torch exports the name only where it was built with it
        if context.device != "cpu":
            torch.cuda.set_device(context.device)

    def __repr__(self) -> str:
        """The prefix of its lines in the controller's log."""
        return f"{self._context.pool}[{self._context.rank}]"

    def identify(self, alone: bool) -> Process:
        """Which process this is."""
        return Process(self._context.rank, os.getpid(), self._address, self._context.device, alone)

    def open_store(self, seconds: float) -> tuple[str, int]:
        """Rank 0: listen on this node's address for the other ranks.

        The socket is made here because a store that makes its own would listen on every address of the node.
        """
        listening = socket.create_server((self._address, 0), backlog=max(128, self._context.size))
        port: int = listening.getsockname()[1]
        self._store = self._tcp_store((self._address, port), seconds, listening.detach())
        return self._address, port

    def join(self, address: tuple[str, int], seconds: float) -> None:
        """Form the default process group of the pool's ranks; a collective may last so many seconds."""
        interfaces = psutil.net_if_addrs().items()
        mine = [name for name, found in interfaces if any(a.address == self._address for a in found)]
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if mine else ():
            os.environ[variable] = mine[0]
        store = self._store or self._tcp_store(address, seconds)
        dist.init_process_group(
            "gloo" if self._context.device == "cpu" else "cpu:gloo,cuda:nccl",
            store=store,
            rank=self._context.rank,
            world_size=self._context.size,
            timeout=timedelta(seconds=seconds),
        )
        self._store = store

    def start(self, role: str, parcel: Parcel) -> Outcome:
        """Construct a worker of the packed `(class, args, kwargs)`."""
        started, begin = time.time(), time.perf_counter()
        try:
            worker, args, kwargs = unpack(parcel, fetch)
            self._workers.pop(role, None)  # its memory is free when the next one loads
            self._workers[role] = worker(self._context, *args, **kwargs)
        except Exception as error:
            return Outcome(started, time.perf_counter() - begin, failure=_failure(error))
        return Outcome(started, time.perf_counter() - begin, pack(None))

    def call(self, role: str, parcel: Parcel) -> Outcome:
        """Run the packed `(method, args, kwargs)` on the role's worker."""
        return self._run(role, parcel)

    def keep(self, role: str, parcel: Parcel) -> tuple[Outcome, Parcel | None]:
        """As `call`; two values for the object store, of which the controller fetches the first only."""
        outcome = self._run(role, parcel)
        return Outcome(outcome.started, outcome.seconds, None, outcome.failure), outcome.answer

    def stream(self, role: str, parcel: Parcel) -> Iterator[Outcome]:
        """As `call`, of a method that yields: an outcome for each answer."""
        answers: Iterator[Any] | None = None
        while True:
            started, begin = time.time(), time.perf_counter()
            try:
                if answers is None:
                    method, args, kwargs = unpack(parcel, fetch)
                    answers = iter(method(self._worker(role), *args, **kwargs))
                value = next(answers)
                outcome = Outcome(started, time.perf_counter() - begin, pack(value))
            except StopIteration:
                return
            except Exception as error:
                yield Outcome(started, time.perf_counter() - begin, failure=_failure(error))
                return
            yield outcome

    def close(self) -> None:
        """Let go of the workers and leave the process group."""
        self._workers.clear()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _run(self, role: str, parcel: Parcel) -> Outcome:
        started, begin = time.time(), time.perf_counter()
        try:
            method, args, kwargs = unpack(parcel, fetch)
            started, begin = time.time(), time.perf_counter()
            value = method(self._worker(role), *args, **kwargs)
            seconds = time.perf_counter() - begin
            return Outcome(started, seconds, pack(value))
        except Exception as error:
            return Outcome(started, time.perf_counter() - begin, failure=_failure(error))

    def _worker(self, role: str) -> Any:
        if role not in self._workers:
            raise InputError(f"pool {self._context.pool} must have started role {role}, has {sorted(self._workers)}")
        return self._workers[role]

    def _tcp_store(self, address: tuple[str, int], seconds: float, descriptor: int | None = None) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]
            *address,
            self._context.size,
            descriptor is not None,
            timedelta(seconds=seconds),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )


def fetch(handle: Any) -> Parcel:
    """The stored value of a handle, from the object store."""
    parcel: Parcel = ray.get(handle)
    return parcel


def _failure(error: Exception) -> Failure:
    """The exception as itself where it survives the journey, as text in any case."""
    try:
        pickled: bytes | None = pickle.dumps(error)
        if type(pickle.loads(pickled or b"")) is not type(error):  # noqa: S301  # our own bytes, read back
            pickled = None
    except Exception:
        pickled = None
    summary = "".join(traceback.format_exception_only(error)).strip().splitlines()[0]
    return Failure(pickled, summary, "".join(traceback.format_exception(error)).rstrip())
