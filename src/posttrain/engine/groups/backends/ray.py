"""Workers in Ray actors, one process per rank on one machine or many, and a pool's resources in a Ray cluster.

An actor is a `Host`, an ordinary class; methods and arguments reach the host as values. Ray schedules processes,
transports values and detects deaths. Ray restarts nothing. If ranks work together, a lost rank means a lost pool, and
the job resumes from a checkpoint; if ranks work alone, `replace` starts a lost rank again.

A pool reserves one bundle of resources per rank in the cluster, and gets either all bundles or none.
"""

import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import psutil
import ray
from ray.exceptions import RayError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.engine.groups.backends.ray_host import Host, RayCall, RayFlow, settle, take
from posttrain.engine.groups.port import (
    Answer,
    Call,
    Flow,
    Parcel,
    Process,
    RankContext,
    Stored,
    WorkerLostError,
    check_importable,
    pack,
)

_ACCELERATOR = "accelerator_type:"
_TRACE = 0.001  # requested amount of an accelerator's marker resource, and of CPUs if none are reserved
_PREFIX = "posttrain-"
R = TypeVar("R")
_SMALL = 64 * 1024  # bytes; Ray copies smaller arguments into each call anyway
_CLOSING = 10.0  # seconds for processes to exit by themselves, and the same again after they are killed


@final
@dataclass(frozen=True, slots=True)
class RankResources:
    """Resources of one rank: `RankResources(cpus=4, gpus=1, kind="h100")`."""

    cpus: float = 1.0  # 0: no CPUs are reserved
    gpus: float = 0.0
    kind: str | None = None  # kind of accelerator as Ray names it, in any letter case

    def bundle(self, offered: Mapping[str, float]) -> dict[str, float]:
        """Return the resources as Ray counts them; `offered` has the cluster's spelling of the accelerator."""
        wanted = {"CPU": float(self.cpus) or _TRACE}
        if self.gpus:
            wanted["GPU"] = float(self.gpus)
        if self.kind:
            name = f"{_ACCELERATOR}{self.kind.upper()}"
            wanted[next((key for key in offered if key.casefold() == name.casefold()), name)] = _TRACE
        return wanted


def reserve(pool: str, ranks: int, resources: RankResources, seconds: float) -> Any:
    """Reserve a placement group with one bundle per rank, close together where possible.

    Raises:
        InputError: the cluster could not hold the pool even if the cluster were empty; nothing was created.
        InfrastructureError: the cluster had no room for `seconds`.
    """
    offered = ray.cluster_resources()
    bundle = resources.bundle(offered)
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = sum(min(int(node.get(key, 0.0) / amount + 1e-9) for key, amount in bundle.items()) for node in nodes)
    if room < ranks:
        raise InputError(
            f"pool {pool} does not fit in its Ray cluster: {ranks} ranks of {_words(bundle)} were requested, but the "
            f"cluster has {_words({key: offered.get(key, 0.0) for key in bundle})} on {len(nodes)} nodes, with room "
            f"for {room} ranks; request less or add nodes"
        )
    group = placement_group([bundle] * ranks, strategy="PACK", name=_PREFIX + pool)
    if not group.wait(seconds):
        free = ray.available_resources()
        remove_placement_group(group)
        raise InfrastructureError(
            f"pool {pool} did not get {ranks} ranks of {_words(bundle)} within {seconds:g} seconds: only "
            f"{_words({key: free.get(key, 0.0) for key in bundle})} are free, and {_holders(group)} uses the rest; "
            "wait until that work ends, or request less"
        )
    return group


def _holders(own: Any) -> str:
    """Return the names of placement groups that hold resources now; other work in the cluster has no names."""
    groups = placement_group_table().values()
    names = [g["name"] or g["placement_group_id"] for g in groups if g["state"] == "CREATED"]
    return ", ".join(sorted(name.removeprefix(_PREFIX) for name in names)) or "other work in the cluster"


def _words(amounts: Mapping[str, float]) -> str:
    return " + ".join(f"{amount:g} {key}" for key, amount in amounts.items())


@final
class RayBackend:
    """`Backend` of Ray actors, in the cluster that this process is connected to.

    Args:
        pool: the pool's name.
        ranks: number of processes.
        resources: the resources of each process.
        threads: number of threads of torch and OpenMP in each process.
        sequence_parallel: number of consecutive ranks that work on one shard.
        start_seconds: maximum wait for room in the cluster, and the same again for the processes to start.
        collective_seconds: maximum duration of one collective.
        collective: whether the ranks form a process group. A rank can be replaced only without a process group.

    Raises:
        InputError: the pool would not fit in the cluster even if the cluster were empty.
        InfrastructureError: the cluster had no room; the processes did not start in time.
    """

    name = "ray"

    def __init__(
        self,
        pool: str = "main",
        ranks: int = 1,
        resources: RankResources | None = None,
        *,
        threads: int = 1,
        sequence_parallel: int = 1,
        start_seconds: float = 120.0,
        collective_seconds: float = 1800.0,
        collective: bool = True,
    ) -> None:
        if ranks < 1:
            raise InputError(f"pool {pool} must have at least 1 rank, got {ranks}")
        resources = resources or RankResources()
        self.pool, self.ranks = pool, ranks
        self.processes: tuple[Process, ...] = ()
        self._hosts: list[Any] = []
        self._started: dict[str, Parcel] = {}  # role → the constructor call of its workers
        self._broken = ""
        self._closed = False
        self._room = reserve(pool, ranks, resources, start_seconds)
        self._place = (ranks, "cuda:0" if resources.gpus else "cpu", collective and ranks > 1, sequence_parallel)
        self._resources, self._threads, self._alone = resources, threads, not collective
        try:
            self._hosts += map(self._host, range(ranks))
            found = [host.identify.remote(self._alone) for host in self._hosts]
            self.processes = tuple(ray.get(found, timeout=start_seconds))
            if collective and ranks > 1:
                address = ray.get(self._hosts[0].open_store.remote(collective_seconds), timeout=start_seconds)
                joined = [host.join.remote(address, collective_seconds) for host in self._hosts]
                ray.get(joined, timeout=start_seconds)
        except (RayError, TimeoutError) as error:
            self.close()
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InfrastructureError(
                f"pool {pool} did not start its processes ({ranks}) within {start_seconds:g} seconds "
                f"(runtime.start_timeout): {reason}; see the job's log"
            ) from error
        except BaseException:
            self.close()
            raise

    def start(
        self, role: str, worker: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], timeout: float
    ) -> None:
        """See `Backend.start`; the ranks construct their workers concurrently."""
        check_importable(worker, f"the worker class of role {role}")
        self._usable(role)
        ranks = range(self.ranks)
        parcel = self._packed(role, "__init__", (worker, tuple(args), dict(kwargs)))
        self._construct(role, parcel, ranks, timeout)
        self._started[role] = parcel

    def submit(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[R]]:
        """See `Backend.submit`."""
        parcel, sent = self._prepared(role, ranks, method, args, kwargs)
        return [
            RayCall(role, self.processes[r], method.__name__, parcel.size, self._hosts[r].call.remote(role, sent))
            for r in ranks
        ]

    def submit_stored(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> list[Call[Stored[R]]]:
        """See `Backend.submit_stored`."""
        parcel, sent = self._prepared(role, ranks, method, args, kwargs)
        name, keeps = method.__name__, [host.keep.options(num_returns=2) for host in self._hosts]
        return [RayCall(role, self.processes[r], name, parcel.size, *keeps[r].remote(role, sent)) for r in ranks]

    def submit_stream(
        self,
        role: str,
        ranks: Sequence[int],
        method: Callable[..., Iterator[R]],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> list[Flow[R]]:
        """See `Backend.submit_stream`."""
        parcel, sent = self._prepared(role, ranks, method, args, kwargs)
        name, streams = method.__name__, [host.stream.options(num_returns="streaming") for host in self._hosts]
        return [RayFlow(role, self.processes[r], name, streams[r].remote(role, sent), parcel.size) for r in ranks]

    def take(self, flows: Sequence[Flow[R]], timeout: float) -> list[R]:
        """See `Backend.take`."""
        mine: list[RayFlow[R]] = [flow for flow in flows if isinstance(flow, RayFlow)]
        assert len(mine) == len(flows), "flows of another back-end"
        if self._broken and not all(flow.ended for flow in mine):
            self._usable(mine[0].role)
        return take(mine, timeout, self.give_up)

    def wait(self, calls: Sequence[Call[R]], timeout: float) -> list[Answer[R]]:
        """See `Backend.wait`."""
        mine: list[RayCall[R]] = [call for call in calls if isinstance(call, RayCall)]
        assert len(mine) == len(calls), "calls of another back-end"
        if self._broken and not all(call.done() for call in mine):
            self._usable(mine[0].role)
        settle(mine, timeout, self.give_up)
        return [answer for call in mine if (answer := call.answered()) is not None]

    def close(self) -> None:
        """See `Backend.close`."""
        if self._closed:
            return
        self._closed = True
        hosts, self._hosts = self._hosts, []
        if not ray.is_initialized():  # the cluster ended first, with all its processes
            return
        if not self._broken and self.processes:
            leaving = [host.close.remote() for host in hosts]
            with suppress(RayError):  # a host may have ended already
                ray.wait(leaving, num_returns=len(leaving), timeout=_CLOSING)
        for host in hosts:
            ray.kill(host)
        remove_placement_group(self._room)
        here = ray.util.get_node_ip_address()
        pids, deadline = {p.pid for p in self.processes if p.host == here}, time.monotonic() + _CLOSING
        while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)

    def replace(self, rank: int, timeout: float) -> None:
        """See `Backend.replace`; the new process uses the resources of the lost one."""
        ray.kill(self._hosts[rank])
        self._hosts[rank] = self._host(rank)
        try:
            process = ray.get(self._hosts[rank].identify.remote(self._alone), timeout=timeout)
        except RayError as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            line = f"rank {rank} of pool {self.pool} did not start again within {timeout:g} seconds: {reason}"
            raise WorkerLostError(line, self.processes[rank]) from error
        self.processes = (*self.processes[:rank], process, *self.processes[rank + 1 :])
        for role, parcel in self._started.items():
            self._construct(role, parcel, (rank,), timeout)

    def _construct(self, role: str, parcel: Parcel, ranks: Sequence[int], timeout: float) -> None:
        sent = self._sent(parcel, ranks)
        calls: list[RayCall[None]] = [
            RayCall(role, self.processes[r], "__init__", parcel.size, self._hosts[r].start.remote(role, sent))
            for r in ranks
        ]
        settle(calls, timeout, self.give_up)

    def _host(self, rank: int) -> Any:
        context = RankContext(self.pool, rank, *self._place)
        environment = {
            "OMP_NUM_THREADS": str(self._threads),
            "MKL_NUM_THREADS": str(self._threads),
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONHASHSEED": "0",
        }
        bundle = self._room.bundle_specs[rank]
        options = ray.remote(Host).options(
            num_cpus=bundle["CPU"],
            num_gpus=self._resources.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._room, placement_group_bundle_index=rank),
            runtime_env={"env_vars": environment},
        )
        return options.remote(context, [os.path.abspath(path) for path in sys.path if path], self._threads)

    def _prepared(
        self, role: str, ranks: Sequence[int], method: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Parcel, Any]:
        check_importable(method, f"a method called on {role}")
        self._usable(role)
        parcel = self._packed(role, method.__name__, (method, tuple(args), dict(kwargs)))
        return parcel, self._sent(parcel, ranks)

    def _packed(self, role: str, method: str, call: tuple[Any, ...]) -> Parcel:
        try:
            return pack(call)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InputError(
                f"arguments of {role}.{method} cannot be sent to another process: {error}; pass values that can be "
                "pickled"
            ) from error

    def _sent(self, parcel: Parcel, ranks: Sequence[int]) -> Any:
        """Return the parcel, or a reference to it: a parcel for several ranks is copied into the object store once."""
        return ray.put(parcel) if len(ranks) > 1 and parcel.size > _SMALL else parcel

    def _usable(self, role: str) -> None:
        if self._closed:
            raise WorkerLostError(f"{role} has ended: its pool {self.pool} was closed; start a new pool")
        if self._broken:
            raise WorkerLostError(
                f"{role} cannot be called: pool {self.pool} was given up, {self._broken}; start a new pool from the "
                "last checkpoint"
            )

    def give_up(self, reason: str) -> None:
        """See `Backend.give_up`; the first reason is reported."""
        self._broken = self._broken or reason
