"""Parts of job configurations: numbers with their limits, the optimiser, the runtime, the probe."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    model_serializer,
    model_validator,
)

from posttrain.domain.adapters import AUTO, HEAD, MOST_RANK, AdapterSize, SavedAdapter
from posttrain.domain.placement import LONGEST, ROLE_NAME, Amount, ParsedAmount, StallAfter, parse_duration
from posttrain.domain.rendering import LEAST_TEMPERATURE, stop_fault
from posttrain.domain.roles import SERVED
from posttrain.domain.runspec import Name, SecretName, may_be_secret
from posttrain.domain.validation import Frozen

# Every number has a maximum: otherwise a typo would be found late, when a job runs out of memory
MOST_STEPS = 10**9
MOST_ROWS = 10**6  # documents, prompts or samples of one step
MOST_TOKENS = 10**8  # of one document
MOST_TIMEOUT = 604800.0  # seconds, of one batch of completions: a week
Decay = Annotated[float, Field(ge=0, lt=1)]  # of a running average
Positive = Annotated[int, Field(ge=1, le=MOST_STEPS)]
NonNegative = Annotated[int, Field(ge=0, le=MOST_STEPS)]
Passes = Annotated[float, Field(gt=0, le=10**6)]  # passes over a data set; 0.5 is half a pass
Rows = Annotated[int, Field(ge=1, le=MOST_ROWS)]
Tokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]
Width = Annotated[int, Field(ge=1, le=10**7)]  # of a layer
Few = Annotated[int, Field(ge=1, le=10**5)]  # layers, heads, threads, ranks
Memory = Annotated[Amount | Literal["auto"], ParsedAmount]  # bytes
Worth = Annotated[float, Field(ge=-1e9, le=1e9)]  # a response's reward
Seconds = Annotated[float, Field(gt=0, le=MOST_TIMEOUT)]
Timeout = Annotated[float, Field(ge=1, le=LONGEST), BeforeValidator(parse_duration)] | Literal["auto"]
Temperature = Annotated[float, Field(ge=LEAST_TEMPERATURE, le=1000)]
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]  # part of metric names
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]*$")]


def _readable(extract: str) -> str:
    try:
        groups = re.compile(extract).groups
    except re.error as error:
        raise ValueError(f"must be a regular expression, got {extract!r}: {error}; fix or quote it") from error
    if not groups:
        raise ValueError(f"must have a group around the answer, got {extract!r}; write ({extract})")
    return extract


def _sayable(stop: tuple[str, ...]) -> tuple[str, ...]:
    fault = stop_fault(stop)
    if fault:
        raise ValueError(fault)
    return tuple(sorted(set(stop)))  # a response ends at the first match: order and duplicates have no effect


Stop = Annotated[tuple[str, ...], AfterValidator(_sayable)]  # a response ends where its text contains one string
Extract = Annotated[str, AfterValidator(_readable)]  # a regular expression; group 1 of the last match is the answer


# several rewards of one stage with their weights, as in run.yaml: `reward: {right: 1.0, brief: 0.2}`
MOST_WEIGHT = 1e6
MOST_REWARDS = 16  # maximum number of rewards of one stage
# tags of pydantic that do not appear in errors
_ALONE, _WEIGHTED, _SERVER = "function-alone", "function-weighted", "function-server"


def _number(value: Any) -> Any:
    if isinstance(value, bool):  # pydantic would read it as 1 or 0
        raise ValueError(f"must be a number, got {str(value).lower()}; write the number")
    return value


def _weighing(weights: dict[str, float]) -> dict[str, float]:
    if not any(weights.values()):
        got = f"only {', '.join(weights)}: 0" if weights else "an empty map"
        raise ValueError(f"at least one reward must have a weight other than 0, got {got}; change a weight")
    return weights


# name → weight; the score is the sum of weight times reward
Weights = Annotated[
    dict[Name, Annotated[float, BeforeValidator(_number), Field(ge=-MOST_WEIGHT, le=MOST_WEIGHT)]],
    Field(max_length=MOST_REWARDS),
    AfterValidator(_weighing),
]
_Either = Annotated[
    Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/@+-]*$"), Tag(_ALONE)]
    | Annotated[Weights, Tag(_WEIGHTED)],
    Discriminator(lambda value: _WEIGHTED if isinstance(value, dict) else _ALONE),
]


def _name_or_map(value: Any) -> Any:
    if not isinstance(value, str | dict):
        given = "a list" if isinstance(value, list) else f"{value!r:.60}"
        raise ValueError(f"must be a name, or names with weights such as {{right: 1.0, brief: 0.2}}, got {given}")
    return value


Reward = Annotated[_Either, BeforeValidator(_name_or_map)]  # one name, or names with weights


class OptimizerConfig(Frozen):
    """AdamW with linear warm-up, then cosine or linear decay over the remaining steps to `final_ratio` of the peak."""

    learning_rate: float = Field(default=1e-5, gt=0, le=1)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0, le=1000)  # applies to matrices only, not to norms and biases
    warmup_steps: NonNegative = 10  # moments are zero at the start, so Adam needs a warm-up
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    final_ratio: float = Field(default=0.1, ge=0, le=1)
    max_grad_norm: float = Field(default=1.0, gt=0, le=1e12)


class PolicyGradientOptimizerConfig(OptimizerConfig):
    """AdamW for policy gradients: a second moment over more steps, as gradients are noisy; linear decay to a fifth."""

    betas: tuple[Decay, Decay] = (0.9, 0.99)
    schedule: Literal["constant", "linear", "cosine"] = "linear"
    final_ratio: float = Field(default=0.2, ge=0, le=1)


class InferenceRuntimeConfig(Frozen):
    """The device, the dtypes and the limits of a job that does not train."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bf16 on CUDA, fp32 on CPU
    threads: Few = 1  # torch's threads on the CPU; one is fastest for models under ~10 M parameters (measured)
    stall_after: StallAfter | None = None  # seconds without progress until a job is stalled; None: the run's value
    # maximum bytes of keys and values on one rollout rank, which limit the number of rows decoded together; auto: the
    # memory of the rank's device that other uses leave free (`planner.sizes`)
    kv_cache: Memory = "auto"

    @model_serializer(mode="wrap")
    def _said(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out default values, so that digests are the same as in Posttrain versions with fewer fields."""
        said: dict[str, Any] = handler(self)
        unsaid = ("kv_cache", "object_store", "start_timeout", "call_timeout", "shard_frozen")
        left: dict[str, Any] = {"stall_after": None, **dict.fromkeys(unsaid, "auto")}
        return {name: value for name, value in said.items() if name not in left or value != left[name]}


_URL = r"^https?://[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]{1,5})?(/[\w./-]*)?$"


def _address(value: Any) -> Any:
    if not isinstance(value, str) or not re.match(_URL, value):  # it may contain a password
        raise ValueError(
            "must have the form https://HOST:PORT/v1 or http://HOST:PORT/v1, without a user or a query, got another "
            "form; correct it"
        )
    return value


class ServedConfig(Frozen):
    """A model that answers requests in OpenAI's form: `{serve: channel:judge}`, or `{url: https://HOST/v1}`.

    A reward's code gets the variables POSTTRAIN_NAME_URL, POSTTRAIN_NAME_MODEL and POSTTRAIN_NAME_KEY.
    """

    serve: Word | None = None  # base, a stage, or a ref: the job serves this model as long as it runs
    # of another server, such as that of vLLM or SGLang
    url: Annotated[str, BeforeValidator(_address), Field(pattern=_URL)] | None = None
    # with url: its name in requests
    model: Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,398}[!-~])?$")] = "model"
    # with url: the variable of the driver's environment with the key, which only the model's callers get
    key: SecretName | None = None
    context: Tokens | None = None  # with serve: maximum tokens of a prompt with its response; None: those of the model
    runtime: InferenceRuntimeConfig = InferenceRuntimeConfig()  # with serve

    @model_validator(mode="after")
    def _is_served_once(self) -> Self:
        if (self.serve is None) == (self.url is None):
            raise ValueError("must have either serve or url; name a model to serve, or the URL of a server")
        foreign = ("model", "key") if self.serve else ("context", "runtime")
        odd = next((name for name in foreign if getattr(self, name) != type(self).model_fields[name].default), None)
        if odd is not None:
            raise ValueError(f"{odd} needs {'url' if self.serve else 'serve'}; remove {odd}")
        if self.url is not None and self.address.endswith(":0"):
            raise ValueError("url must have a port from 1 to 65535, got 0; correct it")
        if self.key is not None and not may_be_secret(self.key):
            raise ValueError(f"key must name a variable that no other program reads, got {self.key}; rename it")
        return self

    @property
    def address(self) -> str:
        """Host and port of the URL."""
        parts = urlsplit(str(self.url))
        return f"{parts.hostname}:{ {'http': 80, 'https': 443}[parts.scheme] if parts.port is None else parts.port }"


def _refuse_serve(given: ServedConfig) -> ServedConfig:
    if given.serve is not None:
        raise ValueError(f"must be a model, or have a url, got serve; write {given.serve}: the job opens this model")
    return given


def _name_or_server(value: Any) -> Any:
    if not isinstance(value, str | Mapping | ServedConfig):
        raise ValueError(f"must be a model, or a map such as {{url: https://HOST/v1, model: NAME}}, got {value!r:.60}")
    return value


# a model of a role: base, a stage, a ref, or a model on another server
RoleModel = Annotated[
    Annotated[Word, Tag(_ALONE)] | Annotated[ServedConfig, AfterValidator(_refuse_serve), Tag(_SERVER)],
    Discriminator(lambda value: _ALONE if isinstance(value, str) else _SERVER),
    BeforeValidator(_name_or_server),
]


Models = Annotated[dict[Annotated[str, Field(pattern=ROLE_NAME)], ServedConfig], Field(max_length=8)]


def served_slots(models: Mapping[str, ServedConfig]) -> dict[str, tuple[str, str]]:
    """Return the input slots of the models that a job serves."""
    return {f"{SERVED}{name}": ("model", one.serve) for name, one in models.items() if one.serve}


class RuntimeConfig(InferenceRuntimeConfig):
    """The device, the dtypes, the limits and the checkpoints of a training job."""

    # tokens of one forward pass; auto: 4096 on CPU (because of its caches), 16384 on CUDA, or fewer if these do not fit
    # (`planner.sizes`)
    micro_batch_tokens: Positive | Literal["auto"] = "auto"
    checkpoint_every: Positive = 50  # steps
    save_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # of the output model; auto: the compute dtype
    # recompute layers in the backward pass, which saves memory and takes time; auto: only if a micro-batch does not fit
    # otherwise
    activation_checkpointing: bool | Literal["auto"] = "auto"
    # distribute each frozen role (reference, teacher, …) over the ranks of its pool, instead of a whole copy on every
    # rank; auto: only if whole copies do not fit
    shard_frozen: bool | Literal["auto"] = "auto"
    sequence_parallel: Few = 1  # ranks that share a batch's tokens (Ulysses); must divide the number of ranks
    ray_address: Word | None = None  # address of a running Ray cluster; None: start one on this machine if needed
    # bytes of shared memory of a Ray cluster that the job starts; auto: a tenth of the machine's memory but at most
    # 8 GiB, or twice the weights that are sent to rollouts if that is more
    object_store: Memory = "auto"
    start_timeout: Timeout = "auto"  # seconds to start a role's ranks with their model (`planner.sizes`)
    call_timeout: Timeout = "auto"  # seconds for one call of a worker or an answer of an engine (`planner.sizes`)

    @model_validator(mode="after")
    def _one_cluster(self) -> Self:
        if self.object_store != "auto" and self.ray_address is not None:
            raise ValueError(
                "object_store applies only to a cluster that the job starts, got ray_address too; remove one"
            )
        return self


class RolloutConfig(Frozen):
    """The engine that samples responses.

    Stages leave the default out of dumps, so that digests are the same as in Posttrain versions without the field.
    """

    # native: Posttrain's decoder; module: the model's own forward pass in transformers; auto: native if it can decode
    # the model, else module; another name: an engine of an installed package
    engine: Word = "auto"


class TrainConfig(Frozen):
    """The engine that trains; stages leave the default out, see `RolloutConfig`."""

    engine: Word = "torch"  # torch: Posttrain's own engine; another name: an engine of an installed package


def _named_layers(targets: Any) -> Any:
    listed = list(targets) if isinstance(targets, list | tuple) else [targets]
    plain = [one for one in listed if isinstance(one, str) and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.]*", one)]
    if targets != AUTO and (isinstance(targets, str) or not listed or len(set(plain)) < len(listed)):
        raise ValueError(f"must be auto, or different names of layers such as [q_proj, v_proj], got {targets!r:.80}")
    if HEAD in listed:
        raise ValueError(f"must not contain {HEAD}: this head trains in full beside the adapter; remove it")
    return AUTO if targets == AUTO else tuple(sorted(plain))


Targets = Annotated[Literal["auto"] | tuple[str, ...], BeforeValidator(_named_layers)]


class LoraConfig(Frozen):
    """Low-rank updates of linear layers: W x + s · B A x, with W frozen. The names are peft's without `lora_`.

    Source: Hu et al., arXiv 2106.09685; s = alpha / rank, or alpha / sqrt(rank) with `rslora` (Kalajdzievski, arXiv
    2312.03732).
    """

    rank: Annotated[int, Field(ge=1, le=MOST_RANK)] = 16  # of every update
    alpha: float = Field(default=32.0, gt=0, le=1e6)  # the update is multiplied by alpha / rank
    dropout: float = Field(default=0.0, ge=0, lt=1)  # of the input of A; only where a stage trains with dropout
    # names of linear layers, such as q_proj; auto: all linear layers of the decoder layers, without the output head
    targets: Targets = "auto"
    rslora: bool = False  # multiply by alpha / sqrt(rank) instead

    def described(self) -> SavedAdapter:
        """Return the description of this adapter as a model has it."""
        return SavedAdapter(self.rank, self.alpha, self.targets, self.rslora)


class AdapterConfig(Frozen):
    """The adapter that a stage trains instead of the whole model."""

    lora: LoraConfig = LoraConfig()  # low-rank updates of linear layers
    # nf4: the frozen base's linear layers are kept in 4 bits while the adapter is trained, in one process and on given
    # rows only (QLoRA, Dettmers et al., arXiv 2305.14314); the output extends the base as it is stored
    quantize: Literal["nf4"] | None = Field(default=None, exclude_if=lambda kind: kind is None)

    def size(self) -> AdapterSize:
        """Return the size of the adapter, for the planner."""
        targets = self.lora.targets
        return AdapterSize(self.lora.rank, () if targets == AUTO else tuple(targets), self.quantize is not None)


class LossProbeConfig(Frozen):
    """A small held-out measurement during training, for the curve and for selection within the stage."""

    data: Word
    every: Positive = 40  # steps between measurements; there is also one before the first step and one at the end
    items: Positive = 128  # number of rows that are measured, beginning with the first


class ProbeConfig(LossProbeConfig):
    """A probe that samples greedy answers to rows and compares them with the rows' answers."""

    extract: Extract = r"(?s)(.*)"


class EarlyStoppingConfig(Frozen):
    """Ends a stage whose probe no longer improves."""

    # number of consecutive probes without an improvement after which the stage ends
    patience: Annotated[int, Field(ge=1, le=10**6)] = 3
    # a gain counts as an improvement if it exceeds this, in units of the metric
    min_delta: float = Field(default=0.0, ge=0, le=1e6)
