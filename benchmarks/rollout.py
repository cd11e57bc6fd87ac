"""Sampling throughput: Hugging Face `generate` against Posttrain's rollout engines, same weights, same work.

    python -m benchmarks.rollout [--size 1m|24m|600m] [--device cpu|cuda] [--json FILE] [--rounds N] [--tiny]

Both sides get the same prompts, the same weights, one thread, float32 (bfloat16 on CUDA), temperature 1 without top-k
or top-p. Response lengths are prescribed, because a randomly initialised model never ends a response: every row stops
at its limit, drawn once from a distribution with a mean near 27 and maximum 64 (on CUDA four times as long), and
end-of-sequence tokens are ignored. Both sides therefore produce exactly the same number of useful tokens. `generate`
gets the limits as a stopping criterion per row and, as with end-of-sequence tokens, computes finished rows until the
last row ends.

Each batch size is measured with different prompts (group 1) and with 8 samples of every prompt (group 8), as in GRPO;
only with groups does it help to compute a prompt once.

Rounds are interleaved (A B A B …); ratios are within each round; the median and the range are reported. Time is CPU
time of this process, which on one thread equals elapsed time on an idle machine and excludes other processes. On CUDA
it is elapsed time, from an idle device to an idle device.

The bound is the machine's limit for the useful work, the longer of two times: matrix products and attention of every
useful token at the GEMM rate measured in this process, or weights and key-value cache read once per step at the copy
rate measured in this process.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM, StoppingCriteria, StoppingCriteriaList

from benchmarks.judging import at_least, judge
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout

ROWS, GROUPS = (256, 16), (1, 8)
LONGEST = 64
PROMPT = 20
SIZES = {  # hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary
    "1m": (128, 384, 4, 4, 2, 32, 512),  # 0.85 M parameters in the layers and 0.07 M in the tied embedding
    "24m": (512, 1408, 8, 8, 4, 64, 512),  # 23.6 M and 0.3 M
    "600m": (1024, 3072, 28, 16, 8, 128, 151_936),  # 440 M and 156 M: the shape of Qwen3-0.6B
}
# Minimum ratio to Hugging Face's rate on a CPU, by rows. Other cases are only reported: at 16 rows of 24 M parameters
# both sides read the same weights for few tokens, and the difference is overhead.
TARGETS = {"1m": {256: 2.5, 16: 2.2}, "24m": {256: 1.6}}


@dataclass(frozen=True)
class Machine:
    """The device, and its number type."""

    name: str = "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return torch.bfloat16 if self.name == "cuda" else torch.float32

    def clock(self) -> float:
        """Return seconds of this process's CPU time, or, after the device has finished, of elapsed time."""
        if self.name == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, run: Callable[[], object], repeats: int = 1) -> float:
        """Return the seconds of one run."""
        start = self.clock()
        for _ in range(repeats):
            run()
        return (self.clock() - start) / repeats

    def gemm_rate(self) -> float:
        """Return FLOP/s of a square product, best of several."""
        size = 1024 if self.name == "cpu" else 8192
        a, b = torch.randn(2, size, size, device=self.name, dtype=self.dtype).unbind()
        return 2 * size**3 / min(self.timed(lambda: torch.mm(a, b)) for _ in range(8))

    def copy_rate(self) -> float:
        """Return bytes/s of reading and writing a buffer larger than the caches."""
        source = torch.randn(2**26 if self.name == "cpu" else 2**30, device=self.name)
        target = torch.empty_like(source)
        return 2 * source.numel() * 4 / min(self.timed(lambda: target.copy_(source)) for _ in range(4))


CPU = Machine()


@dataclass(frozen=True)
class Workload:
    """One batch: `prompts` in groups, and the length of each response."""

    group: int  # samples of each prompt
    prompts: list[list[int]]  # [rows / group]
    limits: list[int]  # [rows]

    @property
    def tokens(self) -> int:
        """Useful tokens."""
        return sum(self.limits)


@dataclass(frozen=True)
class Result:
    """Rates in useful tokens per CPU-second, and ratios to Hugging Face of the same round."""

    engine: str
    rows: int
    group: int
    tokens_per_second: float
    ratio: float
    lowest: float
    highest: float
    bound_tokens_per_second: float
    share_of_bound: float


def build_module(positions: int = 256, size: str = "1m", machine: Machine = CPU) -> PreTrainedModel:
    """Return a Qwen3 model of this size."""
    torch.manual_seed(0)
    hidden, intermediate, layers, heads, kv_heads, head_dim, vocabulary = SIZES[size]
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        attn_implementation="sdpa",
    )
    with torch.device(machine.name):
        return Qwen3ForCausalLM(config).to(machine.dtype).eval()


def build_workload(rows: int, group: int, longer: int = 1) -> Workload:
    """Return prompts of 20 tokens and response lengths 4 + exponential(28), at most 64, times `longer`."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(3, 512) for _ in range(PROMPT)] for _ in range(rows // group)]
    limits = [min(LONGEST, 4 + int(rng.expovariate(1 / 28))) * longer for _ in range(rows)]
    return Workload(group, prompts, limits)


class RowLimits(StoppingCriteria):
    """A stopping criterion that ends each row at its limit."""

    def __init__(self, limits: Sequence[int], prompt: int, device: torch.device) -> None:
        self._ends = torch.tensor(limits, device=device) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: object) -> torch.Tensor:
        return self._ends <= input_ids.shape[1]


def run_hugging_face(module: PreTrainedModel, work: Workload) -> None:
    """Sample one batch with `generate`."""
    ids = torch.tensor(work.prompts, device=module.device).repeat_interleave(work.group, 0)
    with torch.inference_mode():
        out = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(work.limits),
            eos_token_id=None,
            stopping_criteria=StoppingCriteriaList([RowLimits(work.limits, PROMPT, module.device)]),
        )
    assert out.shape[1] == PROMPT + max(work.limits)


def run_engine(engine: RolloutEngine, work: Workload) -> None:
    """Sample the same batch with a Posttrain engine."""
    sampling = SamplingParams(max_new_tokens=max(work.limits), batch_size=len(work.limits), ignore_eos=True)
    out = generate(engine, work.prompts, samples=work.group, sampling=sampling, limits=work.limits)
    assert sum(t.generated for t in out) == work.tokens


def bound_seconds(model: LanguageModel, work: Workload, machine: Machine) -> float:
    """Return the minimum time for the useful work at the machine's measured rates.

    The first token of a response comes from the prompt pass, so a response of n tokens needs n - 1 steps; a prompt is
    computed once for its group.
    """
    config = model.config
    weights = sum(p.numel() for p in model.module.parameters() if p.ndim == 2)
    per_key = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim
    prompt_tokens = sum(len(p) for p in work.prompts)
    steps, sizes = [n - 1 for n in work.limits], [len(p) for p in work.prompts]
    before = [size for size in sizes for _ in range(work.group)]
    contexts = sum(sum(range(at + 1, at + n + 1)) for at, n in zip(before, steps, strict=True))
    contexts += sum(size * (size + 1) // 2 for size in sizes)
    work_flops = 2 * weights * (prompt_tokens + sum(steps)) + per_key * contexts
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * contexts
    work_bytes = machine.dtype.itemsize * (weights * max(work.limits) + numbers)
    return max(work_flops / machine.gemm_rate(), work_bytes / machine.copy_rate())


def measure(work: Workload, rounds: int, size: str, machine: Machine) -> list[Result]:
    """Measure interleaved rounds of all engines on one batch."""
    module = build_module(positions=max(256, max(work.limits) + PROMPT), size=size, machine=machine)
    own = adopt_module(copy.deepcopy(module))
    contenders: dict[str, Callable[[], None]] = {
        "hf generate": lambda: run_hugging_face(module, work),
        "posttrain module": lambda: run_engine(ModuleRollout(own), work),
    }
    native = open_rollout(own)
    contenders[f"posttrain {native.name}"] = lambda: run_engine(native, work)
    repeats = max(1, 128 // len(work.limits)) if rounds > 1 and size == "1m" else 1
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            times[name].append(machine.timed(run, repeats))
    bound = bound_seconds(own, work, machine)
    results = []
    for name, taken in times.items():
        ratios = [base / own_time for base, own_time in zip(times["hf generate"], taken, strict=True)]
        rate = work.tokens / statistics.median(taken)
        results.append(
            Result(
                engine=name,
                rows=len(work.limits),
                group=work.group,
                tokens_per_second=rate,
                ratio=statistics.median(ratios),
                lowest=min(ratios),
                highest=max(ratios),
                bound_tokens_per_second=work.tokens / bound,
                share_of_bound=rate * bound / work.tokens,
            )
        )
    return results


def main() -> None:
    """Print the table; exit 1 if a target is missed."""
    parser = argparse.ArgumentParser(description="Sampling throughput against Hugging Face generate")
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--size", choices=SIZES, default="1m", help="parameters of the model")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="what computes; cuda has no targets")
    parser.add_argument("--tiny", action="store_true", help="one round of four rows: that it runs, no figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = Machine(options.device)
    targets = TARGETS.get(options.size, {}) if machine == CPU else {}
    longer = 1 if machine == CPU else 4
    batches = [build_workload(rows, group, longer) for rows in ROWS for group in GROUPS]
    if options.tiny:
        batches = [build_workload(4, 2)]
    rounds = 1 if options.tiny else options.rounds
    head = f"{'rows':>4} {'group':>5}  {'engine':<18} {'tokens/s':>9}"
    print(f"{head}  {'ratio (min-max)':<20} {'bound':>9} {'reached':>8}")
    results = []
    for work in batches:
        for r in measure(work, rounds, options.size, machine):
            spread = f"{r.ratio:.2f}x ({r.lowest:.2f}-{r.highest:.2f})"
            print(
                f"{r.rows:>4} {r.group:>5}  {r.engine:<18} {r.tokens_per_second:>9.0f}  {spread:<20} "
                f"{r.bound_tokens_per_second:>9.0f} {r.share_of_bound:>8.0%}",
                flush=True,
            )
            results.append(r)
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in results], indent=2) + "\n")
    judged = [r for r in results if r.engine == "posttrain native" and r.rows in targets]
    claims = [at_least(f"{r.engine} at {r.rows} rows, group {r.group},", r.ratio, targets[r.rows]) for r in judged]
    judge(claims, full=not options.tiny)


if __name__ == "__main__":
    main()
