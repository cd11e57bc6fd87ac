"""Attestation by a probe: an engine that cannot expose its tensors scores texts, and the policy scores the same texts.

A probe separates two versions only where their log-probabilities differ. The verdict therefore reads the quarter of the
places at which the published version v and the version before it, v−1, differ most::

    near = Σ |engine − v|      far = Σ |engine − (v−1)|      moved = Σ |v − (v−1)|

If `near` is at least `far`, the engine still decodes with v−1. The versions are too close to decide if `moved`, per
place, does not exceed rounding or the engine's own error, which is the mean of |engine − v| over the half of the places
at which the versions differ least (a quantised copy has such an error at every place). Then, and for the first version
of an attempt, the verdict is `undecided`, and only two checks remain: the digest of the tensors from which the engine
takes its weights, and the engine's distance from v. The distance must be small in every case.

A probe does not detect a single stale layer of many, because the answer is then nearer v. `rollout.contract` does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from posttrain.domain.errors import IntegrityError
from posttrain.engine.weights.stream import PolicyVersion

Attested = Literal["none", "undecided", "probe", "exact"]  # how a publication was attested, the weakest first
Challenge = tuple[tuple[int, ...], ...]  # texts
Values = npt.NDArray[np.float64]  # [places] log-probabilities of every token of the texts except the first of each
_TOKENS = 2048  # maximum of a challenge
_ROUNDING, _EPSILONS = 1e-3, 8  # nats, machine epsilons
_SHARE = 0.25  # of the standard deviation of v's log-probabilities: 15/16 of their variance must be explained


def tolerance(epsilon: float) -> float:
    """Return the difference of log-probabilities, in nats, that rounding explains: 1e-3 in float32, 0.06 in bfloat16.

    Args:
        epsilon: the machine epsilon of the dtype in which the model computes.
    """
    return max(_ROUNDING, _EPSILONS * epsilon)


def challenge_of(prompts: Iterable[Sequence[int]]) -> Challenge:
    """Return the first prompts of a stage's data as texts, at most 2,048 tokens.

    Each prompt is followed by its own first token, so even a prompt of one token has a place. The text fits in the
    context, because a prompt fits with a response.
    """
    texts, left = list[tuple[int, ...]](), _TOKENS
    for prompt in prompts:
        if left < 2:
            break
        texts.append((*prompt, prompt[0])[:left])
        left -= len(texts[-1])
    return tuple(texts)


def weakest(found: Iterable[Attested]) -> Attested:
    """Return the weakest of several verdicts."""
    return min(found, key=("none", "undecided", "probe", "exact").index)


@final
@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """The policy's log-probabilities of a challenge, and those of the version before."""

    version: PolicyVersion
    now: Values  # under `version`
    before: tuple[PolicyVersion, Values] | None  # the version before it; None: unknown, so no verdict is "probe"
    rounding: float  # see `tolerance`

    def verdict(self, who: str, found: Values) -> Attested:
        """Return whether an engine's answer proves that it decodes with this version.

        Args:
            who: the engine and its rank, for errors.
            found: the engine's log-probabilities.

        Raises:
            IntegrityError: the answer is nearer the version before, or far from both.
        """
        away, decided = np.abs(found - self.now), False
        if self.before is not None:
            version, old = self.before
            moved = np.abs(self.now - old)
            order = np.argsort(moved, kind="stable")
            least, most = order[: len(order) // 2], order[3 * len(order) // 4 :]
            noise = float(away[least].mean()) if len(least) else 0.0
            decided = bool(moved[most].mean() > max(self.rounding, noise))
            near, far = float(away[most].sum()), float(np.abs(found - old)[most].sum())
            if decided and near >= far:
                raise IntegrityError(
                    f"{who} must decode with policy version {self.version}, got log-probabilities nearer version "
                    f"{version}: {near:.3g} nats from {self.version} and {far:.3g} from {version} at the {len(most)} "
                    "places where they differ most; the engine did not load the published weights: check its update, "
                    "and resume from the last checkpoint"
                )
        apart, limit = float(np.sqrt(np.square(away).mean())), max(self.rounding, _SHARE * float(self.now.std()))
        if apart > limit:
            raise IntegrityError(
                f"{who} must decode with policy version {self.version}, got log-probabilities {apart:.3g} nats from "
                f"it (root mean square over {len(away)} places, at most {limit:.3g}); the engine decodes with other "
                "weights: check how it loads them, and resume from the last checkpoint"
            )
        return "probe" if decided else "undecided"
