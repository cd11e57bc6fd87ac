"""Where stages run: the `placement` of a training stage, and the executors and flavours that a workspace declares.

A placement states where the roles of the stage run:

::

    placement: collocated                                     # the default: every role in one process, no cluster
    placement: {collocated: {gpus: 4, kind: h100}}            # every role in one pool of 4 ranks
    placement: {policy: {gpus: 4, kind: h100}, rollout: {gpus: 12, kind: l40s}, reference: {with: rollout}}

A **resource pool** is a set of processes, one per rank. A role with its own resources has a pool with its name; a role
`with` another role runs in the pool of that role; a role that is not mentioned runs in the policy's pool. Roles that
share a pool are separate workers.

executors.yaml of a workspace declares executors, and the flavours of their nodes::

    executors:
      slurm-a: {kind: slurm, command: [ssh, login-node], python: /opt/posttrain/bin/python}
      ray-b: {kind: ray, address: "http://127.0.0.1:8265"}
    flavours:
      h100: {executor: slurm-a, partition: gpu, gpus_per_node: 8, nodes: 4, memory: 1000GiB, time_limit: 24h}
      small: {executor: slurm-a, partition: cpu, cpus: 4}
    default: small

A **flavour** is a set of equal nodes of one executor. A stage whose placement names a kind, `placement: {collocated:
{gpus: 8, kind: h100}}`, runs on the flavour of that name; a stage that names no kind runs on `default`. Without a
default, it runs on the executor that `posttrain init --executor` chose.

Memory is written as `40GiB`, `512MiB`, `16GB`, or a number of bytes; time as `90s`, `10m`, `2h`, `1d`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_serializer, model_validator

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.jobspec import PodGroup, image_reference
from posttrain.domain.validation import Frozen

ROLES = ("policy", "critic", "reference", "reward_model", "teacher", "rollout", "reward")
COLLOCATED = "collocated"
MAIN = "main"  # the pool of collocated roles
Positive = Annotated[int, Field(ge=1, le=10**6)]
_AMOUNT = re.compile(r"^(\d+(?:\.\d+)?)\s*([KMGT]i?B)$")
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
LEAST_AMOUNT = 2**20  # bytes; a smaller amount is a mistake, such as a number of GiB without the unit
MOST_AMOUNT = 2**50
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|h|d)?$")
LONGEST = 3650 * 86400.0  # maximum of declared seconds; a longer time is a mistake
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LEAST_STALL = 10.0  # seconds; a healthy job reports the end of a step or a phase within a quarter of this time


ROLE_NAME = r"^[a-z][a-z0-9_]{0,39}$"
RoleName = Annotated[str, Field(pattern=ROLE_NAME)]
_NAME = r"^[a-z0-9][a-z0-9._-]{0,31}$"  # as a kind in a placement; the ledger's column has 32 characters
# a name in the cluster's terms; Slurm's constraints have &|()
_WORD = r"^[A-Za-z0-9][A-Za-z0-9_.:@/+&|*()\[\]-]{0,199}$"
Word = Annotated[str, Field(pattern=_WORD)]
MOST_NODES = 4096


class Resources(Frozen):
    """The resources of one pool: `{gpus: 4, kind: h100}`; or the role whose pool is shared: `{with: policy}`.

    `gpus` and `cpus` are totals of the pool, divided evenly among its ranks.
    """

    gpus: Annotated[int, Field(ge=0, le=10**6)] = 0
    cpus: Positive | None = None  # None: no cores are reserved, and ranks share the machine's
    kind: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9._-]*$")] | None = None  # accelerator, lower case: h100, l40s
    ranks: Positive | None = None  # None: one per GPU, else one per CPU, else one
    with_: RoleName | None = Field(default=None, alias="with")

    @model_validator(mode="after")
    def _consistent(self) -> Resources:
        if self.with_ is not None and self.model_fields_set != {"with_"}:
            others = ", ".join(name for name in Resources.model_fields if name in self.model_fields_set - {"with_"})
            raise ValueError(
                f"`with` must be the only field; remove {others}: the pool that `with` names has its own resources"
            )
        if self.kind is not None and not self.gpus and not self.cpus:
            raise ValueError(f"kind {self.kind!r} needs gpus >= 1 or cpus >= 1, got neither; set one")
        for name, amount in (("gpus", self.gpus), ("cpus", self.cpus or 0)):
            if amount % self.rank_count:
                raise ValueError(f"{name} must be a multiple of ranks ({self.rank_count}), got {amount}")
        return self

    @property
    def rank_count(self) -> int:
        """The number of the pool's processes."""
        return self.ranks or self.gpus or self.cpus or 1

    @property
    def gpus_per_rank(self) -> int:
        """The number of devices of one process."""
        return self.gpus // self.rank_count

    @property
    def cpus_per_rank(self) -> int:
        """The number of cores reserved for one process; 0: the process shares the machine's cores."""
        return (self.cpus or 0) // self.rank_count

    @model_serializer
    def _written(self) -> dict[str, Any]:
        """Serialise as in run.yaml, without defaults, so that equal requests have equal digests."""
        if self.with_ is not None:
            return {"with": self.with_}
        given = {"gpus": self.gpus or None, "cpus": self.cpus, "kind": self.kind, "ranks": self.ranks}
        return {name: value for name, value in given.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Pool:
    """Processes and the roles in them: `Pool("policy", Resources(gpus=4), ("policy", "reference"))`."""

    name: str
    resources: Resources
    roles: tuple[str, ...]  # in the order of `ROLES`

    @property
    def ranks(self) -> int:
        """The number of processes in the pool."""
        return self.resources.rank_count


class Placement(Frozen):
    """The shared pools of roles, and the resources of each pool.

    A dataflow's own roles have further fields.

    Raises:
        pydantic.ValidationError: amounts are not divisible by ranks, or roles are `with` each other in a cycle.
    """

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Resources]

    collocated: Resources | None = None  # the pool of every role; cannot be combined with pools for individual roles
    policy: Resources | None = None
    critic: Resources | None = None
    reference: Resources | None = None
    reward_model: Resources | None = None
    teacher: Resources | None = None
    rollout: Resources | None = None
    reward: Resources | None = None  # its ranks are parallel scoring processes
    # whether frozen roles in a shared pool release their device memory while they are idle; auto: only on a GPU
    sleep: Literal["auto"] | bool = "auto"

    @model_validator(mode="before")
    @classmethod
    def _parse(cls, value: Any) -> Any:
        if isinstance(value, Placement) or value == COLLOCATED:
            return {} if value == COLLOCATED else value
        if not isinstance(value, dict):
            raise ValueError(f"must be {COLLOCATED} or a map of roles to resources, got {value!r}")
        empty = next((role for role, given in value.items() if given is None), None)
        if empty is not None:
            raise ValueError(f"{empty} must be a map such as {{gpus: 4}} or {{with: policy}}, got nothing")
        odd = next((key for key in value if not re.fullmatch(ROLE_NAME, str(key))), None)
        if odd is not None:
            raise ValueError(f"must be a role, got {odd!r}{nearest(str(odd), ROLES)}")
        return {key: given for key, given in value.items() if (key, given) != (COLLOCATED, {})}

    @model_validator(mode="after")
    def _consistent(self) -> Placement:
        if self.collocated is not None and self.placed:
            raise ValueError(
                f"{COLLOCATED} puts every role into one pool, but the map also has {', '.join(self.placed)}; write "
                f"policy instead of {COLLOCATED}: roles that are not mentioned share the policy's pool"
            )
        if self.collocated is not None and self.collocated.with_ is not None:
            raise ValueError(f"{COLLOCATED} must have its own resources, got with: {self.collocated.with_}")
        for role in (*ROLES, *self.placed):
            self._head(role)
        return self

    @property
    def placed(self) -> dict[str, Resources]:
        """The resources of individual roles, in the order of `ROLES`; a dataflow's own roles follow."""
        found = {role: getattr(self, role) for role in ROLES} | (self.model_extra or {})
        return {role: given for role, given in found.items() if given is not None}

    def of_any_kind(self) -> Placement:
        """Return this placement without kinds, for nodes that are all of the requested kind."""
        resources = {name: self.collocated for name in (COLLOCATED,) if self.collocated is not None} | self.placed
        return self.model_copy(update={name: one.model_copy(update={"kind": None}) for name, one in resources.items()})

    @property
    def is_inline(self) -> bool:
        """Whether one process is enough for all models: a single pool of one rank.

        If the stage names a Ray cluster, the cluster is used nevertheless. A reward function always has separate
        processes.
        """
        pools = self.pools([role for role in (*ROLES, *self.placed) if role != "reward"])
        return len(pools) == 1 and all(pool.ranks == 1 for pool in pools.values())

    def pools(self, roles: Collection[str] = ()) -> dict[str, Pool]:
        """Return pools by name, in the order of their first roles in `ROLES`; other roles follow.

        Args:
            roles: the roles of the stage, by default all; a pool without any of them is omitted.
        """
        homes: dict[str, list[str]] = {}
        for role in dict.fromkeys((*ROLES, *self.placed, *roles)):
            if not roles or role in roles:
                homes.setdefault(self._head(role), []).append(role)
        shared = self.collocated or Resources()
        return {name: Pool(name, self.placed.get(name, shared), tuple(found)) for name, found in homes.items()}

    def pool_of(self, role: str) -> Pool:
        """Return the pool of a role."""
        return self.pools()[self._head(role)]

    def for_roles(self, roles: Collection[str], stage: str) -> Placement:
        """Return this placement, checked for a stage with only these roles.

        Args:
            stage: the stage's name in the error.

        Raises:
            InputError: the placement names a role that the stage does not have.
        """
        has = ", ".join(sorted(roles, key=lambda role: ROLES.index(role) if role in ROLES else len(ROLES)))
        for role, given in self.placed.items():
            for named in (role, given.with_):
                if named is not None and named not in roles:
                    raise InputError(
                        f"placement.{role}: {stage} has no {named} (its roles: {has}); remove it, or correct the name"
                    )
        return self

    def _head(self, role: str) -> str:
        """Return the name of the pool of `role`."""
        placed = self.placed
        if not placed:
            return MAIN
        seen = [role]
        while True:
            given = placed.get(seen[-1])
            host = given.with_ if given is not None else "policy" if seen[-1] != "policy" else None
            if host is None:
                return seen[-1]
            if host in seen:
                raise ValueError(f"{' with '.join([*seen, host])} is a circle; give one of these roles resources")
            seen.append(host)

    @model_serializer
    def _written(self) -> str | dict[str, Any]:
        """Serialise as in run.yaml; reading the result gives an equal placement."""
        nap = {} if self.sleep == "auto" else {"sleep": self.sleep}
        shared = self.collocated.model_dump() if self.collocated is not None else {}
        both = {role: given.model_dump() for role, given in self.placed.items()}
        return {**({COLLOCATED: shared} if shared else {}), **both, **nap} or COLLOCATED


def parse_amount(value: Any) -> Any:
    """Convert `40GiB`, `512MiB`, `16GB` to bytes."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = _AMOUNT.match(value.strip())
    if not match:
        raise ValueError(f"must be auto or an amount of memory such as 40GiB or 512MiB, got {value!r:.40}")
    unit = match[2]
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** _POWERS[unit[0]])


Amount = Annotated[int, Field(ge=LEAST_AMOUNT, le=MOST_AMOUNT)]  # bytes


ParsedAmount = BeforeValidator(parse_amount)


def parse_duration(value: Any) -> Any:
    """Convert `90`, `90s`, `10m`, `2h`, `1d` to seconds."""
    if isinstance(value, str):
        match = _DURATION.match(value.strip())
        if not match:
            raise ValueError(f"must be a duration such as 90s, 10m or 2h, got {value!r}")
        seconds = float(match[1]) * _UNITS[match[2] or "s"]
        if seconds > LONGEST:
            raise ValueError(f"must be at most {LONGEST / _UNITS['d']:.0f}d, got {value:.40}")
        return seconds
    return value


# `runtime.stall_after`: seconds without progress after which a job counts as hung
StallAfter = Annotated[float, Field(ge=LEAST_STALL, le=LONGEST), BeforeValidator(parse_duration)]


def _as_words(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Words = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...], BeforeValidator(_as_words)]


def _placement(params: Mapping[str, Any]) -> Placement:
    return Placement.model_validate(params.get("placement", COLLOCATED))


class _Given(Frozen):
    @model_serializer(mode="wrap")
    def _written(self, written: Any) -> dict[str, Any]:
        """Serialise only the fields that were given."""
        return {name: value for name, value in written(self).items() if name in self.model_fields_set}


class ExecutorSettings(_Given):
    """One executor: its kind, and how to reach it."""

    kind: Annotated[str, Field(pattern=_NAME)]  # slurm, ray
    # of slurm: words before a shell command, [ssh, login-node]; None: this machine's shell
    command: Words | None = None
    address: Annotated[str, Field(pattern=r"^https?://[^\s@?#]+$", max_length=400)] | None = None  # of ray
    python: Words = ("python3",)  # runs Python with Posttrain on a node
    container: Words | None = None  # of slurm: words before an image's reference, [apptainer, exec, --nv]
    settle: Annotated[float, Field(ge=0.1, le=3600), BeforeValidator(parse_duration)] = 60.0  # see `Absence`

    @model_validator(mode="after")
    def _consistent(self) -> ExecutorSettings:
        if not self.python or self.command == () or self.container == ():
            raise ValueError("python, command and container must have at least one word, got an empty list")
        if self.kind == "ray" and self.address is None:
            raise ValueError("address must be that of Ray's dashboard, such as http://127.0.0.1:8265, got none")
        foreign = {"ray": ("command", "container"), "slurm": ("address",)}.get(self.kind, ())
        if wrong := next((name for name in foreign if getattr(self, name) is not None), ""):
            raise ValueError(f"{wrong} must be left out of an executor of kind {self.kind}, got a value")
        return self


class Flavour(_Given):
    """Equal nodes of an executor. Amounts are those of one node's part of a job."""

    executor: Annotated[str, Field(pattern=_NAME)]
    gpus_per_node: Annotated[int, Field(ge=0, le=64)] = 0
    nodes: Annotated[int, Field(ge=1, le=MOST_NODES)] = 1  # maximum number of nodes of one job
    type: Word | None = None  # the GPUs in the cluster's terms; None: the flavour's name
    gpu_memory: Annotated[Amount, ParsedAmount] | None = None  # bytes of one GPU, for the plan
    cpus: Annotated[int, Field(ge=1, le=4096)] = 1
    memory: Annotated[Amount, ParsedAmount] | None = None  # bytes; None: what the cluster gives
    time_limit: Annotated[float, Field(ge=60, le=LONGEST), BeforeValidator(parse_duration)] | None = None
    python: Words | None = None  # None: the executor's
    image: Annotated[str, AfterValidator(image_reference)] | None = None  # of jobs whose run names no image
    partition: Word | None = None
    qos: Word | None = None
    account: Word | None = None
    constraint: Word | None = None
    reservation: Word | None = None

    @model_validator(mode="before")
    @classmethod
    def _named_as_placements_do(cls, value: Any) -> Any:
        if isinstance(value, dict) and "gpus" in value:
            raise ValueError(f"gpus must be named gpus_per_node, got gpus: {str(value['gpus'])[:20]}")
        return value

    def options(self) -> dict[str, str]:
        """Return the words of the cluster's own queue."""
        named = {name: getattr(self, name) for name in ("partition", "qos", "account", "constraint", "reservation")}
        return {name: value for name, value in named.items() if value is not None}

    def gang(self, name: str, devices: int, params: Mapping[str, Any]) -> PodGroup:
        """Return the pods of a job: as many nodes as its devices need, or its cores on a flavour without GPUs.

        Args:
            name: the flavour's.
            params: of the job's stage.

        Raises:
            InputError: the flavour's nodes have fewer, or a job of several nodes does not use whole nodes.
        """
        cores = sum(pool.resources.cpus or 0 for pool in _placement(params).pools().values())
        wanted, each, what = (devices, self.gpus_per_node, "GPUs") if self.gpus_per_node else (cores, self.cpus, "cpus")
        pods, rest = (1, 0) if wanted <= each else divmod(wanted, each)
        if rest or pods > self.nodes:
            how = f"a multiple of {each}" if wanted <= each * self.nodes else f"at most {each * self.nodes}"
            raise InputError(
                f"placement: a job on flavour {name} must have {how} {what} ({self.nodes} nodes of {each}), got "
                f"{wanted}; request others, or change the flavour: posttrain executor add"
            )
        gpus = min(devices, self.gpus_per_node)
        kind = (self.type or name) if gpus else ""
        return PodGroup(min=pods, max=pods, cpus=self.cpus, memory=self.memory or 0, gpus=gpus, kind=kind)


class Cluster(_Given):
    """The executors and flavours of a workspace; the content of executors.yaml.

    Raises:
        pydantic.ValidationError: a flavour's executor is not declared, or the default is not a flavour.
    """

    executors: dict[Annotated[str, Field(pattern=_NAME)], ExecutorSettings] = Field(default_factory=dict)
    flavours: dict[Annotated[str, Field(pattern=_NAME)], Flavour] = Field(default_factory=dict)
    default: str | None = None  # the flavour of stages whose placement names no kind

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        for name, flavour in self.flavours.items():
            if flavour.executor not in self.executors:
                near = nearest(flavour.executor, self.executors)
                raise ValueError(f"flavours.{name}: executor must be one of executors, got {flavour.executor!r}{near}")
            executor = self.executors[flavour.executor]
            given = [*flavour.options(), *(one for one in ("time_limit", "image") if getattr(flavour, one) is not None)]
            if executor.kind == "ray" and given:
                raise ValueError(f"flavours.{name}: {given[0]} must be left out on Ray, which has no such option")
            if flavour.image and not executor.container:
                raise ValueError(f"flavours.{name}: image needs `container` of executor {flavour.executor}, got none")
        if self.default is not None and self.default not in self.flavours:
            near = nearest(self.default, self.flavours)
            raise ValueError(f"default must be one of flavours, got {self.default!r}{near}")
        return self

    def joined(self, other: Cluster) -> Cluster:
        """Return these executors and flavours, and those of `other`, which replace equal names."""
        return Cluster(
            executors={**self.executors, **other.executors},
            flavours={**self.flavours, **other.flavours},
            default=other.default or self.default,
        )

    def flavour_of(self, stage: str, params: Mapping[str, Any]) -> str:
        """Return the name of the flavour on which a stage runs; empty: none.

        Raises:
            InputError: the placement names several flavours, which one job cannot have.
        """
        kinds = {pool.resources.kind for pool in _placement(params).pools().values()} - {None}
        named = sorted(kind for kind in kinds if kind in self.flavours)
        runtime = params.get("runtime")
        elsewhere = isinstance(runtime, Mapping) and runtime.get("ray_address")  # whose kinds are that cluster's
        if self.flavours and kinds and not named and not elsewhere:
            [*_, kind] = sorted(map(str, kinds))
            raise InputError(
                f"stages.{stage}: placement: kind must be a flavour, got {kind!r}{nearest(kind, self.flavours)}; "
                "posttrain executor ls shows them"
            )
        if len(named) > 1 or (named and len(kinds) > 1):
            raise InputError(
                f"stages.{stage}: placement: one job runs on one flavour, got {', '.join(sorted(map(str, kinds)))}; "
                "name one kind, or a Ray cluster with both: runtime.ray_address"
            )
        return named[0] if named else self.default or ""
