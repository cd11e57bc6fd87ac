"""`Control`, the verbs that the command line and the Python API ask of Posttrain, in process or of a server.

Arguments are words, numbers and files of this machine; answers are values (`api.values`, `domain`). Callers cannot see
whether there is a ledger. Each verb is declared here, and nowhere else.

The verbs of `Sinks` set where events go, show how each sink stands, and carry out what a person does about it.
`Watcher` and `Vigil` are what `Control` gives to a caller that looks at a run again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from posttrain.api.assets import Access, Assets, Models
from posttrain.api.verbs import Verb, Verbs, numbers, verb, verbs_of
from posttrain.domain.ids import Name, Role, RunId, SampleId, StageName, Tag, Word

if TYPE_CHECKING:
    from posttrain.api.values import (
        ChannelView,
        Collected,
        ComparePage,
        Comparison,
        Dead,
        Downstream,
        Erasure,
        Locked,
        LogFile,
        Move,
        Node,
        PlanView,
        RecordedSample,
        RunDiff,
        RunDriver,
        RunReport,
        RunStatus,
        RunSummary,
        Scores,
        Submitted,
        TrackerState,
        VerifyReport,
        Why,
        Written,
        WrittenTrace,
    )
    from posttrain.domain.approvals import Standing
    from posttrain.domain.manifest import Manifest
    from posttrain.domain.overrides import Setting
    from posttrain.domain.policies import PinnedPolicy
    from posttrain.domain.records import (
        AttemptRecord,
        ChannelRecord,
        Event,
        ReleaseEntry,
        RunNote,
        RunRecord,
        Signal,
    )
    from posttrain.domain.sinks import SinkView


class Sinks(Verbs):
    """Telling the outside of events."""

    @verb("GET /sinks", Role.VIEWER, "app.sinks", command="sink ls", key=lambda one: (one.name,))
    def sinks(self) -> list[SinkView]:
        """Every sink, and how far it is."""

    @verb("POST /sinks", Role.ADMIN, "app.sinks", heavy=True, command="sink add")
    def add_sink(
        self, name: Name, kind: str, settings: Mapping[str, Any], rule: Mapping[str, Any], *, from_start: bool = False
    ) -> SinkView:
        """Tell a place of events from now on.

        Args:
            kind: webhook | jsonl | email.
            settings: where it is, and the names of what holds its secrets; see its back-end.
            rule: of which events; see `domain.sinks.Rule`.
            from_start: of every event that the log has, too.

        Raises:
            InputError: settings or a rule that mean nothing. ConflictError: there is a sink of this name.
        """

    @verb("POST /sinks/{name}/test", Role.ADMIN, "app.sinks", heavy=True, command="sink test")
    def test_sink(self, name: Name) -> str:
        """Send it a message that is marked as a test; where it went.

        Raises:
            SinkError: it did not take it.
        """

    @verb("POST /sinks/{name}/pause", Role.ADMIN, "app.sinks", command="sink pause")
    def pause_sink(self, name: Name) -> SinkView:
        """Tell it of nothing until `resume_sink`; what happens meanwhile waits."""

    @verb("POST /sinks/{name}/resume", Role.ADMIN, "app.sinks", heavy=True, command="sink resume")
    def resume_sink(self, name: Name, *, skip: bool = False) -> SinkView:
        """Deliver again, and at once, also where a back-off would wait.

        Args:
            skip: leave out what it was not told of so far.
        """

    @verb("DELETE /sinks/{name}", Role.ADMIN, "app.sinks", command="sink remove", seals=True)
    def remove_sink(self, name: Name) -> None:
        """Forget it."""


class Submissions(Verbs):
    """From a run file to a run, and what is told to a run."""

    @verb("POST /plans", Role.VIEWER, "app.runs:view_plan", heavy=True, run_file=True)
    def plan(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> PlanView:
        """What submitting a run file would do. Writes nothing.

        Raises:
            InputError: naming file, field, constraint and value.
        """

    @verb("POST /locks", Role.VIEWER, "app.runs", heavy=True, run_file=True)
    def lock(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Locked:
        """The manifest of a run file. Raises as `plan`."""

    @verb("POST /runs", Role.SUBMITTER, "app.runs", heavy=True, command="run", run_file=True)
    def submit(
        self,
        path: Path,
        *,
        again: bool = False,
        seed: int | None = None,
        setting: Setting = (),
        note: str = "",
        tags: Sequence[Tag] = (),
    ) -> Submitted:
        """Record a run of a run file or a locked manifest; one that was submitted before attaches to its run.

        Args:
            note, tags: are written down of the run, as `note` does; what no run can be given is refused first.
        """

    @verb(
        "POST /evaluations",
        Role.SUBMITTER,
        "app.models:submit_evaluation",
        heavy=True,
        command="eval",
        along={"model": "model", "suites": "dataset", "reward": "reward"},
    )
    def evaluate(
        self,
        model: Word,
        suites: Sequence[Word],
        *,
        settings: Mapping[str, Any],
        runtime: Mapping[str, Any],
        reward: Mapping[str, Any] | None,
        seed: int,
        again: bool,
    ) -> Submitted:
        """Record a run of one evaluate stage."""

    @verb("", Role.SUBMITTER, "app.driver", command="attach")
    def drive(
        self,
        run_id: RunId,
        *,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
        report: bool = False,
    ) -> RunRecord:
        """Drive a run until it ends, or wait while somebody else does.

        Args:
            timeout: seconds; None: as long as it takes.
            watch: called about ten times a second.
            report: `write_report` will be asked for when it has ended.

        Raises:
            DeadlineError: `timeout` passed; the run is not stopped by that.
        """

    @verb("POST /runs/{run_id}/detach", Role.SUBMITTER, "drivers.detaching", command="run --detach")
    def detach(self, run_id: RunId) -> RunDriver:
        """Have somebody else drive the run to its end; returns as soon as they have it.

        Raises:
            InputError: the run has ended.
            WorkspaceError: the workspace cannot be written.
            InfrastructureError: no driver could be started; nothing is left of it.
        """

    @verb("POST /runs/{run_id}/signals", Role.SUBMITTER, "control.actions:send_signal")
    def signal(self, run_id: RunId, name: Name, reason: str = "") -> tuple[Signal, bool]:
        """Let a run go on where it waits for this signal; and whether it was sent for the first time."""

    @verb("POST /runs/{run_id}/notes", Role.SUBMITTER, "control.actions")
    def note(self, run_id: RunId, text: str = "", tags: Sequence[Tag] = (), untag: Sequence[Tag] = ()) -> list[RunNote]:
        """Write a text down of a run, give it tags and take tags off it; its tags, and its newest text.

        Raises:
            InputError: nothing to write down, too long a text, too many, a tag that is given and taken, none to take
                off.
        """

    @verb("POST /runs/{run_id}/stop", Role.SUBMITTER, "control.actions")
    def stop(self, run_id: RunId) -> RunRecord:
        """Ask it to stop; whoever drives it carries that out."""

    @verb("POST /runs/{run_id}/retry", Role.SUBMITTER, "app.runs")
    def retry(self, run_id: RunId) -> RunRecord:
        """Let a stopped or failed run go on."""


class Runs(Verbs):
    """Looking at runs."""

    @verb("GET /run-ids", Role.VIEWER, "app.queries", command="ls", newest=str)
    def ids(self, limit: int, before: RunId | None = None) -> list[str]:
        """Of the newest runs; `before`: of those that are older than this one."""

    @verb("GET /runs/{words}", Role.VIEWER, ".ledger.find_run", command="get")
    def run(self, words: Word) -> RunRecord:
        """A run by id, by a prefix of it, or the newest of a name.

        Raises:
            NotFoundError: no such run. InputError: the prefix names several.
        """

    @verb("GET /runs/{run_id}/manifest", Role.VIEWER, "app.queries", command="lock")
    def manifest(self, run_id: RunId) -> Manifest:
        """Its locked manifest."""

    @verb("GET /runs", Role.VIEWER, "views.status:read_newest", newest=lambda run: str(run.id))
    def ls(self, limit: int, before: RunId | None = None, tag: Tag | None = None) -> list[RunSummary]:
        """The newest runs in brief, a kilobyte each; `before`: those that are older than this one; `tag`: those that
        have it.
        """

    @verb("GET /queue", Role.VIEWER, "views.status:read_unfinished")
    def queue(self, limit: int) -> list[RunSummary]:
        """Runs that have not ended, in brief: those that wait first, each kind newest first."""

    @verb("GET /runs/{run_id}/status", Role.VIEWER, "views.status:read_status", command="get")
    def status(self, run_id: RunId) -> RunStatus:
        """How a run stands."""

    @verb("GET /runs/{run_id}/scores", Role.VIEWER, "app.queries", heavy=True)
    def scores(self, run_id: RunId) -> Scores:
        """What it has measured."""

    @verb("GET /runs/{run_id}/driver", Role.VIEWER, "app.queries")
    def driver(self, run_id: RunId) -> RunDriver | None:
        """Who drives it; None: it has ended."""

    @verb("GET /runs/{run_id}/why", Role.VIEWER, "app.queries", heavy=True)
    def why(self, run_id: RunId) -> Why:
        """Where it is and why."""

    @verb("GET /diffs", Role.VIEWER, "app.queries", heavy=True)
    def diff(self, first: Word, second: Word) -> RunDiff:
        """What differs between two runs, as a person names them."""

    @verb("POST /comparisons", Role.VIEWER, "app.queries", heavy=True, writes="page", file="comparison.html")
    def compare(self, words: Sequence[Word], page: Path | None = None) -> Comparison:
        """Runs, or their evaluate stages, side by side; `page`: write one of it too."""

    @verb("", Role.VIEWER, "app.queries")
    def comparison(self, words: Sequence[Word]) -> ComparePage:
        """Everything that the page of a comparison shows."""

    @verb("", Role.VIEWER, "views.status:RunWatcher")
    def watcher(self, run_id: RunId) -> Watcher:
        """Whoever looks at it again and again reads only what is new."""

    @verb("", Role.VIEWER, "views.logs:Vigil")
    def vigil(self, run_id: RunId, say: Callable[[str], None], timeout: float | None) -> Vigil:
        """Wait for it without driving it; `say` is told when nobody does."""

    @verb("", Role.VIEWER, "app.queries")
    def logs(
        self, run_id: RunId, stage: StageName | None, follow: Vigil | None = None
    ) -> Iterator[tuple[LogFile, str]]:
        """What its jobs printed, piece by piece; with `follow` until it ends."""

    @verb("", Role.VIEWER, "views.reporting:read_report")
    def report(self, run_id: RunId) -> RunReport:
        """Everything that its page shows."""

    @verb(
        "GET /runs/{run_id}/report",
        Role.VIEWER,
        "views.reporting",
        heavy=True,
        command="get --report",
        writes="folder",
    )
    def write_report(self, run_id: RunId, folder: Path | None = None) -> Written:
        """Its page and its learning curves."""

    @verb("GET /runs/{run_id}/trace", Role.VIEWER, "views.tracing", heavy=True, command="trace", writes="folder")
    def write_trace(self, run_id: RunId, stage: StageName | None, folder: Path) -> WrittenTrace:
        """Where its time went, as files."""

    @verb(
        "GET /runs/{run_id}/samples",
        Role.VIEWER,
        "views.tracing:recorded_samples",
        heavy=True,
        key=lambda one: (one.stage, *numbers(one.sample.id)),
    )
    def samples(
        self, run_id: RunId, stage: StageName | None, step: int | None, say: Callable[[str], None]
    ) -> Sequence[RecordedSample]:
        """The samples that it recorded; `say` is told what cannot be read."""

    @verb("GET /runs/{run_id}/samples/{sample}", Role.VIEWER, "views.tracing:recorded_sample", heavy=True)
    def sample(self, run_id: RunId, sample: SampleId, stage: StageName | None) -> RecordedSample:
        """One of them, token by token."""

    @verb("GET /runs/{run_id}/trackers", Role.VIEWER, "app.queries", heavy=True)
    def trackers(self, run_id: RunId) -> list[TrackerState]:
        """How its trackers stand."""

    @verb("POST /runs/{run_id}/trackers", Role.SUBMITTER, "app.queries", heavy=True)
    def track(self, run_id: RunId, chosen: Mapping[str, Any]) -> list[TrackerState]:
        """Write what its trackers miss; `chosen`: write these places too, and only these."""

    @verb("", Role.SUBMITTER, "app.queries")
    def follow(self, run_id: RunId) -> None:
        """Write its trackers until it ends; at once over when somebody else does."""


class Channels(Verbs):
    """What is live, what every release must pass, who may move it."""

    @verb("GET /channels", Role.VIEWER, ".ledger.channel_records", command="ls", key=lambda one: (one.name,))
    def channels(self) -> list[ChannelRecord]:
        """Every channel, also those without a release."""

    @verb("GET /releases", Role.VIEWER, "app.channels", command="ls", key=lambda one: (one.channel,))
    def live(self) -> list[ReleaseEntry]:
        """What the channels point at."""

    @verb("GET /channels/{name}/record", Role.VIEWER, ".ledger.channel_record")
    def channel_record(self, name: Word) -> ChannelRecord:
        """Whether it is protected or frozen; of generation 0 where there is none of that name."""

    @verb("GET /channels/{name}", Role.VIEWER, "app.channels", command="get")
    def channel(self, name: Name) -> ChannelView:
        """All that is known of it; it need not exist yet."""

    @verb("GET /channels/{name}/trackers", Role.VIEWER, "trackers.tracked:channel_states", heavy=True)
    def channel_trackers(self, name: Name) -> list[TrackerState]:
        """How the registries stand that follow it."""

    @verb(
        "POST /channels/{name}/trackers",
        Role.SUBMITTER,
        "trackers.tracked:register_channel",
        heavy=True,
        command="track",
    )
    def track_channel(self, name: Name) -> list[TrackerState]:
        """Bring these registries to where it is."""

    @verb("POST /channels/{channel}/releases", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def promote(self, run_id: RunId, channel: Name, lift_quarantine: str = "") -> ReleaseEntry:
        """Point it at a run's model, if its gates pass.

        Args:
            lift_quarantine: why a model that was rolled back from it may come back.
        """

    @verb("POST /channels/{channel}/rollback", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def rollback(
        self,
        channel: Name,
        to: Word | None = None,
        since: int | None = None,
        reason: str = "",
        lift_quarantine: str = "",
    ) -> ReleaseEntry:
        """Point it back at the newest release that is not quarantined, or at `to` (number, run id, digest prefix).

        Args:
            since: the release that must be live now.
            reason: why.
            lift_quarantine: why the quarantined model that `to` names may come back.
        """

    @verb("POST /approvals", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def approve(self, what: Word, channel: Name | None, reason: str) -> Standing:
        """Approve what waits for it, as the present principal; where it stands afterwards.

        Args:
            what: the id of a run whose model is to be released, or the digest of a request, or its beginning.
            channel: of a run, another one than its run file names.

        Raises:
            AccessError: the policy does not name the principal, or what is asked for is the principal's own.
        """

    @verb("POST /rejections", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def reject(self, what: Word, channel: Name | None, reason: str) -> Standing:
        """Reject it; as `approve`."""

    @verb(
        "GET /channels/{channel}/approvals",
        Role.VIEWER,
        "app.channels",
        heavy=True,
        key=lambda one: (one.request.at, one.request.digest),
    )
    def approval_requests(self, channel: Name) -> list[Standing]:
        """What waits for approvals on a channel, oldest first."""

    @verb("GET /channels/{name}/policy", Role.VIEWER, "app.channels", heavy=True, command="channel policy")
    def policy(self, name: Name, request: Word | None = None) -> PinnedPolicy | None:
        """What every release of it must pass; None: what its run says.

        Args:
            request: of the policy that this approval request asks for instead.
        """

    @verb("GET /channels/{name}/policies", Role.VIEWER, "app.channels", key=lambda one: (one.id,))
    def policies(self, name: Name) -> list[Event]:
        """Every time its policy was set or removed, oldest first."""

    @verb(
        "GET /channels/{name}/history",
        Role.VIEWER,
        "views.logs:moves",
        command="get",
        newest=lambda move: str(move.entry.sequence),
    )
    def history(self, name: Name, limit: int | None = None, before: Word | None = None) -> list[Move]:
        """Its moves, newest first: what became of each, why, and who approved it.

        Args:
            before: the number of a release: only those that are older.
        """

    @verb("GET /channels/{name}/events/{kind}", Role.VIEWER, "app.channels", key=lambda one: (one.id,))
    def channel_events(self, name: Name, kind: Name) -> list[Event]:
        """What was told of it of one kind, such as `channel.frozen`, oldest first."""

    @verb(
        "PUT /channels/{name}/policy", Role.ADMIN, "app.channels", heavy=True, command="channel set-policy", seals=True
    )
    def set_policy(self, name: Word, path: Path) -> tuple[PinnedPolicy, list[str]]:
        """Let it have the policy in a YAML file from now on; with what that does not do, in words."""

    @verb(
        "DELETE /channels/{name}/policy",
        Role.ADMIN,
        "app.channels",
        heavy=True,
        command="channel remove-policy",
        seals=True,
    )
    def remove_policy(self, name: Word) -> ChannelRecord:
        """Let releases pass what their runs say."""

    @verb(
        "PUT /channels/{name}/protection", Role.ADMIN, "app.channels", heavy=True, command="channel protect", seals=True
    )
    def protect(self, name: Word, *, protected: bool = True, why: str = "") -> ChannelRecord:
        """Make releases and changes of its policy and quarantine wait for the approval of somebody who neither
        submitted nor owns what is released; `protected=False` takes that back.

        Raises:
            InputError: nobody but the present principal could approve anything.
            ApprovalError: nobody approved yet that it is unprotected; this call requests it.
        """

    @verb(
        "PUT /channels/{name}/freeze", Role.APPROVER, "app.channels", heavy=True, command="channel freeze", seals=True
    )
    def freeze(self, name: Word, *, rollbacks: bool = False, why: str = "") -> ChannelRecord:
        """Let nothing be released to it; with `rollbacks` let it not be rolled back either."""

    @verb(
        "DELETE /channels/{name}/freeze",
        Role.APPROVER,
        "app.channels",
        heavy=True,
        command="channel unfreeze",
        seals=True,
    )
    def unfreeze(self, name: Word, *, why: str = "") -> ChannelRecord:
        """Let it move again."""


class Records(Verbs):
    """The proof, and what a person mends."""

    @verb("GET /lineage", Role.VIEWER, "app.queries", heavy=True)
    def lineage(self, target: Word) -> Node:
        """Of a channel (`channel:NAME`, whatever else has that name), a run or an asset: what it was made from."""

    @verb("GET /downstream", Role.VIEWER, "app.queries", heavy=True)
    def downstream(self, target: Word, limit: int = 200) -> Downstream:
        """What was made from an asset, from bytes, from what a channel serves, from a run; `limit` things in the tree,
        the nearest first."""

    @verb("POST /verifications", Role.VIEWER, "app.queries", heavy=True)
    def verify(self, target: Word = "") -> VerifyReport:
        """Hash a lineage and the event log again; without a target, of what every channel serves."""

    @verb("GET /dead", Role.VIEWER, "app.runs", heavy=True, key=lambda one: (one.object, one.kind))
    def dead(self, within: Word | None) -> list[Dead]:
        """What was set aside, all of it or of one RUN or RUN/STAGE."""

    @verb("POST /dead/retry", Role.SUBMITTER, "app.runs", heavy=True, command="dead --retry")
    def look_again(self, within: Word) -> list[Dead]:
        """Let it be looked at again."""

    @verb("POST /dead/assume", Role.ADMIN, "app.runs", heavy=True, command="dead --assume-dead")
    def assume_dead(self, stage: Word) -> AttemptRecord:
        """Take a person's word that the job of RUN/STAGE, of which nothing can be seen, is dead."""

    @verb("POST /erasures", Role.ADMIN, "app.collecting", heavy=True, seals=True)
    def erase(self, what: Word, reason: str) -> Erasure:
        """Erase the words of a run, of a version of an asset, or the name of a person."""

    @verb("POST /garbage-collections", Role.ADMIN, "app.collecting:collect_garbage", heavy=True, seals=True)
    def gc(self, older_than: float, *, dry_run: bool) -> Collected:
        """Delete what nobody needs and is older than so many seconds; `dry_run`: only say what that would be."""


class Control(Submissions, Runs, Channels, Records, Assets, Sinks, Models, Access):
    """Everything."""

    def close(self) -> None:
        """Nothing is asked after it."""
        self.asks.close()


VERBS: Mapping[str, Verb[..., Any]] = verbs_of(Control)
OPERATIONS: Mapping[str, Verb[..., Any]] = {name: one for name, one in VERBS.items() if one.path}  # that are requests


class Watcher(Protocol):
    """Looks at one run again and again."""

    def read(self) -> RunStatus:
        """The run as it is now."""


class Vigil(Protocol):
    """Waits for a run that somebody else drives."""

    def look(self) -> RunRecord:
        """The run as it is now. Raises DeadlineError when the time is up."""

    def rest(self, seconds: float) -> None:
        """Until the next look."""
