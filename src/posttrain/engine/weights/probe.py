"""Attestation by a probe: an engine that cannot expose its tensors scores texts, and the policy scores the same texts.

A probe separates two versions only where their log-probabilities differ. An engine that decodes with the published
version v is at the share 0 of the way to an earlier version o, and a stale engine at the share 1::

    d = o − v      share = Σ (engine − v) d / Σ d²      error = the standard error of the share

The engine is attested if the share is below ½ by four errors, and refused if it is above ½ by four errors. The error is
estimated from what the share does not explain, at each place (HC3: MacKinnon and White, J. Econometrics 29, 1985) and
over all places: an engine that computes less exactly needs a larger difference.

The earlier versions are v−1 and the oldest version since the last decided verdict, because small steps add up. The
verdict is `undecided` if neither decides, and for the first version of an attempt. Then only two checks remain: the
digest of the tensors from which the engine takes its weights, and the engine's distance from v. The distance must be
small in every case.

A probe does not detect a single stale layer of many, because the answer is then nearer v. `rollout.contract` does.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from posttrain.domain.errors import IntegrityError, JobFailedError
from posttrain.engine.weights.stream import PolicyVersion

Attested = Literal["none", "undecided", "probe", "exact"]  # how a publication was attested, the weakest first
Challenge = tuple[tuple[int, ...], ...]  # texts
Values = npt.NDArray[np.float64]  # [places] log-probabilities of every token of the texts except the first of each
_TOKENS = 2048  # maximum of a challenge
_ROUNDING, _EPSILONS = 1e-3, 8  # nats, machine epsilons
_ERRORS = 4.0  # standard errors: one wrong refusal in 30,000 publications
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
    earlier: Sequence[tuple[PolicyVersion, Values]]  # under earlier versions; none: no verdict is "probe"
    rounding: float  # see `tolerance`

    def verdict(self, who: str, found: Values) -> Attested:
        """Return whether an engine's answer proves that it decodes with this version.

        Args:
            who: the engine and its rank, for errors.
            found: the engine's log-probabilities.

        Raises:
            IntegrityError: the answer is nearer an earlier version, or far from all.
            JobFailedError: the policy's log-probabilities are not finite.
        """
        if not np.isfinite(self.now).all():
            odd = self.now[~np.isfinite(self.now)][0]
            raise JobFailedError(
                f"policy version {self.version} must have finite log-probabilities, got {odd} in the probe of its "
                "weights; lower the learning rate"
            )
        decided = False
        for version, old in self.earlier:
            share, error = _share(found - self.now, old - self.now, self.rounding)
            if share - _ERRORS * error > 0.5:
                raise IntegrityError(
                    f"{who} must decode with policy version {self.version}, got log-probabilities nearer version "
                    f"{version}: {share:.0%} of the way to it, with a standard error of {error:.1%}; the engine did "
                    "not load the published weights: check its update, and resume from the last checkpoint"
                )
            decided = decided or share + _ERRORS * error < 0.5
        apart = float(np.sqrt(np.square(found - self.now).mean()))
        limit = max(self.rounding, _SHARE * float(self.now.std()))
        if apart > limit:
            raise IntegrityError(
                f"{who} must decode with policy version {self.version}, got log-probabilities {apart:.3g} nats from "
                f"it (root mean square over {len(found)} places, at most {limit:.3g}); the engine decodes with other "
                "weights: check how it loads them, and resume from the last checkpoint"
            )
        return "probe" if decided else "undecided"


def _share(away: Values, moved: Values, rounding: float) -> tuple[float, float]:
    """Return how far an answer is on the way to an earlier version, and the standard error of this share.

    The error is infinite if rounding explains the difference at the quarter of the places that differ most.

    Args:
        away: [places] engine − v.
        moved: [places] the earlier version − v.
    """
    square = np.square(moved)
    total = float(square.sum())
    if np.sort(np.abs(moved))[3 * len(moved) // 4 :].mean() <= rounding:
        return 0.0, np.inf
    share = float((away * moved).sum() / total)
    rest = away - share * moved
    own = np.square(rest / np.maximum(1 - square / total, 1e-6))
    variance = max(float((square * own).sum()) / total**2, float(np.square(rest).mean()) / total)
    return share, float(np.sqrt(variance))
