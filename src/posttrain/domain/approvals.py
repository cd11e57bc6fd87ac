"""Approvals: a request identifies one action on a channel by a digest, and people approve or reject the action.

The digest covers everything on which the action depends. For a release these are the model, its run, the gate report,
the policy and the live release. If any of these values differs, the request is a different one, and verdicts on
the first request do not count.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from posttrain.domain.canonical import digest_json
from posttrain.domain.ids import NOBODY, canonical

APPROVED, REJECTED = "approved", "rejected"
WITHDRAWN = "withdrawn"  # the verdict of a person who withdraws a rejection and may not approve
_SHOWN = 19  # characters of a digest
_CHANGES = {  # bound value → message if it has changed
    "policy": "the policy has changed",
    "live": "another release is live now",
    "revision": "the policy or the protection of the channel has changed since then",
}


class Action(StrEnum):
    """The actions that can need approval."""

    RELEASE = "release"
    LIFT = "release of a quarantined model"
    ROLLBACK = "rollback to a quarantined model"
    SET_POLICY = "set-policy"
    REMOVE_POLICY = "remove-policy"
    UNPROTECT = "unprotect"


@dataclass(frozen=True, slots=True)
class Terms:
    """Who must approve an action on a channel: the approvers of the channel's policy, or of the project."""

    approvers: tuple[str, ...]
    needed: int  # how many of the approvers must approve
    self_approval: bool = False  # whether the run's submitter or owner may approve; never on a protected channel
    roleless: tuple[str, ...] = ()  # approvers without a project role that allows approving

    def others(self, actor: str) -> list[str]:
        """Return the approvers other than `actor`."""
        able = set(self.approvers) - set(self.roleless)
        return sorted(name for name in able if canonical(name) != canonical(actor))


@dataclass(frozen=True, slots=True)
class ApprovalRequest:
    """One action that needs approvals."""

    digest: str  # the digest of `asked`
    channel: str
    run_id: str | None
    asked: Mapping[str, Any]  # the action, and the values on which it depends
    actor: str  # its owner: the submitter of the run, or the requester of the change
    at: float

    @property
    def action(self) -> str:
        """The requested action."""
        return str(self.asked["action"])

    @property
    def command(self) -> str:
        """The approving command: by run and channel for a release of a run's model, else by digest."""
        by_run = self.action == Action.RELEASE
        return f"posttrain approve {f'{self.run_id} --channel {self.channel}' if by_run else self.digest[:_SHOWN]}"

    @property
    def words(self) -> str:
        """The action in one human-readable phrase, such as `release of run sort-1`, without the channel."""
        of = f" of run {self.run_id}" if self.run_id else ""
        policy = self.asked.get("set")
        return f"{self.action}{f' {policy[:_SHOWN]}…' if policy else ''}{of}"

    @property
    def anew(self) -> str:
        """The next action if the request can no longer be approved."""
        return "submit the run again: posttrain run RUN.yaml --again" if self.run_id else "set another policy first"

    def outdated(self, channel: Mapping[str, Any]) -> str:
        """Return why the verdicts on the request no longer count; empty: they count.

        Args:
            channel: the current `policy`, `live` and `revision` of the request's channel.
        """
        return next(
            (said for name, said in _CHANGES.items() if self.asked.get(name, channel[name]) != channel[name]), ""
        )


@dataclass(frozen=True, slots=True)
class Approval:
    """The verdict of one person on a request; a later verdict of that person replaces the earlier one."""

    request: str
    actor: str
    verdict: str  # approved | rejected | withdrawn
    at: float
    reason: str = ""

    @property
    def words(self) -> str:
        """The verdict as text: `approved by user:ann: the numbers hold`."""
        said = f"rejection {WITHDRAWN}" if self.verdict == WITHDRAWN else self.verdict
        return f"{said} by {self.actor}{f': {self.reason}' if self.reason else ''}"


@dataclass(frozen=True, slots=True)
class ApprovalStatus:
    """The status of a request."""

    request: ApprovalRequest
    needed: int
    given: tuple[Approval, ...] = ()  # the approvals that count
    refusal: Approval | None = None  # a rejection, if any: one is enough
    may: tuple[str, ...] = ()  # the principals who may still approve
    void: tuple[tuple[Approval, str], ...] = ()  # approvals that do not count, and why
    outdated: str = ""  # why the verdicts no longer count
    done: bool = False  # whether the action was carried out
    ownerless: bool = False  # the owner's name was erased, so it is undetermined who may approve
    roleless: tuple[str, ...] = ()  # approvers of the policy who are not approvers of the project
    said: str = ""  # the verdict that this call recorded: approved | rejected | withdrawn

    @property
    def missing(self) -> int:
        """The number of approvals still needed."""
        return max(0, self.needed - len(self.given))

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
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
        """The status as text: `needs 2 approvals, has 1 (user:bob); user:carol may approve`."""
        if self.refusal is not None:
            return self.refusal.words
        has = f"{len(self.given)} ({', '.join(one.actor for one in self.given)})" if self.given else "none"
        counted = f"needs {self.needed} approval{'s' if self.needed > 1 else ''}, has {has}"
        if self.outdated:
            return f"{counted}, which do not count: {self.outdated}"
        if self.ownerless:
            erased = "no one may approve, since the name of the request's owner was erased"
            return f"{counted}; {erased}; {self.request.anew}"
        if self.missing > len(self.may):
            few = "too few users other than the request's owner may approve: name more approvers in the policy"
            return f"{counted}; {few}{f', or give {one_of(self.roleless)} the role approver' if self.roleless else ''}"
        return f"{counted}; {one_of(self.may)} may approve" if self.missing else counted


def one_of(names: Sequence[str]) -> str:
    """Return `user:ann, user:bob or user:cy`."""
    return " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def request_of(
    action: Action, channel: str, actor: str, at: float, run_id: str | None = None, **bound: Any
) -> ApprovalRequest:
    """Return the request for an action.

    Args:
        actor: the owner; not part of the digest, so equal requests of two people are one request.
        bound: the values that the action depends on, as plain JSON.
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
) -> ApprovalStatus:
    """Return the status of a request.

    Args:
        terms: who must approve the request.
        own: canonical names of the request's owners, who may not approve. Once an owner's name is erased, no one may
            approve: a later person with that name has another identity in the ledger.
        said: verdicts on this request, one per person.
        outdated: why the verdicts no longer count.
        done: whether the requested action was carried out.
    """
    approvers, roleless = terms.approvers, terms.roleless
    ownerless = any(name.startswith(NOBODY) for name in own)
    able = [name for name in approvers if not (ownerless or canonical(name) in own or name in roleless)]
    given = tuple(one for one in said if one.verdict == APPROVED and one.actor in able)
    refusal = next(  # a rejection by an approver, or by a person whose name has been erased since
        (one for one in said if one.verdict == REJECTED and (one.actor in approvers or one.actor.startswith(NOBODY))),
        None,
    )
    spoken = {one.actor for one in given}
    void = tuple(
        (one, _void(one, own, roleless)) for one in said if one.verdict != REJECTED and one.actor not in spoken
    )
    may = tuple(name for name in able if name not in spoken)
    return ApprovalStatus(request, terms.needed, given, refusal, may, void, outdated, done, ownerless, roleless)


def _void(said: Approval, own: Collection[str], roleless: Collection[str]) -> str:
    """Return why an approval does not count."""
    if said.verdict == WITHDRAWN:
        return "it withdraws a rejection"
    if canonical(said.actor) in own:
        return "it is by the owner of the request"
    if any(name.startswith(NOBODY) for name in own):
        return "the name of the request's owner was erased"
    if said.actor in roleless:
        return f"{said.actor} is no longer an approver of the project"
    return f"{said.actor} is not an approver of the channel"
