"""Symptoms of a stage that does not train well, found in its recorded metrics and in its attempts.

`SYMPTOMS` has one entry for each symptom: metric, threshold, cause, remedy and rule. `posttrain why` and the report
show the findings of a stage, and docs/remedies.md is generated from the entries.

A rule reads only recorded values, so the same facts give the same findings on every machine. A rule about a curve
compares *windows*: consecutive steps, a tenth of the curve but at least five, whose mean is less noisy than a single
step. A curve with fewer than twenty steps has no findings.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from posttrain.domain.lifecycle import Reason, StopCause
from posttrain.domain.records import AttemptRecord
from posttrain.telemetry.tracker import Point

PAGE = "docs/remedies.md"  # has a section for each symptom
_LEAST, _WINDOW = 20, 5  # minimum number of steps of a curve, and of a window
_SPEEDS = 40  # minimum number of steps of a curve of times, which are noisier
_SLOW = 0.5  # share of the earlier throughput
_SHORTER = 0.8  # share of the earlier response length; shorter responses have a lower throughput without a fault
_FALL, _ERRORS = 0.5, 4.0  # standard deviations and standard errors by which a reward falls
_NARROW, _GAIN, _UNIFORM = 0.1, 0.25, 0.1  # share of the entropy; standard deviations; share of the deviation
_LONGER, _CUT, _MOST_CUT = 2.0, 0.25, 0.5  # factor of the response length; shares of responses
_IDLE = 0.75  # share of the steps
_APART, _EFFECTIVE = 2e-3, 0.5  # nats per token, above the rounding of bfloat16; share of tokens


class Window(NamedTuple):
    """Consecutive steps of a curve and the mean, or the median, of their values."""

    first: int
    last: int
    value: float

    def __str__(self) -> str:
        return f"{self.value:.3g} (steps {self.first} to {self.last})"


@dataclass(frozen=True, slots=True)
class StageFacts:
    """The recorded facts about one stage.

    Args:
        curves: metric → step → value.
        attempts: the stage's attempts, oldest first.
        params: the stage's parameters in the manifest.
    """

    curves: Mapping[str, Mapping[int, float]]
    attempts: Sequence[AttemptRecord] = ()
    params: Mapping[str, Any] = field(default_factory=dict)

    def points(self, metric: str, least: int = _LEAST) -> list[Point]:
        """Return the finite values by step; an empty list if there are fewer than `least`."""
        curve = sorted(self.curves.get(metric, {}).items())
        found = [Point(step, value) for step, value in curve if math.isfinite(value)]
        return found if len(found) >= least else []

    def ends(self, metric: str) -> tuple[Window, Window] | None:
        """Return the first and the last window of a curve; None if the curve is too short."""
        points = self.points(metric)
        size = _size(points)
        return (_window(points[:size]), _window(points[-size:])) if points else None


@dataclass(frozen=True, slots=True)
class Symptom:
    """One entry of the registry. The texts are Markdown without line breaks; `rule` returns the evidence, or ""."""

    name: str  # also the anchor of its section on the page
    metric: str
    threshold: str
    cause: str
    remedy: str
    rule: Callable[[StageFacts], str]

    @property
    def title(self) -> str:
        """The name as words."""
        return self.name.replace("-", " ").capitalize()


@dataclass(frozen=True, slots=True)
class Finding:
    """A symptom of a stage, with the numbers that exceeded the threshold."""

    stage: str
    symptom: str  # name in the registry
    evidence: str
    cause: str
    remedy: str
    page: str  # page and anchor


def findings(stage: str, facts: StageFacts) -> Iterator[Finding]:
    """Yield the symptoms of a stage, in the order of the registry."""
    for one in SYMPTOMS:
        if evidence := one.rule(facts):
            yield Finding(stage, one.name, evidence, one.cause, one.remedy, f"{PAGE}#{one.name}")


# --- rules ------------------------------------------------------------------------------------------------------------


def _out_of_memory(facts: StageFacts) -> str:
    return _ended(facts, Reason.JOB_FAILED_OUT_OF_MEMORY, StopCause.OUT_OF_MEMORY)


def _stalled(facts: StageFacts) -> str:
    return _ended(facts, Reason.STALLED, StopCause.STALLED)


def _ended(facts: StageFacts, reason: Reason, cause: StopCause) -> str:
    found = [one for one in facts.attempts if one.reason == reason or one.stop_cause == cause]
    return "; ".join(f"attempt {one.number}: {' '.join(one.message.split()) or reason.meaning}" for one in found)


def _throughput(facts: StageFacts) -> str:
    points = facts.points("tokens_per_second", _SPEEDS)
    size = len(points) // 4
    if not points:
        return ""
    before, now = (_window(part, statistics.median) for part in (points[:-size], points[-size:]))
    lengths = facts.ends("response_tokens/mean")
    if now.value >= _SLOW * before.value or (lengths and lengths[1].value < _SHORTER * lengths[0].value):
        return ""
    return f"tokens_per_second fell from {before} to {now}; threshold: {_SLOW:.0%} of the earlier median"


def _no_signal(facts: StageFacts) -> str:
    updates, means, spreads = facts.points("updates"), facts.ends("reward/mean"), facts.ends("reward/std")
    idle = sum(point.value == 0 for point in updates)
    if not (updates and means and spreads) or idle < _IDLE * len(updates):
        return ""
    gain = means[1].value - means[0].value
    if gain > 0 and gain >= _GAIN * spreads[0].value:  # the policy has learnt the task, so its rewards became equal
        return ""
    evidence = f"{idle} of {len(updates)} steps made no update; threshold: {_IDLE:.0%} of the steps"
    return f"{evidence}; reward/mean went from {means[0]} to {means[1]}"


def _reward_collapse(facts: StageFacts) -> str:
    means, spreads = facts.points("reward/mean"), facts.curves.get("reward/std", {})
    if not means:
        return ""
    size = _size(means)
    windows = [means[at : at + size] for at in range(len(means) % size, len(means), size)]
    best, last = max(windows, key=lambda window: _window(window).value), windows[-1]
    spread = statistics.fmean([spreads.get(point.step, math.inf) for point in best])
    errors = facts.curves.get("reward/stderr", spreads)  # without errors, the larger deviation of single samples
    noise = math.hypot(*(errors.get(point.step, math.inf) for point in (*best, *last))) / size
    high, low = _window(best), _window(last)
    limit = max(_FALL * spread, _ERRORS * noise)
    if high.value - low.value <= limit:
        return ""
    return f"reward/mean fell from {high} to {low}; threshold: a fall by {limit:.3g}"


def _entropy_collapse(facts: StageFacts) -> str:
    entropy, means, spreads = facts.ends("entropy"), facts.ends("reward/mean"), facts.ends("reward/std")
    if not (entropy and means and spreads) or entropy[1].value >= _NARROW * entropy[0].value:
        return ""
    gain, uniform = means[1].value - means[0].value, spreads[1].value <= _UNIFORM * spreads[0].value
    if gain >= _GAIN * spreads[0].value or (gain > 0 and uniform):  # the policy has learnt what the reward asks for
        return ""
    fell = f"entropy fell from {entropy[0]} to {entropy[1]}; threshold: {_NARROW:.0%} of the first window"
    return f"{fell}; reward/mean went from {means[0]} to {means[1]}"


def _length_explosion(facts: StageFacts) -> str:
    lengths, cut = facts.ends("response_tokens/mean"), facts.ends("truncated")
    if not (lengths and cut):
        return ""
    longer = lengths[1].value >= _LONGER * lengths[0].value  # impossible if the first responses are near the limit
    limit = _CUT if longer else _MOST_CUT
    if cut[1].value - cut[0].value < limit:
        return ""
    grew = f"response_tokens/mean grew from {lengths[0]} to {lengths[1]}"
    shares = f"the truncated share of the responses from {cut[0].value:.0%} to {cut[1].value:.0%}"
    return f"{grew}, and {shares}; threshold: {100 * limit:g} percentage points"


def _mismatch(facts: StageFacts) -> str:
    if (facts.params.get("lag") or {}).get("steps"):  # the KL also contains the lag
        share = facts.ends("lag/ess")
        low = share and share[1].value < _EFFECTIVE
        return f"lag/ess is {share[1]}; threshold: {_EFFECTIVE:.0%} of the tokens" if share and low else ""
    name = next((one for one in ("lag/kl", "mismatch_kl/first") if facts.points(one, _WINDOW)), "mismatch_kl")
    points = facts.points(name, _WINDOW)
    if name == "mismatch_kl" and any(point.value > 1 for point in facts.points("updates", 1)):
        return ""  # an older version's mean over several updates, which also contains the changes of the weights
    found = _window(points[-_size(points) :], statistics.median) if points else None
    over = found and found.value > _APART
    return f"{name} is {found}; threshold: {_APART:g} nats per token" if over else ""


def _size(points: Sequence[Point]) -> int:
    return max(_WINDOW, len(points) // 10)


def _window(points: Sequence[Point], of: Callable[[Iterable[float]], float] = statistics.fmean) -> Window:
    return Window(points[0].step, points[-1].step, of([point.value for point in points]))


# --- registry ---------------------------------------------------------------------------------------------------------

SYMPTOMS = (
    Symptom(
        "out-of-memory",
        "the reason of an attempt: `JobFailed:out_of_memory`",
        "one attempt",
        "The job, or a process that scores rewards, requested more memory than its device or its memory limit has.",
        "Lower `runtime.micro_batch_tokens`, `batch_size`, `prompts_per_step` or `max_new_tokens`, or set "
        "`runtime.activation_checkpointing: true`. On a GPU, a lower `runtime.kv_cache` also frees memory. "
        "With -v, `posttrain plan` shows the memory of each phase.",
        _out_of_memory,
    ),
    Symptom(
        "stalled-step",
        "the reason of an attempt: `Stalled`",
        "no progress for `runtime.stall_after`",
        "A call of the step does not return (a reward, for example, waits for a service), or the step takes longer "
        "than `runtime.stall_after`.",
        "`posttrain logs RUN` shows where the job hangs. Lower `reward_timeout`, so that a reward that hangs "
        "ends with an error. If every step takes this long, raise `runtime.stall_after`.",
        _stalled,
    ),
    Symptom(
        "throughput-drop",
        "`tokens_per_second`",
        f"the median over the last quarter of at least {_SPEEDS} steps is below {_SLOW:.0%} of the median over the "
        f"earlier steps, and the responses have at least {_SHORTER:.0%} of their first length",
        "A part of the step takes longer: a slow reward, or responses that are preempted and computed again. Or other "
        "processes use the machine.",
        "`posttrain trace RUN` shows the part. Give a slow reward more processes (`placement`, role `reward`) or a "
        "lower `reward_timeout`; raise `runtime.kv_cache` if the metric `rollout/preemptions` grows; end the other "
        "processes.",
        _throughput,
    ),
    Symptom(
        "no-signal",
        "`updates` and `reward/mean`",
        f"{_IDLE:.0%} of the steps make no update, while the mean reward gains less than {_GAIN:g} standard deviations "
        "of the samples",
        "In most steps, all samples of each prompt have the same reward, so there is no gradient: the prompts are too "
        "hard or too easy for the policy, or the reward has too few different values.",
        "Train longer with `sft` first, or choose prompts that the policy solves sometimes. Raise `group_size` or "
        "`temperature`, give partial credit in the reward, or use the kind `dapo`, which replaces such groups.",
        _no_signal,
    ),
    Symptom(
        "reward-collapse",
        "`reward/mean`",
        f"the last window is below the best window by more than {_FALL:g} standard deviations of the samples "
        f"(`reward/std`) and {_ERRORS:g} standard errors of the difference (`reward/stderr`)",
        "The updates are so large that they destroyed the policy, or the policy moved too far from its starting model.",
        "Lower `optimizer.learning_rate` or `optimizer.max_grad_norm`, or set `kl` (a penalty for the distance from "
        "the starting model). `probe` with `keep_best: true` stores the best model.",
        _reward_collapse,
    ),
    Symptom(
        "entropy-collapse",
        "`entropy` and `reward/mean`",
        f"the last window of the entropy is below {_NARROW:.0%} of the first, while the mean reward gains less than "
        f"{_GAIN:g} standard deviations of the samples (a gain until all rewards are equal is not a collapse)",
        "The policy gives almost the same response to a prompt each time, so groups have no signal and the reward "
        "stops rising.",
        "Lower `optimizer.learning_rate`; raise `clip_high`, `temperature` or `group_size`; or set `kl`.",
        _entropy_collapse,
    ),
    Symptom(
        "length-explosion",
        "`response_tokens/mean` and `truncated`",
        f"from the first to the last window, the share of truncated responses grows by at least {100 * _MOST_CUT:g} "
        f"percentage points, or by at least {100 * _CUT:g} if the length grows to at least {_LONGER:g} times its value",
        "The reward prefers long responses, or the policy no longer ends its responses.",
        "Correct the reward so that length alone earns nothing, use the kind `dapo` with `overlong` (a penalty for "
        "long responses), or set `kl`. Raise `max_new_tokens` only if correct responses need more tokens.",
        _length_explosion,
    ),
    Symptom(
        "train-inference-mismatch",
        "`mismatch_kl/first`; with one update per step `mismatch_kl`; with `lag: {steps: 0}` `lag/kl`; with more steps "
        "of lag `lag/ess`",
        f"the median of the last window of a KL is above {_APART:g} nats per token; the last window of `lag/ess` is "
        f"below {_EFFECTIVE:.0%} of the tokens",
        "With the same weights, the rollout computes log-probabilities that differ from those of the training (dtype, "
        "kernels, sampling settings). Or the sampling policy is too many steps behind.",
        "Set `runtime.dtype: float32`, or correct the difference with `lag: {steps: 0, correction: tis}`. With a lag, "
        "lower `lag.steps` or `optimizer.learning_rate`. Report a model for which float32 does not help.",
        _mismatch,
    ),
)
