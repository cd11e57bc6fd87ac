"""The executors that a workspace declares, and the flavours of their nodes, as in executors.yaml.

::

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
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, model_serializer, model_validator

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.jobspec import PodGroup, image_reference
from posttrain.domain.placement import COLLOCATED, LONGEST, Amount, ParsedAmount, Placement, parse_duration
from posttrain.domain.validation import Frozen

_NAME = r"^[a-z0-9][a-z0-9._-]{0,31}$"  # as a kind in a placement; the ledger's column has 32 characters
_WORD = (
    r"^[A-Za-z0-9][A-Za-z0-9_.:@/+&|*()\[\]-]{0,199}$"  # a name in the cluster's terms; Slurm's constraints have &|()
)
Word = Annotated[str, Field(pattern=_WORD)]
MOST_NODES = 4096


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
    command: Words | None = (
        None  # of slurm: words before a shell command, [ssh, login-node]; None: this machine's shell
    )
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
