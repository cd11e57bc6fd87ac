"""Compute the sizes and time-outs that `auto` stands for, and the engine's expected fall-backs for a model.

Sizes are micro-batches, activation checkpointing, key-value cache, object store and time-outs; each has an explanation.
They are pure arithmetic over `planner.residency`, and only this module chooses them: a plan for the machine that it is
made on, the job for the machine that it runs on. Values in run.yaml are kept; the others are chosen so that every phase
of a step fits the usable memory of a device:

======================  ================================================================================================
usable of a GPU         0.9 of its memory, less 1 GiB: CUDA's context, the libraries' workspaces, fragments
usable of a CPU rank    0.8 of the machine's memory less half a GiB for each process, in equal parts
micro_batch_tokens      16384 on CUDA, 4096 on a CPU; halved, down to 1024, while a phase does not fit
activation_             off if a micro-batch of that many tokens fits without; else on, before tokens are halved:
checkpointing           a third more computation costs less than many small micro-batches
kv_cache                on a GPU all memory left in the phase `rollout`, on a CPU half of it, in multiples of 16 MiB
object_store            a tenth of the machine's memory, at most 8 GiB; or, if that is more, twice the weights that are
                        sent to rollouts (the previous version is freed late) plus a teacher's likeliest tokens of a
                        step, at most three tenths of the memory
reward_timeout          10 s, or 20 µs for each token that a batch of responses may hold, if that is more
start_, call_timeout    see the table below
======================  ================================================================================================

A named cluster cannot be inspected before the job runs on it: the memory of its GPUs is that of their `kind`.

Time-outs bound how long a stage waits for its workers; the memory that they need while loading is computed as well:

======================  ================================================================================================
start_timeout           5 min for a role's ranks to start and load their model, or 10 s for each GiB that they read
                        (100 MB/s from one disk for all), if that is more; the same for processes without a model
call_timeout            1 h for one call of a worker, and for a silent engine, or 10 ms for each response token that a
                        rank samples or trains in one call, if that is more; tokens of data rows do not count
======================  ================================================================================================

Deadlines end hanging workers: they are generous, and change no result.

The engine's fall-backs for a model, as far as its configuration shows; the job tries the fast path and reports:

padding          batches are padded instead of packed: compute on tokens that are discarded
module_decoder   responses come from the module's own forward, not from the native zero-copy decoder
plain_attention  on CUDA responses attend by plain torch: only the job can try this torch's variable-length attention
whole_logits     the output head is not a plain matrix, so all logits of a micro-batch are held at the same time
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from posttrain.domain.kinds import Load
from posttrain.domain.placement import Pool
from posttrain.planner.residency import (
    KV_PAGE,
    KV_RESERVE,
    MICRO_BATCH_TOKENS,
    Shape,
    device_of,
    gib,
    resident,
    row_positions,
    shared_weights,
    width_of,
)

START, CALL = 300.0, 3600.0  # seconds
_READ_GIB, _TOKEN = 10.0, 0.01  # seconds
_TRAIN = ("policy", "critic", "reward_model")
LEAST_TOKENS = 1024  # of a chosen micro-batch
_GIB = 2**30
_KV_STEP = 2**24  # so that a few bytes of a file's header change nothing
_OF_GPU, _CONTEXT = 0.9, _GIB
_OF_MEMORY, _PROCESS = 0.8, _GIB // 2
_STORE_SHARE, _STORE_USUAL, _STORE_MOST = 0.1, 8 * _GIB, 0.3
_SCORED_AT_LEAST, _SCORED_TOKEN = 10.0, 20e-6  # seconds
# GB of the smallest device of each name, for a cluster's `kind`
_KINDS = {
    **{"t4": 16, "v100": 16, "l4": 24, "a10": 24, "a10g": 24, "a30": 24, "rtx4090": 24, "a40": 48, "l40": 48},
    **{"l40s": 48, "a100": 40, "h100": 80, "h200": 141, "b200": 180, "gh200": 96, "mi250x": 128, "mi300x": 192},
}
# Model types; a contract test compares them with the engine.
PACKED_TYPES = frozenset({"gpt2", "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "granite", "mistral"})
NATIVE_TYPES = frozenset({"llama", "qwen2", "qwen3"})
_STATIC_ROPE = frozenset({"default", "linear", "llama3", "yarn"})
_SCALED_HEADS = ("logit_scale", "logits_scaling")  # Cohere, Granite: logits are scaled after the head


@dataclass(frozen=True, slots=True)
class Size:
    """One setting of a stage: `Size("kv_cache", 44023414784, "bytes", True, "…")`."""

    name: str  # as in run.yaml
    value: float
    unit: str  # tokens | switch | bytes | seconds
    chosen: bool  # False: from run.yaml
    why: str  # its arithmetic

    @property
    def said(self) -> str:
        """The value for people: `16384 tokens`, `on`, `41.0 GiB`, `51.2 s`."""
        if self.unit == "switch":
            return "on" if self.value else "off"
        return gib(int(self.value)) if self.unit == "bytes" else f"{self.value:g} {self.unit.replace('seconds', 's')}"


def deadlines(load: Load, shapes: Mapping[str, Shape], *, gpu_there: bool = False) -> tuple[Size, Size]:
    """Return `start_timeout` and `call_timeout` of a stage."""
    return _start(load, shapes, gpu_there), _call(load)


def loading(load: Load, shapes: Mapping[str, Shape], *, gpu_there: bool = False) -> Iterator[tuple[str, int, int]]:
    """Yield each role with its ranks and the bytes of the whole model that each rank reads. A rollout on the same
    single rank as its policy reads none.
    """
    for pool in load.placement.pools([role for role in load.roles if role != "reward"]).values():
        width = width_of(load, device_of(load, pool, gpu_there=gpu_there))
        for role in pool.roles:
            lent = role == "rollout" and shared_weights(load)
            if role in shapes and not lent:
                yield role, pool.ranks, width * shapes[role].parameters


def too_much_to_load(
    load: Load, shapes: Mapping[str, Shape], memory: int | None, *, gpu_there: bool = False
) -> list[str]:
    """Return why the ranks of a role cannot load at the same time, one line for each role.

    Ranks that compute in the dtype of the file read its pages, which the machine holds once and may evict. With another
    dtype each rank has its own copy before it moves to its GPU. CPU ranks need more later, which `residency` counts.

    Args:
        memory: bytes of the machine that runs all ranks; None: unknown, or several machines.
    """
    if memory is None:
        return []
    on_gpus = {
        role
        for pool in load.placement.pools([role for role in load.roles if role != "reward"]).values()
        if device_of(load, pool, gpu_there=gpu_there) == "cuda"
        for role in pool.roles
    }
    return [
        f"memory: {ranks} ranks of {role} convert their model side by side in this machine's memory, {ranks} × "
        f"{gib(size)}, it has {gib(memory)}; use fewer ranks on one machine, or compute in the type of its file"
        for role, ranks, size in loading(load, shapes, gpu_there=gpu_there)
        if role in on_gpus and ranks * size > memory and shapes[role].stored not in (0, size // shapes[role].parameters)
    ]


def _start(load: Load, shapes: Mapping[str, Shape], gpu_there: bool) -> Size:
    if load.start_timeout is not None:
        return Size("start_timeout", load.start_timeout, "seconds", False, "")
    read = max(loading(load, shapes, gpu_there=gpu_there), key=lambda one: one[1] * one[2], default=None)
    if read is None:
        return Size("start_timeout", START, "seconds", True, "5 min; the model's sizes are not known")
    role, ranks, size = read
    value = max(START, round(_READ_GIB * ranks * size / _GIB, 1))
    why = f"5 min, or 10 s for each GiB of {ranks} × {gib(size)} ({role}) where that is more"
    return Size("start_timeout", value, "seconds", True, why)


def _call(load: Load) -> Size:
    if load.call_timeout is not None:
        return Size("call_timeout", load.call_timeout, "seconds", False, "")
    tokens = max(_of_a_call(load), default=0)
    value = max(CALL, round(_TOKEN * tokens, 1))
    many = f", or 10 ms for each of the {tokens} tokens of a rank's longest call where that is more" if tokens else ""
    return Size("call_timeout", value, "seconds", True, f"1 h{many}")


def _of_a_call(load: Load) -> Iterator[int]:
    """Yield the response tokens of the longest call of each pool that samples or trains."""
    for pool in load.placement.pools(load.roles).values():
        if "rollout" in pool.roles:
            yield -(-load.samples // pool.ranks) * load.response_tokens
        if set(pool.roles) & set(_TRAIN):
            yield -(-load.documents // pool.ranks) * load.response_tokens


@dataclass(frozen=True, slots=True)
class Room:
    """The available memory: `Room(gpu=85_520_809_984, memory=2 * 2**40, gpu_there=True)`."""

    gpu: int | None = None  # bytes of the smallest GPU; None: no GPU, or unknown
    memory: int | None = None  # bytes of the machine
    gpu_there: bool = False


@dataclass(frozen=True, slots=True)
class Settled:
    """A stage with all sizes chosen."""

    load: Load
    sizes: tuple[Size, ...]
    short: str = ""  # why it does not fit even so, in one line with the next action

    def values(self) -> dict[str, float]:
        """Return the sizes by name, as a job reports them."""
        return {size.name: size.value for size in self.sizes}


def settle(
    load: Load, shapes: Mapping[str, Shape], room: Room, *, prompt_tokens: int = 0, longest_prompt: int = 0
) -> Settled:
    """Choose the sizes that the stage leaves open.

    Args:
        shapes: of the model of each role; without shapes no memory is checked.
        prompt_tokens: of a typical prompt. It does not affect the choice (plan and job may have different numbers),
            only the reported rows of a cache and the estimate that refuses a stage.
        longest_prompt: of the longest prompt, which sets the slot size on a CPU; 0: all are typical.
    """
    stage = _Stage(load, shapes, room)
    sizes: list[Size] = []
    short = ""
    trains = any(role in load.roles for role in ("policy", "critic", "reward_model"))
    if trains:
        chosen = stage.micro_batches(prompt_tokens)
        sizes += chosen.sizes
        load, short = chosen.load, chosen.short
    if "rollout" in load.roles:
        cached = _Stage(load, shapes, room).kv_cache(prompt_tokens, longest_prompt)
        load, short = cached.load, short or cached.short
        sizes += cached.sizes
    store, timeout = _object_store(load, shapes, room), _reward_timeout(load)
    if store is not None:
        load = replace(load, object_store=int(store.value))
    if timeout is not None:
        load = replace(load, reward_timeout=timeout.value)
    waits: tuple[Size, ...] = ()
    if trains:
        start, call = deadlines(load, shapes, gpu_there=room.gpu_there)
        load = replace(load, start_timeout=start.value, call_timeout=call.value)
        alone = load.placement.is_inline and load.ray_address is None
        waits = tuple(size for size in (start, call) if not alone or not size.chosen or size is call)
    return Settled(load, (*sizes, *filter(None, (store, timeout)), *waits), short)


def unknown_kinds(load: Load) -> list[str]:
    """Return a warning for each GPU kind of a cluster whose memory is unknown."""
    if load.ray_address is None:
        return []
    kinds = {pool.name: pool.resources.kind for pool in load.placement.pools(load.roles).values()}
    return [
        f"{name} requests GPUs of kind {kind}, whose memory is unknown, so sizes are not checked (known: "
        f"{', '.join(sorted(_KINDS))})"
        for name, kind in kinds.items()
        if kind is not None and kind not in _KINDS
    ]


class _Stage:
    def __init__(self, load: Load, shapes: Mapping[str, Shape], room: Room) -> None:
        self._load, self._shapes, self._room = load, shapes, room
        self._pools = load.placement.pools([role for role in load.roles if role != "reward"])  # with models

    def micro_batches(self, prompt_tokens: int) -> Settled:
        """Choose the tokens of a micro-batch, and whether layers are recomputed."""
        written = self._load.micro_batch_tokens, self._load.activation_checkpointing
        tried = None
        for tokens, again in self._candidates():
            load = replace(self._load, micro_batch_tokens=tokens, activation_checkpointing=again)
            tried = load, *self._tightest(load)
            if tried[1] <= 0:
                break
        assert tried is not None
        load, over, why = tried
        again = bool(load.activation_checkpointing)
        sizes = (
            Size("micro_batch_tokens", float(load.micro_batch_tokens or 0), "tokens", written[0] is None, why),
            Size("activation_checkpointing", float(again), "switch", written[1] is None, "as above"),
        )
        return Settled(load, sizes, self._too_much(load, prompt_tokens) if over > 0 and written[0] is None else "")

    def _candidates(self) -> Iterator[tuple[int, bool]]:
        tokens, again = self._load.micro_batch_tokens, self._load.activation_checkpointing
        trained = next(role for role in ("policy", "critic", "reward_model") if role in self._load.roles)
        home = next(pool for pool in self._pools.values() if trained in pool.roles)
        usual = tokens or MICRO_BATCH_TOKENS[self._device(home)]
        yield from ((usual, way) for way in ((False, True) if again is None else (again,)))
        while tokens is None and usual > LEAST_TOKENS:
            usual //= 2
            yield usual, again is not False

    def _tightest(self, load: Load) -> tuple[int, str]:
        """Return the bytes by which the fullest phase of any pool exceeds its usable memory (negative: free bytes), and
        an explanation.
        """
        found = resident(load, self._shapes, gpu_there=self._room.gpu_there)
        worst: tuple[int, str] | None = None
        for name, pool in self._pools.items():
            usable = self._usable(pool)
            mine = {
                phase: sum(h.bytes for h in found.held if (h.phase, h.pool) == (phase, name) and h.part != "kv cache")
                for phase in found.phases
            }
            if usable is None or not any(mine.values()):
                continue
            phase = max(mine, key=mine.__getitem__)
            words = f"{gib(mine[phase])} in {phase}, {gib(usable)} of {gib(self._whole(pool) or 0)} usable on "
            words += self._place(pool)
            if worst is None or mine[phase] - usable > worst[0]:
                worst = mine[phase] - usable, words
        return worst or (0, self._unknown())

    def _too_much(self, load: Load, prompt_tokens: int) -> str:
        """Return why the smallest micro-batches do not fit; empty if they exceed only the usable part of memory."""
        alone = replace(load, kv_cache=0)  # the cache may shrink to one row
        found = resident(alone, self._shapes, prompt_tokens=prompt_tokens, gpu_there=self._room.gpu_there)
        again = ", and layers computed again" if load.activation_checkpointing else ""
        for peak in found.peaks:
            whole = self._whole(self._pools[peak.pool])
            if whole is not None and peak.bytes > whole:
                return (
                    f"memory: {peak.phase} takes about {gib(peak.bytes)} with the smallest micro-batches, "
                    f"{max(load.micro_batch_tokens or 0, load.response_tokens)} tokens{again}; "
                    f"{self._place(self._pools[peak.pool])} has {gib(whole)}; use more ranks, a smaller model, or "
                    "give roles separate pools"
                )
        return ""

    def kv_cache(self, prompt_tokens: int, longest_prompt: int) -> Settled:
        """Choose the bytes of keys and values of one rollout rank."""
        pool = next(pool for pool in self._pools.values() if "rollout" in pool.roles)
        shape, written = self._shapes.get("rollout"), self._load.kv_cache
        usable = self._usable(pool)
        if shape is None or (usable is None and written is None):
            return Settled(self._load, ())
        device = self._device(pool)
        row = shape.kv_values * width_of(self._load, device)
        longest = max(1, prompt_tokens + self._load.response_tokens)
        slot = row_positions(longest, device, longest_prompt + self._load.response_tokens)
        whole = row * slot
        value, why = (written, "") if written is not None else self._left(pool, usable or 0)
        nobodys = row * KV_PAGE if device == "cuda" else 0
        rows = max(0, value - nobodys) // whole
        if rows > 1 and device == "cuda":  # a reserve for rows that grow
            rows = max(1, (value - value // KV_RESERVE - nobodys) // whole)
        asked = self._load.decoded(pool.ranks)
        many = f"all {asked}" if rows >= asked > 0 else f"{rows} of {asked}"
        what = "tokens" if prompt_tokens else "tokens besides the prompt's"
        pages = f" in pages of {KV_PAGE}" if device == "cuda" else f" in slots of {slot}"
        counted = f"{many} rows of {longest} {what} at {_binary(row)}{pages}"
        load = replace(self._load, kv_cache=value)
        short = "" if rows or written is not None else self._no_row(pool, whole, longest, value)
        if not rows and written is not None:
            short = (
                f"runtime.kv_cache must hold one row of {longest} tokens ({gib(whole + nobodys)}), got {gib(written)}; "
                "raise it, or leave it out"
            )
        size = Size("kv_cache", float(value), "bytes", written is None, ": ".join(filter(None, (why, counted))))
        return Settled(load, (size,), short)

    def _left(self, pool: Pool, usable: int) -> tuple[int, str]:
        found = resident(self._load, self._shapes, gpu_there=self._room.gpu_there)
        held = sum(h.bytes for h in found.held if (h.phase, h.pool) == ("rollout", pool.name) and h.part != "kv cache")
        cuda = self._device(pool) == "cuda"
        left = max(0, usable - held) // (1 if cuda else 2)
        share = "" if cuda else "half of the remaining memory: "
        words = f"{share}{gib(usable)} of {gib(self._whole(pool) or 0)} usable on {self._place(pool)} less {gib(held)}"
        return left // _KV_STEP * _KV_STEP, words

    def _no_row(self, pool: Pool, row: int, longest: int, value: int) -> str:
        return (
            f"memory: the key-value cache of one row of {longest} tokens takes {gib(row)}, {gib(value)} are left for "
            f"it on {self._place(pool)}; lower max_new_tokens, or give the rollout its own pool"
        )

    def _device(self, pool: Pool) -> str:
        return device_of(self._load, pool, gpu_there=self._room.gpu_there)

    def _whole(self, pool: Pool) -> int | None:
        """Return the bytes of one rank's device; on a CPU its share of the machine's memory."""
        named = self._load.ray_address is not None
        if self._device(pool) == "cuda":
            kind = pool.resources.kind or ""
            return (_KINDS[kind] * 10**9 if kind in _KINDS else None) if named else self._room.gpu
        ranks = sum(other.ranks for other in self._pools.values() if self._device(other) == "cpu")
        return None if named or self._room.memory is None else self._room.memory // ranks

    def _usable(self, pool: Pool) -> int | None:
        whole = self._whole(pool)
        if whole is None:
            return None
        cuda = self._device(pool) == "cuda"
        return max(0, int(_OF_GPU * whole) - _CONTEXT if cuda else int(_OF_MEMORY * whole) - _PROCESS)

    def _place(self, pool: Pool) -> str:
        if self._device(pool) == "cuda":
            return f"one GPU of {pool.name}" if len(self._pools) > 1 else "one GPU"
        return "this machine's CPUs" if pool.ranks == 1 else f"each of {pool.ranks} ranks on CPUs"

    def _unknown(self) -> str:
        if not self._shapes:
            return "not checked: the model's sizes are unknown"
        return "not checked: the devices' memory is unknown" + (
            " (name their kind in placement)" if self._load.ray_address else ""
        )


def _object_store(load: Load, shapes: Mapping[str, Shape], room: Room) -> Size | None:
    if load.ray_address is not None or load.placement.is_inline or room.memory is None:
        return None
    if load.object_store is not None:
        return Size("object_store", float(load.object_store), "bytes", False, "")
    sent, policy = 0, shapes.get("policy")
    if policy is not None and "rollout" in load.roles and not shared_weights(load):
        home = load.placement.pools(load.roles)[load.placement.pool_of("policy").name]
        sent = policy.parameters * width_of(load, device_of(load, home, gpu_there=room.gpu_there))
    usual = min(int(_STORE_SHARE * room.memory), _STORE_USUAL)
    rows = load.samples * load.response_tokens * load.wide
    value = max(usual, min(2 * sent + rows, int(_STORE_MOST * room.memory)))
    many = f"twice the {gib(sent)} of weights sent to rollouts" + (f", {gib(rows)} of a teacher's" if rows else "")
    why = many if value > usual else "a tenth of memory, at most 8 GiB"
    return Size("object_store", float(value), "bytes", True, why)


def _reward_timeout(load: Load) -> Size | None:
    if not load.scored:
        return None
    if load.reward_timeout is not None:
        return Size("reward_timeout", load.reward_timeout, "seconds", False, "")
    value = reward_seconds(load.samples, load.response_tokens)
    tokens = load.samples * load.response_tokens
    return Size("reward_timeout", value, "seconds", True, f"10 s, or 20 µs for each of at most {tokens} tokens")


def reward_seconds(samples: int, response_tokens: int) -> float:
    """Return the time-out in seconds of a reward function for one batch of responses."""
    return max(_SCORED_AT_LEAST, round(_SCORED_TOKEN * samples * response_tokens, 1))


def _binary(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size >= 1024 else f"{size} B"


def expected(config: Mapping[str, Any], roles: Collection[str]) -> dict[str, str]:
    """Return fall-back → reason for a model of this `config.json` in these roles; empty if its type is unknown."""
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return {}
    found: dict[str, str] = {}
    reads = set(roles) - {"rollout", "reward"}  # roles that read whole documents
    if reads and kind not in PACKED_TYPES:
        found["padding"] = f"it is not known whether {kind} packs; the job tries it"
    if "rollout" in roles and (why := _not_native(config, kind)):
        found["module_decoder"] = f"the native decoder does not compute {why}"
    scaled = next((name for name in _SCALED_HEADS if config.get(name) not in (None, 1, 1.0)), None)
    if reads and scaled:
        found["whole_logits"] = f"the head scales its logits ({scaled})"
    return found


def _not_native(config: Mapping[str, Any], kind: str) -> str | None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = set(config.get("layer_types") or ())
    unsupported = {
        f"model type {kind}": kind not in NATIVE_TYPES,
        "this hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "sliding windows": not kinds <= {"full_attention"},
        "these rope_parameters": rope.get("rope_type", "default") not in _STATIC_ROPE,
        "pretraining_tp": config.get("pretraining_tp", 1) not in (1, None),
        "quantized weights": config.get("quantization_config") is not None,
        "soft-capped logits": config.get("final_logit_softcapping") is not None,
    }
    return next((name for name, wrong in unsupported.items() if wrong), None)
