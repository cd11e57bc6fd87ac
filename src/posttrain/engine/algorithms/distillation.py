"""How far a student is from a teacher, over the teacher's likeliest tokens; and the loss of it.

At every response token the vocabulary is cut into k + 1 outcomes: the teacher's k likeliest tokens, and all others
together, the tail. Both models are proper distributions over these, so a divergence is never negative and 0 only where
they agree; and by the data processing inequality it is at most that over the whole vocabulary. Source: generalised
knowledge distillation, Agarwal et al., arXiv 2306.13649, section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from posttrain.engine.algorithms.losses import kl_penalty
from posttrain.engine.algorithms.objectives import LossParts, Totals, old_logprobs, token_weights
from posttrain.engine.batch import CANDIDATES, Need, Predictions, TokenBatch
from posttrain.engine.precision import precision

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")


def with_tail(logprobs: Tensor) -> Tensor:
    """[R, k] log-probabilities of some tokens → [R, k + 1], the last of all other tokens together.

    The tail is at least the type's rounding of 1: below it 1 - Σ p is noise, without a gradient.
    """
    rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp(min=torch.finfo(logprobs.dtype).eps)
    return torch.cat([logprobs, rest.log()], -1)


def divergence(teacher: Tensor, student: Tensor, kind: str, beta: float = 0.5) -> Tensor:
    """[R, K] and [R, K] log-probabilities → [R] nats, differentiable by the student.

    ::

        forward_kl  KL(teacher ‖ student)       covers what the teacher may say
        reverse_kl  KL(student ‖ teacher)       keeps to what the teacher says most
        jsd         β KL(teacher ‖ M) + (1 - β) KL(student ‖ M),  M = β teacher + (1 - β) student

    Args:
        beta: of jsd, above 0 and below 1.

    Raises:
        ValueError: another kind.
    """
    if kind == "forward_kl":
        return _kl(teacher, student)
    if kind == "reverse_kl":
        return _kl(student, teacher)
    if kind == "jsd":
        share = teacher.new_tensor(beta)
        mixed = torch.logaddexp(teacher + share.log(), student + (1 - share).log())
        return beta * _kl(teacher, mixed) + (1 - beta) * _kl(student, mixed)
    raise ValueError(f"divergence must be one of {', '.join(DIVERGENCES)}, got {kind!r}")


def _kl(left: Tensor, right: Tensor) -> Tensor:
    return (left.exp() * (left - right)).sum(-1)


@final
@dataclass(frozen=True, slots=True)
class DistillationObjective:
    """The divergence from the teacher, token mean over the step.

    It reports `teacher_mass` and `student_mass`, what either gives to the teacher's k likeliest tokens together, and
    `agreement`: the share of tokens where the teacher's likeliest is the student's likeliest of these.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs", "candidates"})
    totals: Totals
    divergence: str
    beta: float = 0.5

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        """See `Objective`."""
        mask, student = micro.response_mask, predicted.of("candidates")
        teacher = micro.wide(CANDIDATES).logprobs.to(student.dtype)
        each = divergence(with_tail(teacher), with_tail(student), self.divergence, self.beta)
        weights = token_weights(micro, self.totals, "token-mean", dtype=precision(each))[mask]
        logprobs, count = predicted.of("logprobs").detach(), max(self.totals.computed, 1)
        now = student.detach()
        sums = {
            "agreement": (now.argmax(-1) == 0).sum() / count,
            "teacher_mass": teacher.exp().sum() / count,
            "student_mass": now.exp().sum() / count,
            "mismatch_kl": kl_penalty(old_logprobs(micro), logprobs, mask, "k3").sum() / count,
        }
        return LossParts((weights * each).sum(), sums)
