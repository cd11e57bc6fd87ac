"""What people may expect of runs and channels: a reference model that knows nothing of how any of it is done.

A run trains, evaluates, is judged and released to its channel. Only one process drives; nothing fails but jobs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ATTEMPTS = 2  # of a job, until somebody retries
GRACE, BACKOFF = 30.0, 0.5  # seconds
JOBS = ("sft", "evaluate")
ENDED = ("succeeded", "rejected", "failed", "stopped")


class RefusedError(Exception):
    """The product must refuse, by an error of the class that is named."""


@dataclass
class Channel:
    """What a channel has had, and what holds for it."""

    history: list[tuple[str, str]] = field(default_factory=list)  # action and model
    quarantined: set[str] = field(default_factory=set)
    frozen: str = ""
    policy: str | None = None
    used: bool = False

    @property
    def live(self) -> str | None:
        return self.history[-1][1] if self.history else None

    asks: bool = False  # its policy names an approver

    def promote(self, model: str, judged: int, policy: str | None, lift: bool, said: str | None) -> None:
        """Move to a model whose gates passed when release `judged` was live; `said`: what its approver says of that."""
        if self.live == model:
            return
        if judged != len(self.history):
            raise RefusedError("ConflictError")
        if self.policy not in (None, policy):
            raise RefusedError("PolicyError")
        if self.frozen:
            raise RefusedError("ChannelClosedError")
        if model in self.quarantined and not lift:
            raise RefusedError("QuarantinedError")
        if self.asks and (said != "approved" or model in self.quarantined):  # bringing one back is asked for by itself
            raise RefusedError("ApprovalError")
        self.quarantined.discard(model)
        self.used = True
        self.history.append(("promote", model))

    def rollback(self) -> None:
        """Go back to the newest release that is not quarantined, which quarantines the current one."""
        live = self.live
        if live is None:
            raise RefusedError("NotFoundError")
        barred = {live, *self.quarantined}
        target = next((model for _, model in reversed(self.history) if model not in barred), None)
        if target is None:
            raise RefusedError("NotFoundError")
        if self.frozen == "all":
            raise RefusedError("ChannelClosedError")
        self.quarantined.add(live)
        self.history.append(("rollback", target))

    def change(self, **values: str | bool | None) -> None:
        """Freeze or unfreeze it, set or remove its policy; only a policy makes a channel."""
        if not self.used and not values.get("policy"):
            raise RefusedError("NotFoundError")
        self.used = True
        for name, value in values.items():
            setattr(self, name, value)


@dataclass
class Run:
    """One run. Where it has a job, that lives until `job` says how it ended."""

    model: str
    good: bool
    channel: Channel
    policy: str | None  # that it was planned under
    state: str = "pending"
    stopping: bool = False
    done: int = 0  # of its jobs
    tries: int = 0  # of the current one
    job: str | None = None  # `lives`, or how it ended
    made: dict[str, int] = field(default_factory=lambda: dict.fromkeys(JOBS, 0))  # attempts, all in all
    told: float | None = None  # when its job was told to stop
    not_before: float = 0.0
    judged: int | None = None  # the release that was live when its gates passed
    failing: bool = False
    said: str | None = None  # what its approver says of its release

    def stop(self) -> None:
        if self.state in ENDED:
            raise RefusedError("InputError")
        self.stopping = True

    def retry(self) -> None:
        if self.state not in ("stopped", "failed"):
            raise RefusedError("InputError")
        self.state, self.stopping, self.tries, self.told, self.not_before = "running", False, 0, None, 0.0

    def promote(self, lift: bool) -> None:
        self.channel.promote(self.model, self._passed(), self.policy, lift, self.said)

    def say(self, verdict: str) -> None:
        """Its channel's approver approves its release, or rejects it."""
        judged, channel = self._passed(), self.channel
        if channel.live == self.model:
            raise RefusedError("InputError")
        if judged != len(channel.history):
            raise RefusedError("ConflictError")
        if channel.policy not in (None, self.policy):
            raise RefusedError("PolicyError")
        if not channel.asks or self.model in channel.quarantined:
            raise RefusedError("InputError")
        self.said = verdict

    def _passed(self) -> int:
        """The release that was live when its gates passed."""
        if self.judged is None:
            raise RefusedError("GateRejectedError" if self.state == "rejected" else "InputError")
        return self.judged

    def drive(self, now: float) -> None:
        """As far as it gets at this moment."""
        if self.state in ENDED:
            return
        self.state = "stopping" if self.stopping else "running"
        if self.job is not None:
            self._job(now)
        while self.state in ("running", "stopping") and self.job is None:
            if self.stopping:
                self.state = "stopped"
            elif self.done == len(JOBS):
                self._judge()
                return
            elif now < self.not_before:
                return
            else:
                self.made[JOBS[self.done]] += 1
                self.job, self.tries, self.told = "lives", self.tries + 1, None

    def _job(self, now: float) -> None:
        over = self.told is not None and now >= self.told + GRACE
        if self.job == "lives" and not over:
            if self.stopping and self.told is None:
                self.told = now
            return
        how, self.job = self.job, None
        if how == "succeeds":
            self.done, self.tries = self.done + 1, 0
        elif how == "breaks":
            self.state = "failed"
        elif how == "vanishes" and not over:
            self.not_before = now + BACKOFF * 4 ** (self.tries - 1)
            self.state = "failed" if self.tries == ATTEMPTS else self.state

    def _judge(self) -> None:
        if not self.good:
            self.state = "rejected"
            return
        self.judged = len(self.channel.history) if self.judged is None else self.judged
        try:
            self.channel.promote(self.model, self.judged, self.policy, False, self.said)
            self.state = "succeeded"
        except RefusedError as refused:
            waits = str(refused) == "ApprovalError" and self.said is None
            self.state = self.state if waits else "rejected"
