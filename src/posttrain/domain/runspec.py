"""The schema of `run.yaml`, and the conversion of passes over a data set to steps.

A run file contains names, not digests; `control.plan` resolves it to a `Manifest`.

::

    name: sort
    owner: ada
    seed: 17
    model: model:tiny-sort
    data: {train: dataset:sort-train@1, heldout: dataset:sort-heldout@1}
    rewards: {exact: reward:sort}
    stages:
      sft:      {kind: sft, data: train, steps: 350}
      grpo:     {kind: grpo, model: sft, data: train, reward: exact, steps: 240}
      evaluate: {kind: evaluate, model: grpo, suites: {heldout: {data: heldout}}}
    gates:
      - {name: accuracy, metric: heldout/accuracy, at_least: 0.9}
    budget: {tokens: 1e7, wall_clock: 10m}
    release: {channel: prod, model: grpo}
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.gates import CHANNEL, GateRule
from posttrain.domain.ids import is_plain
from posttrain.domain.jobspec import image_reference
from posttrain.domain.kinds import ADDED, kind_names
from posttrain.domain.overrides import Setting, overridden, setting_words
from posttrain.domain.placement import LONGEST, StallAfter, parse_duration
from posttrain.domain.rewards import AUTO, DIALECTS, Called
from posttrain.domain.trackers import Trackers
from posttrain.domain.validation import Frozen, validated

_DEEPEST, _MOST_VALUES = 64, 100_000  # maximum depth and values of a run file
RESERVED_STAGES = frozenset({"base", *ADDED, CHANNEL})
Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]
MOST_TOKENS = 2**53 - 1  # the largest token budget that a run may declare


def parse_count(value: Any) -> Any:
    """Convert `5e6`, which YAML reads as a string or a float, to a whole number."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError as error:
            raise ValueError(f"must be a whole number such as 5000000 or 5e6, got {value!r}") from error
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Budget(Frozen):
    """Hard limits of a run; None: no limit."""

    tokens: Annotated[int, BeforeValidator(parse_count), Field(ge=1, lt=2**53)] | None = (
        None  # tokens that are read, generated and trained on: see `jobs.Progress`
    )
    wall_clock: Annotated[float, BeforeValidator(parse_duration), Field(gt=0, le=LONGEST)] | None = None  # seconds
    attempts: Annotated[int, Field(ge=1, le=20)] = 5  # maximum attempts of a stage after infrastructure failures


class RunRuntime(Frozen):
    """Runtime settings for all jobs of a run; the settings of a stage take precedence."""

    stall_after: StallAfter  # seconds without progress after which a job counts as hung


def _word_or_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class Ordered(Frozen):
    """The base class of specs that run after other stages. An empty `after` is not serialised."""

    # stages that must have ended before this stage starts, in addition to the stages whose outputs it uses; `gate` is
    # allowed
    after: Annotated[tuple[Name, ...], BeforeValidator(_word_or_list)] = ()

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        said: dict[str, Any] = handler(self)
        if not self.after:
            said.pop("after", None)
        return said


class ReleaseSpec(Ordered):
    """The model to release if every gate passes, and the channel."""

    channel: Name
    model: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}(/[a-z0-9_-]{1,62})?$")]  # a stage, or STAGE/best


_MOST_HOSTS = 64


_LONGEST_WORD = 60  # characters of a wrong value that an error shows


_ADDRESS = re.compile(r"^(?!127\.0\.0\.1:)[0-9.]+:")


SECRET = r"^[A-Z][A-Z0-9_]{0,99}$"


def _named(value: Any) -> Any:
    if not isinstance(value, str) or not re.fullmatch(SECRET, value):  # it may be the secret itself
        raise ValueError(
            "must be the name of an environment variable in capital letters, such as JUDGE_KEY, got another form; "
            "export the secret in a variable, and name the variable"
        )
    return value


SecretName = Annotated[str, BeforeValidator(_named), Field(pattern=SECRET)]


_NO_SECRETS = re.compile(  # variables that jobs do not get, or that a process, its libraries or the store reads
    r"(POSTTRAIN_|WANDB_|MLFLOW_|PG|AWS_|AZURE_|GOOGLE_|S3_|HF_|HUGGING|TRANSFORMERS_|TOKENIZERS_|PYTHON|LD_|LC_|XDG_|SSL_"
    r"|MALLOC_|CUDA_|NVIDIA_|NCCL_|ROCR_|HIP_|HSA_|GPU_|OMP_|MKL_|KMP_|GOMP_|OPENBLAS_|NUMEXPR_|TORCH|PYTORCH_|TRITON_"
    r"|RAY_)|((HTTPS?|ALL|NO)_PROXY|PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|IFS|ENV)$"
)


def may_be_secret(name: str) -> bool:
    """Return whether a reward's secret may have this name: no job, program, library or store reads such a variable."""
    return _NO_SECRETS.match(name) is None and re.fullmatch(SECRET, name) is not None


def _plain(value: str) -> str:
    if not is_plain(value):
        raise ValueError(
            f"must be a name without line breaks and without spaces at its ends, got {value!a}; remove them"
        )
    return value


def _known_dialect(value: str) -> str:
    if value not in (AUTO, *DIALECTS):
        close = nearest(value, (AUTO, *DIALECTS)) if len(value) < _LONGEST_WORD else ""
        raise ValueError(f"must be one of {', '.join((AUTO, *DIALECTS))}, got {value[:_LONGEST_WORD]!r}{close}")
    return value


class RewardUse(Frozen):
    """A reward: its function, its dialect, and the files, hosts and secrets for its code.

    A ref alone uses the registered function and dialect.
    """

    ref: str  # reward:NAME@VERSION or a path
    # the function, or file.py:function in a folder; None: the registered function; if the reward is not registered,
    # `score`, `compute_score`, or the file's only rubric or public function
    entry: Annotated[str, Field(pattern=r"^([^/:]+\.py:)?[A-Za-z_]\w*$", max_length=200)] | None = None
    dialect: Annotated[str, AfterValidator(_known_dialect)] | None = None  # None: the registered dialect, or auto
    files: tuple[str, ...] = ()  # next to run.yaml; the reward finds them, read-only, next to its source
    network: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]{1,5}$")], ...] = ()  # host:port
    # names of environment variables of the run's driver (or of the server), which only the reward's cell gets
    secrets: tuple[SecretName, ...] = ()

    @model_validator(mode="after")
    def _distinct(self) -> RewardUse:
        names = [Path(file).name for file in self.files]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(
                f"files: names must be unique and differ from the source's name, got {twice!r} twice; rename one"
            )
        high = next((word for word in self.network if not 0 < int(word.rpartition(":")[2]) < 65536), None)
        if high is not None:
            raise ValueError(f"network: ports must be from 1 to 65535, got {high!r}")
        if len(set(self.network)) < len(self.network) or len(self.network) > _MOST_HOSTS:
            raise ValueError(
                f"network: must be at most {_MOST_HOSTS} different hosts and ports, got {len(self.network)}"
            )
        other = next((name for name in self.secrets if not may_be_secret(name)), None)
        if other is not None:
            raise ValueError(
                f"secrets: must name variables that no other program and no store reads, got {other!r}; use a name "
                "such as JUDGE_KEY"
            )
        number = next((word for word in self.network if _ADDRESS.match(word)), None)
        if number is not None:
            raise ValueError(
                f"network: must contain host names or 127.0.0.1, got {number!r}; use the host's name instead of its "
                "address"
            )
        return self

    @property
    def called(self) -> Called:
        """The settings of the reward's function."""
        return Called(self.entry, self.dialect)


def _ref_or_map(value: Any) -> Any:
    return {"ref": value} if isinstance(value, str) else value


class StageSpec(Ordered):
    """One stage: its kind, its trainer, its order, and parameters that the trainer checks."""

    kind: str
    trainer: str = "native"
    params: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _flat(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("must be a map with at least `kind`")
        if "kind" not in value:
            raise ValueError(f"`kind` is required: one of {', '.join(kind_names())}")
        known = {key: value[key] for key in ("kind", "trainer", "after") if key in value}
        return {**known, "params": {key: item for key, item in value.items() if key not in known}}


class RunSpec(Frozen):
    """A whole run file."""

    name: Name
    owner: Annotated[str, Field(min_length=1), AfterValidator(_plain)]  # a name, an address, user:NAME or service:NAME
    seed: int = Field(ge=0, lt=2**53)
    model: str | None = None  # the base model's ref; stages refer to this model as `base`
    data: dict[Name, str] = Field(default_factory=dict)
    rewards: dict[Name, Annotated[RewardUse, BeforeValidator(_ref_or_map)]] = Field(default_factory=dict)
    stages: dict[Name, StageSpec] = Field(min_length=1)
    gates: tuple[GateRule, ...] = ()
    budget: Budget = Budget()
    runtime: RunRuntime | None = None
    release: ReleaseSpec | None = None
    image: Annotated[str, AfterValidator(image_reference)] | None = None  # image of all jobs except those that measure
    trackers: Trackers | None = None  # None: the workspace's trackers

    @model_validator(mode="after")
    def _consistent(self) -> RunSpec:
        for name in self.stages:
            if name in RESERVED_STAGES or name.startswith("baseline-"):
                raise ValueError(f"stages.{name}: this name is reserved, got {name!r}; choose another")
        if self.gates and not self.release:
            raise ValueError("gates need a release: name the channel and the stage whose model they judge")
        names = [gate.name for gate in self.gates]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ValueError(f"gates: names must be unique, got {twice!r} twice")
        return self


def load_run_spec(path: Path, setting: Setting = ()) -> RunSpec:
    """Read and validate a `run.yaml`.

    Args:
        setting: values that replace values of the file.

    Raises:
        InputError: there is no such file, it is not YAML, a key is unknown (the message suggests the most similar
            key), or a value is out of range.
    """
    source = str(path) + (f" with {setting_words(setting)}" if setting else "")
    return parse_run_spec(overridden(read_yaml(path), setting, RunSpec.model_fields), source)


def parse_run_spec(raw: Any, source: str) -> RunSpec:
    """Validate an already parsed `run.yaml`, which errors call `source`."""
    return validated(RunSpec, raw, source)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML map; duplicate keys are rejected.

    Raises:
        InputError: the file does not exist, is not YAML, or is not a map.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_RunFileLoader)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except RecursionError as error:
        raise InputError(f"{path}: must not be nested deeper than {_DEEPEST} levels; flatten it") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a number of too many digits, invalid UTF-8
        raise InputError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        got = "nothing" if raw is None else type(raw).__name__
        raise InputError(f"{path}: must be a map of keys, got {got}; write lines such as KEY: VALUE")
    return raw


class _RunFileLoader(yaml.SafeLoader):
    """A strict loader: no duplicate keys, scalar keys only, valid text, and a bounded number of values.

    The usual loader silently retains the last of two equal keys, and can exhaust memory on a few nested aliases.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None:
            self._measure(node, 0, {})
        return node

    def _measure(self, node: yaml.Node, depth: int, known: dict[int, int]) -> int:
        """Return the number of values of a node with its aliases expanded."""
        if depth > _DEEPEST:
            raise _refusal(node, f"must not be nested deeper than {_DEEPEST} levels, or contain itself")
        if id(node) not in known:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            inner = [part for pair in pairs for part in pair] if pairs else node.value
            children = inner if isinstance(node, yaml.CollectionNode) else []
            known[id(node)] = 1 + sum(self._measure(child, depth + 1, known) for child in children)
        if known[id(node)] > _MOST_VALUES:
            raise _refusal(node, f"must contain at most {_MOST_VALUES} values, aliases written out")
        return known[id(node)]

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
            raise _refusal(node, f"must be text, got a lone surrogate in {value!r}")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _refusal(key_node, "a key must be a word, got a list or a map")
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} appears twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _refusal(node: yaml.Node, what: str) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, what, node.start_mark)


@dataclass(frozen=True, slots=True)
class Passes:
    """The `epochs` of a stage, resolved to steps by a plan: `Passes(2, 250, documents=8000, per_step=64)`."""

    epochs: float
    steps: int
    documents: int
    per_step: int

    def __str__(self) -> str:
        plural = "" if self.steps == 1 else "s"
        return (
            f"epochs {self.epochs:g} = {self.steps} step{plural} ({self.documents} documents, {self.per_step} a step)"
        )


def passes_of(epochs: float, documents: int, per_step: int) -> Passes:
    """Return the least number of steps that take every document `epochs` times.

    The stream of documents continues beyond the end of a pass (`loop.recipe`), so all steps have equal size, and the
    last step may take documents of the next pass. The result is exact for the written decimal number `epochs`.

    Args:
        epochs: the number of passes, > 0.
        documents: the number of documents in the data set, >= 1.
        per_step: the number of documents of a step, >= 1.
    """
    return Passes(epochs, math.ceil(Fraction(repr(epochs)) * documents / per_step), documents, per_step)
