"""The memory that every phase of a training step needs, and whether a placement is feasible. Pure arithmetic.

Memory is counted by pool and role, for one rank. For a model of N parameters, computed with b bytes each (4 on a CPU,
2 as bfloat16), on G ranks:

====================  ========================================================  =======================================
part                  one rank                                                  G > 1 (FSDP2, shards kept in float32)
====================  ========================================================  =======================================
weights               b N                                                       4 N / G
masters               4 N when b = 2: the optimiser updates float32             none
optimizer             8 N: two moments of Adam in float32                       8 N / G
gradients             4 N, and 2 N of the last micro-batch when b = 2           4 N / G
gathered              none                                                      b × (embedding + head + two layers)
frozen role           b N                                                       b N, or if sharded b N / G and gathered
====================  ========================================================  =======================================

With an adapter of M parameters, masters, optimizer and gradients are those of M instead of N, the base keeps b bytes,
and the policy computes its own reference. Training takes 16 N in float32 and 20 N in mixed precision with float32
accumulation: the 16 N of ZeRO (Rajbhandari et al. 2020, section 3.1: 2 + 2 + 12) and 4 N for gradients in float32.
Every rank opens a whole model before sharding, in its compute dtype, and shards it layer by layer, which takes b N in
the phase `start`, one role after the other, next to the weights of the roles that were opened before.
`Load.shard_frozen` decides whether frozen roles are sharded (`planner.sizes` chooses it); a layer is gathered while it
computes.

For a mixture of experts, N counts all experts, and a gathered layer contains all its experts, but activations are those
of the experts that a token uses. A rollout that shares a pool of one rank with the policy reads the
policy's weights; elsewhere it holds a copy. The rollout's key-value cache takes 2 × layers × kv_heads × head_dim × b
for each token of the rows decoded together, whose number `runtime.kv_cache` limits. On a GPU, a row occupies whole
pages of 128 positions. On a CPU, a row occupies the slot in which it ends; slots have 128, 256, 512 … positions, and
the largest slot is cut to the longest row of a call. While `kv_cache` has room, the number of slots is doubled as rows
arrive, and slots remain when a row moves to the next class. Prompts are read before their rows are decoded, at most
`PREFILL_TOKENS` at a time: until rows use a prompt, the prompt's keys and values are outside the cache, together with
the widest values of one layer (of its norm, its projections or its MLP).

Activations are estimated, not certain: autograd keeps for one layer, per token, about 7 hidden + 5 (heads + kv_heads) ×
head_dim + 4 intermediate values of b bytes, and 3 hidden for each expert that the token uses. (This was counted on
Qwen3 and Qwen3-MoE; a Llama layer keeps an eighth less. The approach is that of Korthikanti et al. 2022, section 4,
without the scores, which fused attention never stores.) With checkpointing, autograd keeps one such layer, and `hidden`
values for each other layer. The backward pass adds the gradients of one layer's values. For a process that trains or
evaluates on a CPU, the total computed here is within a factor of 1.5 of the process's peak resident memory (tests
measure it). The logits count twice, in float32; if there are more than `CHUNKED_LOGITS` logits, a chunk's temporaries
and the head's gradient in float32 count instead.

A teacher's likeliest tokens stay in the teacher's memory on the machine, 8 bytes each, from the phase `teacher` to the
last update. Unless learner and teacher are one process, each learning rank also stores there the tokens for its
documents and, while it fetches them, one of the teacher's parts. These bytes count if ranks compute on CPUs, with
`max_new_tokens` tokens per response.

The weights of a sleeping frozen role in a shared pool leave the GPU; on a CPU they are dropped and read again. Trained
weights, the shards of frozen roles and a rollout's copy stay. The following are not counted: Python and torch
themselves (0.4 GB a process on the CPU), CUDA contexts, allocator fragments, collective buffers, data sets, checkpoints
being written, and a reward function's processes.

Whether a placement is feasible is checked before anything starts, against the machine or a cluster. The available
resources have the form of Ray's cluster resources::

    {"CPU": 32.0, "GPU": 8.0, "accelerator_type:H100": 1.0}

`accelerator_type:…` means that some node has devices of this kind, but does not give their number. Therefore only the
presence of a kind and the total number of GPUs can be checked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from posttrain.domain.kinds import Load
from posttrain.domain.placement import MAIN, ROLES, Placement, Pool
from posttrain.domain.roles import step_phases, with_models
from posttrain.planner.shape import Shape

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}  # 16384 on a CPU is 15 % slower at 1 M parameters: cache misses
CHUNKED_LOGITS = 2**25  # above this number, the engine computes logits in chunks and again in the backward pass
BUCKET_BYTES = 2**26  # bytes of weights sent to a rollout at a time (`engine.weights.stream`)
CHUNK_BYTES = (2**27, 2**31)  # bounds of a chunk's temporaries, which have the size of the head's gradient
KV_AHEAD = 16  # tokens that a GPU decodes between two checks for ended rows (`engine.rollout.backends.native`)
KV_RESERVE = 16  # a 16th of the cache is reserved for growing rows (see `KV_AHEAD`)
KV_PAGE = 128  # positions that a rollout takes at a time on a GPU (`engine.rollout.kv_pages.PAGE`)
KV_SLOT = 128  # positions of the smallest class of slots on a CPU (`engine.rollout.kv_slots`)
PREFILL_TOKENS = 8192  # of prompts read at a time (`engine.rollout.backends.native`)
_SLOT_STEPS = (32, 16, 128)  # narrowest slot, and step of wider slots; step of slots up to the third number
ACCELERATOR = "accelerator_type:"  # prefix of Ray's names of kinds


@dataclass(frozen=True, slots=True)
class Held:
    """The bytes of a role's part in a phase: `Held("update", "main", "policy", "optimizer", 800, estimated=False)`."""

    phase: str
    pool: str
    role: str
    part: str  # whole | weights | masters | optimizer | gradients | gathered | copy | kv cache | …
    bytes: int  # of one rank
    estimated: bool  # whether it is an estimate that depends on the rows; otherwise it is certain


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest phase of a pool: bytes of one rank, and the certain part of them."""

    pool: str
    device: str  # cpu | cuda
    ranks: int
    phase: str
    bytes: int
    certain: int


@dataclass(frozen=True, slots=True)
class Residency:
    """The table of one stage, phase by phase."""

    held: tuple[Held, ...]
    peaks: tuple[Peak, ...]  # in the order of the pools; bytes and certain bytes are each the maximum over phases

    def total(self, phase: str, pool: str, role: str) -> int:
        """Return the bytes that a role holds on one rank."""
        return sum(h.bytes for h in self.held if (h.phase, h.pool, h.role) == (phase, pool, role))

    def of_pool(self, phase: str, pool: str) -> int:
        """Return the bytes that all roles hold on one rank."""
        return sum(h.bytes for h in self.held if (h.phase, h.pool) == (phase, pool))

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases in the order of a step."""
        return tuple(dict.fromkeys(h.phase for h in self.held))


def resident(
    load: Load,
    shapes: Mapping[str, Shape],
    *,
    prompt_tokens: int = 0,
    longest_prompt: int = 0,
    gpu_there: bool = False,
) -> Residency:
    """Return the memory that every role holds in every phase.

    Args:
        load: the stage.
        shapes: role → shape of its model; a role without a shape is left out.
        prompt_tokens: tokens of a typical prompt (or demonstration), for the key-value cache and for batches that do
            not fill a micro-batch; 0: unknown.
        longest_prompt: tokens of the longest prompt; 0: all prompts are typical.
        gpu_there: whether `device: auto` of collocated roles becomes cuda.
    """
    pools = load.pools
    held: list[Held] = []
    peaks: list[Peak] = []
    stays = {name: _Pool(load, pool, gpu_there, prompt_tokens, longest_prompt) for name, pool in pools.items()}
    phases = _phases(load)
    for phase, active in phases.items():
        for pool in stays.values():
            held += pool.phase(phase, active, shapes)
    for name, pool in stays.items():
        mine = {phase: [h for h in held if (h.phase, h.pool) == (phase, name)] for phase in phases}
        full = {phase: sum(h.bytes for h in rows) for phase, rows in mine.items()}
        sure = [sum(h.bytes for h in rows if not h.estimated) for rows in mine.values()]
        worst = max(full, key=full.__getitem__)
        if full[worst]:
            peaks.append(Peak(name, pool.device, pool.pool.ranks, worst, full[worst], max(sure)))
    return Residency(tuple(held), tuple(peaks))


def shared_weights(load: Load) -> bool:
    """Return whether the rollout reads the policy's weights instead of a copy."""
    rollout = load.role("rollout")
    if rollout is None or load.role(rollout.base_of) is None:
        return False
    home = load.placement.pool_of(rollout.base_of)
    return "rollout" in home.roles and home.ranks == 1


def device_of(load: Load, pool: Pool, *, gpu_there: bool) -> str:
    """Return the device of a pool, with `auto` resolved: cpu | cuda."""
    gpu = pool.resources.gpus > 0 or (gpu_there and load.placement.is_inline and load.ray_address is None)
    return "cuda" if load.device == "cuda" or (load.device == "auto" and gpu) else "cpu"


def width_of(load: Load, device: str) -> int:
    """Return the bytes of a value in the compute dtype."""
    return 4 if load.dtype == "float32" or (load.dtype == "auto" and device == "cpu") else 2


def row_positions(tokens: int, device: str, longest: int = 0) -> int:
    """Return the number of cache positions (one key and value each) that a row of `tokens` tokens occupies.

    On a GPU, the row occupies whole pages, including pages for the tokens decoded before the next check for ended rows,
    and a copy of its prompt's last page. On a CPU, the row occupies one slot; slots of each class are twice as large as
    those of the previous class.

    Args:
        longest: tokens of the longest row that is decoded in the same call; 0: no other row is longer.
    """
    if device == "cuda":
        return (math.ceil((tokens + KV_AHEAD) / KV_PAGE) + 1) * KV_PAGE
    own = KV_SLOT << (tokens // KV_SLOT).bit_length()  # one more position, for the next token
    most = max(tokens, longest) + 1
    narrowest, step, piece = _SLOT_STEPS
    step = step if most <= piece else narrowest
    return min(own, max(narrowest, math.ceil(most / step) * step))


def shardable(load: Load) -> tuple[str, ...]:
    """Return the frozen roles whose pool has several ranks."""
    models = [name for name in with_models(load.roles) if name not in (*load.trained, "rollout")]
    return tuple(name for name in models if load.placement.pool_of(name).ranks > 1)


def _phases(load: Load) -> dict[str, tuple[str, ...]]:
    """Return the phases with their active roles, without phases that have no active role."""
    sharded = (*load.trained, *(shardable(load) if load.shard_frozen else ()))
    found = {
        "start": tuple(role for role in sharded if load.placement.pool_of(role).ranks > 1),
        **step_phases(load.roles),
    }
    if shared_weights(load):
        found.pop("weights", None)
    return {phase: roles for phase, roles in found.items() if roles}


class _Pool:
    """The memory of one rank of one pool."""

    def __init__(self, load: Load, pool: Pool, gpu_there: bool, prompt_tokens: int, longest_prompt: int) -> None:
        self._load, self.pool = load, pool
        self.device = device_of(load, pool, gpu_there=gpu_there)
        self._width, self._ranks = width_of(load, self.device), pool.ranks
        self._lent = shared_weights(load)
        self._shards = bool(load.shard_frozen) and pool.ranks > 1
        sleep = load.placement.sleep
        self._sleeps = (self.device == "cuda" if sleep == "auto" else sleep) and len(pool.roles) > 1
        self._prompt, self._context = prompt_tokens, prompt_tokens + load.response_tokens
        self._longest = max(prompt_tokens, longest_prompt) + load.response_tokens
        tokens = load.micro_batch_tokens or MICRO_BATCH_TOKENS[self.device]
        if prompt_tokens and load.documents:
            tokens = min(tokens, load.documents * self._context)
        tokens = max(tokens, load.response_tokens)  # a document is never cut
        self._tokens = math.ceil(tokens / load.sequence_parallel)

    def phase(self, phase: str, active: Collection[str], shapes: Mapping[str, Shape]) -> Iterator[Held]:
        """Yield the memory that the pool's roles hold while the roles `active` work."""
        if phase == "start":
            yield from self._start(active, shapes)
            return
        for role in self.pool.roles:
            spec = self._load.role(role)
            found: list[tuple[str, int, bool]] = []
            if role in shapes:
                found += self._persistent(role, shapes[role], active)
                found += self._transient(phase, role, shapes[role]) if role in active else []
            if role in shapes or (spec and spec.url):
                found.append(("rows", self._rows(phase, role), True))
            for part, size, estimated in found:
                if size:
                    yield Held(phase, self.pool.name, role, part, size, estimated)

    def _start(self, sharded: Collection[str], shapes: Mapping[str, Shape]) -> Iterator[Held]:
        """Yield the memory that is held while the sharded role opens that leaves the least room.

        That is its whole model, and the weights of the roles that `engine.loop.controller` opens before.
        """
        names = [role for role in self._load.names if role in self.pool.roles and role in shapes]
        first = (*self._load.trained[:1], "rollout")
        before: list[Held] = []
        worst: list[Held] = []
        for role in sorted(names, key=lambda role: first.index(role) if role in first else len(first)):
            if role in sharded:
                size = self._width * shapes[role].parameters
                opening = [*before, Held("start", self.pool.name, role, "whole", size, estimated=False)]
                worst = max(worst, opening, key=lambda held: sum(h.bytes for h in held))
            for part, size, _ in self._persistent(role, shapes[role], names):
                if part in ("weights", "copy") and size:
                    before.append(Held("start", self.pool.name, role, part, size, estimated=False))
        yield from worst

    def _learned(self, shape: Shape) -> int:
        """Return the number of parameters that the optimiser updates."""
        adapter = self._load.adapter
        return adapter.parameters(shape.linear_layers, shape.layers) if adapter else shape.parameters

    def _base(self, shape: Shape) -> int:
        """Return the bytes of a frozen base: 4 bits of each weight that is quantised, and a scale for 64 of them."""
        adapter = self._load.adapter
        small = shape.layers * sum(math.prod(sizes) for sizes in shape.linear_layers.values())
        quantised = small if adapter and adapter.quantised else 0
        return self._width * (shape.parameters - quantised) + quantised // 2 + 4 * quantised // 64

    def _persistent(self, role: str, shape: Shape, active: Collection[str]) -> Iterator[tuple[str, int, bool]]:
        size, width, ranks = shape.parameters, self._width, self._ranks
        if role == "rollout":
            if not self._lent:
                yield "copy", width * size, False
        elif role in self._load.trained:
            own = self._learned(shape)
            frozen = math.ceil(self._base(shape) / ranks) if self._load.adapter else 0
            yield "weights", frozen + (width * own if ranks == 1 else 4 * math.ceil(own / ranks)), False
            yield "masters", (4 * own if ranks == 1 and width == 2 else 0), False
            yield "optimizer", 8 * math.ceil(own / ranks), False
        elif self._shards:
            yield "weights", width * math.ceil(size / ranks), False
        elif role in active or not self._sleeps:
            yield "weights", width * size, False

    def _transient(self, phase: str, role: str, shape: Shape) -> Iterator[tuple[str, int, bool]]:
        width = self._width
        if role == "rollout" and phase == "rollout":
            row = row_positions(self._context, self.device, self._longest) * shape.kv_values * width
            rows = self._load.decoded(self._ranks)
            if self._load.kv_cache is not None and row:
                rows = max(1, min(rows, self._load.kv_cache // row))
            yield "kv cache", self._cached(rows, row, shape), True
            # tokens of prompts read at a time; the maximum for prompts of unknown length
            read = min(PREFILL_TOKENS, rows * self._prompt) if self._prompt else PREFILL_TOKENS
            yield "prefill", read * (shape.kv_values + _read_values(shape)) * width, True
            yield "logits", 2 * 4 * rows * shape.vocabulary, True
        elif role == "rollout" and phase == "weights":
            yield "bucket", min(width * self._learned(shape), BUCKET_BYTES), False
        elif role in self._load.trained and phase != "rollout":
            if self._ranks > 1:
                yield "gathered", width * min(shape.parameters, shape.unit_parameters), False
            if phase == "weights":
                yield "bucket", min(width * self._learned(shape), BUCKET_BYTES), False  # sent to the rollout
            if phase.startswith("update"):
                learned = self._learned(shape)
                own = 4 * math.ceil(learned / self._ranks)
                last = 2 * learned if self._ranks == 1 and width == 2 else 0
                yield "gradients", own + last, False
                yield from self._forward(shape, backward=True, head=self._speaks(role))
            elif phase != "weights":
                yield from self._forward(shape, backward=False, head=self._speaks(role))
        elif role != "rollout":
            if self._shards:
                yield "gathered", width * min(shape.parameters, shape.unit_parameters), False
            yield from self._forward(shape, backward=False, head=self._speaks(role))

    def _speaks(self, role: str) -> bool:
        spec = self._load.role(role)
        return spec is not None and spec.head == "language"

    def _rows(self, phase: str, role: str) -> int:
        """Return the bytes of wide columns that a rank holds in the machine's memory."""
        load, holder = self._load, next((one for one in self._load.roles if one.wide), None)
        if holder is None or self.device != "cpu":
            return 0
        each, ranks = load.response_tokens * holder.wide, load.placement.pool_of(holder.name).ranks
        part = each * math.ceil(load.samples / ranks)
        if role == holder.name and phase in (holder.name, "update"):
            return part
        if role != "policy" or phase != "update" or load.placement.is_inline:
            return 0
        return each * math.ceil(load.documents / self._ranks) + part

    def _cached(self, rows: int, row: int, shape: Shape) -> int:
        """Return the bytes of keys and values of `rows` rows.

        On a CPU this includes, within `kv_cache`, the doubled slots after each read of prompts, the slots of shorter
        classes that rows left, and a second copy of one layer while a class grows.
        """
        if self.device == "cuda" or not self._prompt:
            return rows * row
        slots = max(1, min(rows, PREFILL_TOKENS // self._prompt))
        while slots < rows:
            slots *= 2
        through, positions = KV_SLOT, 0
        while through < row_positions(self._context, self.device, self._longest):
            positions += through if through > self._prompt else 0
            through *= 2
        taken = slots * row + rows * positions * shape.kv_values * self._width
        taken = taken if self._load.kv_cache is None else min(taken, max(self._load.kv_cache, rows * row))
        return taken + rows * row // shape.layers

    def _forward(self, shape: Shape, *, backward: bool, head: bool) -> Iterator[tuple[str, int, bool]]:
        layer = (
            (7 + 3 * shape.chosen) * shape.hidden
            + 5 * (shape.heads + shape.kv_heads) * shape.head_dim
            + 4 * shape.intermediate
        )
        kept = layer
        if backward:
            saved = shape.hidden if self._load.activation_checkpointing else layer
            kept = layer + (shape.layers - 1) * saved
        yield "activations", self._tokens * kept * self._width, True
        if backward:
            yield "backward", self._tokens * layer * self._width, True
        if head:
            trained = backward and self._load.adapter is None  # the gradient of the head exists only if it learns
            yield "logits", _logits(self._tokens, shape, backward=trained, half=self._width < 4), True


def _read_values(shape: Shape) -> int:
    """Return the maximum number of values per token in one layer's forward pass, without a backward pass."""
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return 2 * shape.hidden + max(2 * heads, 3 * shape.intermediate + 2 * shape.chosen * shape.hidden)


def _logits(tokens: int, shape: Shape, *, backward: bool, half: bool) -> int:
    """Return the bytes for the log-probabilities of `tokens` tokens."""
    gradient, (least, most) = 4 * shape.vocabulary * shape.hidden, CHUNK_BYTES
    if tokens * shape.vocabulary <= CHUNKED_LOGITS:
        return 2 * 4 * tokens * shape.vocabulary + (gradient if backward and half else 0)
    return max(min(gradient, most), least) + (gradient if backward else 0)


def infeasible(
    placement: Placement,
    available: Mapping[str, float],
    *,
    roles: Collection[str] = ROLES,
    where: str = "this machine",
) -> list[str]:
    """Return why these pools cannot be started, one line each; empty if they can be started.

    Args:
        available: total resources, in Ray's form, including those in use.
        roles: the stage's roles.
        where: the name of the place in the messages.
    """
    pools = placement.pools(roles).values()
    if placement.is_inline and not any(pool.resources.gpus or pool.resources.cpus for pool in pools):
        return []  # no process is started for this placement
    found = [line for pool in pools for line in _kind_is_missing(pool, available, where)]
    for name, noun in (("GPU", "gpus"), ("CPU", "cpus")):
        asked = {
            pool.name: pool.resources.gpus if noun == "gpus" else pool.resources.cpus_per_rank * pool.ranks
            for pool in pools
        }
        there = available.get(name, 0.0)
        total = sum(asked.values())
        if total > there:
            names = [pool for pool, amount in asked.items() if amount]
            several = len(names) > 1
            parts = f" ({', '.join(f'{pool} {asked[pool]}' for pool in names)})" if several else ""
            found.append(
                f"placement: {' and '.join(map(called, names))} {'request' if several else 'requests'} {total} {noun}"
                f"{parts}, but {where} has {there:g}; {_next_action(noun, several)}"
            )
    return found


def unfit(load: Load, shape: Shape | None) -> list[str]:
    """Return why ranks cannot do this stage's work on this model, one line each.

    Args:
        load: the stage.
        shape: the shape of the policy's (or the only) model; None: unknown, so heads are not checked.
    """
    found: list[str] = []
    parallel = load.sequence_parallel
    for pool in load.pools.values():
        ranks, names = pool.ranks, [role for role in pool.roles if role != "rollout"]
        if names and pool.resources.gpus_per_rank > 1:
            found.append(
                f"placement: {called(pool.name)} has {pool.resources.gpus} gpus for {ranks} ranks, but a rank of "
                f"{names[0]} drives one device; leave ranks out, or request {ranks} gpus"
            )
        if parallel > 1 and ranks % parallel and set(names) & set(load.trained):
            found.append(
                f"runtime.sequence_parallel must divide the ranks of {called(pool.name)} ({ranks}), got {parallel}; "
                f"change it or placement's ranks"
            )
    if shape is not None and parallel > 1 and shape.heads % parallel:
        found.append(
            f"runtime.sequence_parallel must divide the model's {shape.heads} attention heads, got {parallel}; "
            "choose a divisor"
        )
    elif shape is not None and parallel > 1 and shape.kv_heads % parallel and parallel % shape.kv_heads:
        found.append(
            f"runtime.sequence_parallel must divide the model's {shape.kv_heads} key-value heads or be a multiple of "
            f"them, got {parallel}; choose another"
        )
    return found


def too_large(peaks: Collection[Peak], *, device: int | None, machine: int | None) -> list[str]:
    """Return why the certain part of the memory does not fit, one line each. Estimates are not considered.

    Args:
        peaks: the peaks of one stage.
        device: bytes of one GPU; None: unknown.
        machine: bytes of memory shared by all ranks on CPUs; None: unknown, or several machines.
    """
    found = [
        f"memory: one rank of {called(peak.pool)} needs at least {gib(peak.certain)} on its GPU, "
        f"which has {gib(device)}"
        for peak in peaks
        if device is not None and peak.device == "cuda" and peak.certain > device
    ]
    on_cpu = [peak for peak in peaks if peak.device == "cpu"]
    total = sum(peak.certain * peak.ranks for peak in on_cpu)
    if machine is not None and total > machine:
        parts = ", ".join(f"{peak.pool} {peak.ranks} × {gib(peak.certain)}" for peak in on_cpu)
        found.append(f"memory: ranks on CPUs need at least {gib(total)} ({parts}), but this machine has {gib(machine)}")
    return found


def gib(size: int) -> str:
    """Return `1.5 GiB`, `12 MiB`, `29 TiB`."""
    if size >= 2**43:
        return f"{size / 2**40:.0f} TiB"
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{max(size, 2**20 if size else 0) / 2**20:.0f} MiB"


def called(pool: str) -> str:
    return "collocated" if pool == MAIN else pool


def _kind_is_missing(pool: Pool, available: Mapping[str, float], where: str) -> Iterator[str]:
    kind = pool.resources.kind
    there = sorted(name.removeprefix(ACCELERATOR).lower() for name in available if name.startswith(ACCELERATOR))
    if kind is not None and kind not in there and available.get("GPU", 0.0) > 0:
        has = ", ".join(there) or "GPUs of no known kind"
        yield (
            f"placement: {called(pool.name)} requests {pool.resources.gpus} gpus of kind {kind}, but {where} has "
            f"{has}; change kind or leave it out"
        )


def _next_action(noun: str, several: bool) -> str:
    if noun == "gpus":
        return "request fewer, or name a cluster with runtime.ray_address"
    return "request fewer, or put roles together with {with: policy}" if several else "request fewer"
