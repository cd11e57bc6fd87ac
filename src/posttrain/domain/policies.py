"""A channel's policy: the requirements for every release to the channel, from any run. A person writes it as YAML::

    gates:
      - {name: accuracy, metric: heldout/accuracy, at_least: 0.9}
      - {name: no-regression, metric: heldout/accuracy, not_worse_than: channel, margin: 0.02, if_channel_empty: pass}
    suites:
      heldout: {data: dataset:heldout@1, evaluators: [sha256:…]}     # digests from `posttrain plan`, or any
    approvers: [user:ann, user:bob, user:cy]
    approvals: 2
    quarantine: {lift: reason}

The policy is stored as canonical JSON, with the digest of every suite's data; the channel's row contains the policy's
digest.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from posttrain.domain.canonical import digest_json, is_digest
from posttrain.domain.gates import CHANNEL, GateRule
from posttrain.domain.ids import FORM, is_principal
from posttrain.domain.runspec import read_yaml
from posttrain.domain.validation import Frozen, validated

MOST_APPROVERS = 100
Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
SuiteName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,62}$")]


def _evaluators(value: Any) -> Any:
    listed = isinstance(value, list | tuple) and len(value) > 0
    if value != "any" and not (listed and all(isinstance(one, str) and is_digest(one) for one in value)):
        raise ValueError(f"must be any, or digests (sha256:…) as `posttrain plan -v` shows them, got {value!r:.80}")
    return value


# the number of evaluations (looks) of the same items that share a gate's error rate; or corrected: the rate holds for
# any number of looks; or warn: each look is judged like the first, with a warning
LookBudget = Annotated[int, Field(ge=1, le=10_000)] | Literal["corrected", "warn"]


class SuitePolicy(Frozen):
    """A suite on which every release must be measured."""

    data: str  # a registered data set, dataset:NAME@VERSION; without a version, the newest
    digest: Digest | None = None  # digest of the data; filled in when the policy is set
    # digests of the allowed evaluators (code and settings), or any
    evaluators: Annotated[Literal["any"] | tuple[Digest, ...], BeforeValidator(_evaluators)]


class QuarantinePolicy(Frozen):
    """The requirement for lifting the quarantine of a model that was rolled back."""

    lift: Literal["reason", "approval", "never"] = "reason"  # with a reason, with an approval, or never


class ChannelPolicy(Frozen):
    """A channel's policy: the whole document."""

    policy: Literal[1] = 1  # the schema version of this document
    gates: tuple[GateRule, ...]  # at least one; every release must pass all
    suites: dict[SuiteName, SuitePolicy]  # suites on which every release must be measured
    approvers: tuple[str, ...] = Field(default=(), max_length=MOST_APPROVERS)  # user:NAME or service:NAME
    approvals: int | None = Field(default=None, ge=1)  # number required for every release; default with approvers: 1
    self_approval: bool | None = None  # whether the run's submitter or the requester may approve; default: false
    quarantine: QuarantinePolicy = QuarantinePolicy()  # the rule for models that were rolled back
    looks: LookBudget | None = None  # allowed evaluations of a suite's items; default: the project's rule

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.gates:
            raise ValueError("gates: must contain at least one gate, got none; add a gate, or remove the policy")
        names = [gate.name for gate in self.gates]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"gates: names must be unique, got {twice!r} twice; rename one")
        for gate in self.gates:
            if suite_of(gate.metric) not in self.suites:
                raise ValueError(
                    f"gates.{gate.name}.metric: must be SUITE/METRIC of a suite below `suites`, got {gate.metric!r}; "
                    "otherwise a run could measure the metric on its own data"
                )
            if gate.rival not in (None, CHANNEL):
                raise ValueError(
                    f"gates.{gate.name}: must compare with channel or with a number, got {gate.rival!r}, which means "
                    "a different model in every run file"
                )
        wrong = next((name for name in self.approvers if not is_principal(name)), None)
        if wrong is not None:
            raise ValueError(f"approvers: must be principals such as user:ann, got {wrong!a}; write {FORM}")
        twice = next((name for name in self.approvers if self.approvers.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"approvers: must be different principals, got {twice!a} twice; leave one out")
        self._approvable()
        return self

    def _approvable(self) -> None:
        asks = next((key for key in ("approvals", "self_approval") if getattr(self, key) is not None), None)
        if self.quarantine.lift == "approval":
            asks = "quarantine.lift: approval"
        if asks is not None and not self.approvers:
            raise ValueError(f"{asks}: needs approvers, got none; name the approvers, such as user:ann")
        if self.needed > len(self.approvers):
            few = f"approvals: must be at most {len(self.approvers)}, the number of approvers"
            raise ValueError(f"{few}, got {self.needed}; name more approvers")

    @property
    def needed(self) -> int:
        """The number of approvals that a release needs."""
        return (self.approvals or 1) if self.approvers else 0

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON without unset fields; `ChannelPolicy.model_validate` is its inverse."""
        return self.model_dump(mode="json", exclude_none=True)

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON."""
        return digest_json(self.to_json())


@dataclass(frozen=True, slots=True)
class PinnedPolicy:
    """A channel's policy with its digest."""

    channel: str
    digest: str  # in the channel's row
    policy: ChannelPolicy


def suite_of(metric: str) -> str:
    """Return the suite of a metric: `heldout` for `heldout/accuracy`."""
    return metric.rpartition("/")[0]


def load_policy(path: Path) -> ChannelPolicy:
    """Read and validate a policy file.

    Raises:
        InputError: there is no such file, it is not YAML, a key is unknown (the message suggests the most similar
            key), or a value is out of range.
    """
    return parse_policy(read_yaml(path), str(path))


def parse_policy(raw: Mapping[str, Any], source: str) -> ChannelPolicy:
    """Validate an already parsed policy, which errors call `source`."""
    return validated(ChannelPolicy, raw, source)
