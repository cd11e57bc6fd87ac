"""Looks: how the number of evaluations of the same items changes the level of a gate.

Every evaluation of a set of items is a look, whatever started it and whatever its settings are. Of many models that all
miss a threshold, the chance that one passes grows with their number, although each gate holds its own level. So the
k-th look is judged at the error rate alpha / (k (k + 1)), whose sum over all k is alpha; where a policy declares
`looks: n`, at alpha / n (Bonferroni), and the look after the n-th is not judged.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.domain.gates import GateRule, Outcome, Verdict
from posttrain.domain.policies import LookBudget


@dataclass(frozen=True, slots=True)
class Look:
    """The evaluation that a gate judges, among those of its items."""

    number: int  # 1: the first
    budget: LookBudget  # as `ChannelPolicy.looks`

    @property
    def spent(self) -> bool:
        """Whether the policy allows fewer looks than this one."""
        return isinstance(self.budget, int) and self.number > self.budget

    @property
    def words(self) -> str:
        """`look 3 at these items`."""
        return f"look {self.number} at these items"

    def rule(self, rule: GateRule) -> GateRule:
        """The rule with the confidence at which this look is judged."""
        if self.budget == "warn":
            return rule
        shares = self.budget if isinstance(self.budget, int) else self.number * (self.number + 1)
        return rule.model_copy(update={"confidence": 1 - (1 - rule.confidence) / shares})

    def verdict(self, rule: GateRule, judged: Verdict) -> Verdict:
        """The verdict of `self.rule(rule)` with the look in it. A look beyond the policy's budget is an ERROR."""
        update: dict[str, object] = {"look": self.number}
        if self.spent:
            reason = f"{self.words}, of {self.budget} that the channel's policy allows; judge on items that are new."
            update |= {"outcome": Outcome.ERROR, "reason": reason}
        elif judged.limit is None:  # nothing was tested
            pass
        elif judged.confidence != rule.confidence:
            update |= {"asked": rule.confidence, "reason": f"{judged.reason[:-1]} ({self.words})."}
        elif self.budget == "warn" and self.number > 1:
            update["reason"] = f"{judged.reason[:-1]} ({self.words}, judged as if it were the first)."
        return judged.model_copy(update=update)

    def inflated(self, confidence: float) -> float:
        """The chance that one of so many models on the threshold passes, if each is judged at this confidence alone."""
        return 1 - confidence**self.number
