"""Approvals: a request names one action on a channel by its digest, and people approve or reject it.

The digest is of everything that the action would touch: a release is of this model of this run, with this gate report,
under this policy, while this release is live. When one of them is another, it is another request, and what was said of
the first counts nothing.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from posttrain.domain.canonical import digest_json
from posttrain.domain.ids import NOBODY, canonical

APPROVED, REJECTED = "approved", "rejected"
WITHDRAWN = "withdrawn"  # a rejection, by somebody who may not approve
_SHOWN = 19  # characters of a digest
_CHANGES = {  # what is bound, and what is said where it is another now
    "policy": "the policy is another now",
    "live": "another release is live now",
    "revision": "the policy or the protection of the channel was changed since",
}


class Action(StrEnum):
    """What can be asked for."""

    RELEASE = "release"
    LIFT = "release of a quarantined model"
    ROLLBACK = "rollback to a quarantined model"
    SET_POLICY = "set-policy"
    REMOVE_POLICY = "remove-policy"
    UNPROTECT = "unprotect"


@dataclass(frozen=True, slots=True)
class Terms:
    """Who must approve an action on a channel: the approvers of its policy, or those of the project."""

    approvers: tuple[str, ...]
    needed: int  # how many of them
    self_approval: bool = False  # whether whoever submitted or owns the run counts too; never on a protected channel
    roleless: tuple[str, ...] = ()  # approvers whom the project gave no role that lets them approve

    def others(self, actor: str) -> list[str]:
        """Approvers who are somebody else than `actor`."""
        able = set(self.approvers) - set(self.roleless)
        return sorted(name for name in able if canonical(name) != canonical(actor))


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """One action that needs approvals."""

    digest: str  # of `asked`
    channel: str
    run_id: str | None
    asked: Mapping[str, Any]  # everything that the action would touch
    actor: str  # whose it is: who submitted the run, or asked for the change
    at: float

    @property
    def action(self) -> str:
        """What would be done."""
        return str(self.asked["action"])

    @property
    def command(self) -> str:
        """What approves it: by run and channel where a run's model would be released, by its digest otherwise."""
        by_run = self.action == Action.RELEASE
        return f"posttrain approve {f'{self.run_id} --channel {self.channel}' if by_run else self.digest[:_SHOWN]}"

    @property
    def words(self) -> str:
        """`release of run sort-1`; of which channel is for whoever says it."""
        of = f" of run {self.run_id}" if self.run_id else ""
        policy = self.asked.get("set")
        return f"{self.action}{f' {policy[:_SHOWN]}…' if policy else ''}{of}"

    @property
    def anew(self) -> str:
        """What to do where nothing can be said of it any more."""
        return "submit the run again: posttrain run RUN.yaml --again" if self.run_id else "set another policy first"

    def outdated(self, channel: Mapping[str, Any]) -> str:
        """Why what was said of it counts nothing any more; empty: it counts.

        Args:
            channel: `policy`, `live` and `revision` of its channel now.
        """
        return next(
            (said for name, said in _CHANGES.items() if self.asked.get(name, channel[name]) != channel[name]), ""
        )


@dataclass(frozen=True, slots=True)
class Approval:
    """What one person says of a request; it may be said anew."""

    request: str
    actor: str
    verdict: str  # approved | rejected | withdrawn
    at: float
    reason: str = ""

    @property
    def words(self) -> str:
        """`approved by user:ann: the numbers hold`."""
        said = f"rejection {WITHDRAWN}" if self.verdict == WITHDRAWN else self.verdict
        return f"{said} by {self.actor}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a request stands."""

    request: ApprovalRequest
    needed: int
    given: tuple[Approval, ...] = ()  # that count
    refusal: Approval | None = None  # one is enough
    may: tuple[str, ...] = ()  # who may still approve
    void: tuple[tuple[Approval, str], ...] = ()  # that count nothing, and why
    outdated: str = ""  # why nothing that was said of it counts any more
    done: bool = False  # it is what the channel serves now
    ownerless: bool = False  # whose it is was erased, so nobody can tell who may approve it
    roleless: tuple[str, ...] = ()  # approvers of the policy who are not approvers of the project
    said: str = ""  # what somebody said of it just now: approved | rejected | withdrawn

    @property
    def missing(self) -> int:
        """How many more are needed."""
        return max(0, self.needed - len(self.given))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON."""
        request = self.request
        return {
            "request": request.digest,
            "action": request.action,
            "channel": request.channel,
            "run": request.run_id,
            "asked": dict(request.asked),
            "by": request.actor,
            "at": request.at,
            "needed": self.needed,
            "missing": self.missing,
            "approvals": [asdict(one) for one in self.given],
            "rejected": asdict(self.refusal) if self.refusal else None,
            "void": [{**asdict(one), "why": why} for one, why in self.void],
            "may_approve": list(self.may),
            "outdated": self.outdated,
        }

    @property
    def words(self) -> str:
        """`needs 2 approvals, has 1 (user:bob); user:carol may approve`."""
        if self.refusal is not None:
            return self.refusal.words
        has = f"{len(self.given)} ({', '.join(one.actor for one in self.given)})" if self.given else "none"
        counted = f"needs {self.needed} approval{'s' if self.needed > 1 else ''}, has {has}"
        if self.outdated:
            return f"{counted}, which count nothing: {self.outdated}"
        if self.ownerless:
            return f"{counted}; nobody may approve, since the name of its owner was erased; {self.request.anew}"
        if self.missing > len(self.may):
            few = "too few may approve who are not its owner: have the policy name more approvers"
            return f"{counted}; {few}{f', or give {one_of(self.roleless)} the role approver' if self.roleless else ''}"
        return f"{counted}; {one_of(self.may)} may approve" if self.missing else counted


def one_of(names: Sequence[str]) -> str:
    """`user:ann, user:bob or user:cy`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def request_of(
    action: Action, channel: str, actor: str, at: float, run_id: str | None = None, **bound: Any
) -> ApprovalRequest:
    """The request for an action.

    Args:
        actor: whose it is; not bound, so that two who ask for the same ask for one thing.
        bound: what it would touch, as plain JSON.
    """
    asked = {"action": str(action), "channel": channel, **({"run": run_id} if run_id else {}), **bound}
    return ApprovalRequest(digest_json(asked), channel, run_id, asked, actor, at)


def weigh(
    request: ApprovalRequest,
    terms: Terms,
    own: Collection[str],
    said: Sequence[Approval],
    outdated: str = "",
    done: bool = False,
) -> Standing:
    """Where a request stands.

    Args:
        terms: who must approve it.
        own: canonical names of those who may not approve, since the request is theirs. Once one of them is erased,
            nobody may: whoever acts under that name again is somebody else to the ledger.
        said: of this request, one of each person.
        outdated: why nothing of it counts any more.
        done: what was asked for is done.
    """
    approvers, roleless = terms.approvers, terms.roleless
    ownerless = any(name.startswith(NOBODY) for name in own)
    able = [name for name in approvers if not (ownerless or canonical(name) in own or name in roleless)]
    given = tuple(one for one in said if one.verdict == APPROVED and one.actor in able)
    refusal = next(  # by an approver, whoever that is by now
        (one for one in said if one.verdict == REJECTED and (one.actor in approvers or one.actor.startswith(NOBODY))),
        None,
    )
    spoken = {one.actor for one in given}
    void = tuple(
        (one, _void(one, own, roleless)) for one in said if one.verdict != REJECTED and one.actor not in spoken
    )
    may = tuple(name for name in able if name not in spoken)
    return Standing(request, terms.needed, given, refusal, may, void, outdated, done, ownerless, roleless)


def _void(said: Approval, own: Collection[str], roleless: Collection[str]) -> str:
    """Why it counts nothing."""
    if said.verdict == WITHDRAWN:
        return "it takes a rejection back"
    if canonical(said.actor) in own:
        return "it is its owner's"
    if any(name.startswith(NOBODY) for name in own):
        return "the name of its owner was erased"
    if said.actor in roleless:
        return f"{said.actor} is no approver of the project any more"
    return f"{said.actor} is no approver of the channel"
