"""`Control`: the verbs that the command line and the Python API call, in process or on a server.

Arguments are strings, numbers and files of this machine; answers are values (`api.values`, `domain`). Callers cannot
see whether a local ledger or a server answers. Each verb is declared once, here or in `api.assets`.

The verbs of `Sinks` configure, show, test, pause and remove receivers of events. `Control` returns a `Watcher` or a
`RunWatch` to a caller that reads a run repeatedly.
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
    from posttrain.domain.approvals import ApprovalStatus
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
    """Verbs for sinks, the external receivers of events."""

    @verb("GET /sinks", Role.VIEWER, "app.sinks", command="sink ls", key=lambda one: (one.name,))
    def sinks(self) -> list[SinkView]:
        """Return every sink with its delivery position."""

    @verb("POST /sinks", Role.ADMIN, "app.sinks", heavy=True, command="sink add")
    def add_sink(
        self, name: Name, kind: str, settings: Mapping[str, Any], rule: Mapping[str, Any], *, from_start: bool = False
    ) -> SinkView:
        """Create a sink, which receives events from now on.

        Args:
            kind: webhook | jsonl | email.
            settings: the sink's address, and the names of the variables or files with its secrets; see the back-end.
            rule: selects the events that the sink receives; see `domain.sinks.Rule`.
            from_start: whether to also deliver the events that are already in the log.

        Raises:
            InputError: the name, the settings or the rule are invalid.
            ConflictError: a sink of this name already exists.
        """

    @verb("POST /sinks/{name}/test", Role.ADMIN, "app.sinks", heavy=True, command="sink test")
    def test_sink(self, name: Name) -> str:
        """Send a message marked as a test to a sink; return the sink's address.

        Raises:
            SinkError: the sink did not accept the message.
        """

    @verb("POST /sinks/{name}/pause", Role.ADMIN, "app.sinks", command="sink pause")
    def pause_sink(self, name: Name) -> SinkView:
        """Pause deliveries to a sink; events that occur during the pause are delivered when deliveries resume."""

    @verb("POST /sinks/{name}/resume", Role.ADMIN, "app.sinks", heavy=True, command="sink resume")
    def resume_sink(self, name: Name, *, skip: bool = False) -> SinkView:
        """Resume deliveries to a sink immediately, even during a back-off.

        Args:
            skip: whether to omit the events that have not been delivered so far.
        """

    @verb("DELETE /sinks/{name}", Role.ADMIN, "app.sinks", command="sink remove", seals=True)
    def remove_sink(self, name: Name) -> None:
        """Delete a sink."""


class Submissions(Verbs):
    """Verbs for planning and submitting a run, and for acting on it."""

    @verb("POST /plans", Role.VIEWER, "app.runs:view_plan", heavy=True, run_file=True)
    def plan(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> PlanView:
        """Return what submitting a run file would do; nothing is written.

        Raises:
            InputError: the run file is invalid; the message names file, field, constraint and value.
        """

    @verb("POST /locks", Role.VIEWER, "app.runs", heavy=True, run_file=True)
    def lock(self, path: Path, *, seed: int | None = None, setting: Setting = ()) -> Locked:
        """Return the locked manifest of a run file.

        Raises:
            InputError: the run file is invalid; the message names file, field, constraint and value.
        """

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
        """Submit a run file or a locked manifest as a run, or attach to the run of an earlier submission.

        Args:
            note, tags: a note and tags for the run; invalid values are rejected before anything is recorded.
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
        """Submit a run with one evaluate stage, which measures a model on suites."""

    @verb("", Role.SUBMITTER, "app.driver", command="attach")
    def drive(
        self,
        run_id: RunId,
        *,
        timeout: float | None = None,
        watch: Callable[[RunRecord], None] | None = None,
        report: bool = False,
    ) -> RunRecord:
        """Drive a run until it ends, or wait while another process drives it.

        Args:
            timeout: seconds; None: no limit.
            watch: called with the run about ten times a second.
            report: whether the caller will call `write_report` when the run has ended.

        Raises:
            DeadlineError: `timeout` passed; this does not stop the run.
        """

    @verb("POST /runs/{run_id}/detach", Role.SUBMITTER, "workspace.background", command="run --detach")
    def detach(self, run_id: RunId) -> RunDriver:
        """Hand a run over to a background driver; return the driver as soon as it has accepted the run.

        Raises:
            InputError: the run has ended.
            WorkspaceError: the workspace cannot be written.
            InfrastructureError: no driver could be started; neither a driver nor a request to it remains.
        """

    @verb("POST /runs/{run_id}/signals", Role.SUBMITTER, "control.actions:send_signal")
    def signal(self, run_id: RunId, name: Name, reason: str = "") -> tuple[Signal, bool]:
        """Send a signal that a run waits for; return the signal, and whether this call was the first to send it."""

    @verb("POST /runs/{run_id}/notes", Role.SUBMITTER, "control.actions")
    def note(self, run_id: RunId, text: str = "", tags: Sequence[Tag] = (), untag: Sequence[Tag] = ()) -> list[RunNote]:
        """Add a note to a run, and add or remove tags; return the run's tags and newest note.

        Raises:
            InputError: there is nothing to change, the text is too long, there are too many notes or tags, a tag is
                both added and removed, or a tag to remove is not a tag of the run.
        """

    @verb("POST /runs/{run_id}/stop", Role.SUBMITTER, "control.actions")
    def stop(self, run_id: RunId) -> RunRecord:
        """Request that a run stop; the run's driver carries out the request."""

    @verb("POST /runs/{run_id}/retry", Role.SUBMITTER, "app.runs")
    def retry(self, run_id: RunId) -> RunRecord:
        """Continue a stopped or failed run."""


class Runs(Verbs):
    """Verbs for reading runs."""

    @verb("GET /run-ids", Role.VIEWER, "app.queries", command="ls", newest=str)
    def ids(self, limit: int, before: RunId | None = None) -> list[str]:
        """Return the ids of the newest runs.

        Args:
            before: the id of a run; only older runs are returned.
        """

    @verb("GET /runs/{words}", Role.VIEWER, ".ledger.find_run", command="get")
    def run(self, words: Word) -> RunRecord:
        """Return a run, named by its id, by a prefix of the id, or by its name (the newest run with this name).

        Raises:
            NotFoundError: there is no such run.
            InputError: the prefix is ambiguous.
        """

    @verb("GET /runs/{run_id}/manifest", Role.VIEWER, "app.queries", command="lock")
    def manifest(self, run_id: RunId) -> Manifest:
        """Return the locked manifest of a run."""

    @verb("GET /runs", Role.VIEWER, "views.status:read_newest", newest=lambda run: str(run.id))
    def ls(self, limit: int, before: RunId | None = None, tag: Tag | None = None) -> list[RunSummary]:
        """Return summaries of the newest runs, about a kilobyte each.

        Args:
            before: the id of a run; only older runs are returned.
            tag: a tag; only runs with this tag are returned.
        """

    @verb("GET /queue", Role.VIEWER, "views.status:read_unfinished")
    def queue(self, limit: int) -> list[RunSummary]:
        """Return summaries of unfinished runs: pending runs first, and the newest first within each state.

        Args:
            limit: the maximum number of runs of each state.
        """

    @verb("GET /runs/{run_id}/status", Role.VIEWER, "views.status:read_status", command="get")
    def status(self, run_id: RunId) -> RunStatus:
        """Return the status of a run."""

    @verb("GET /runs/{run_id}/scores", Role.VIEWER, "app.queries", heavy=True)
    def scores(self, run_id: RunId) -> Scores:
        """Return the measured scores of a run."""

    @verb("GET /runs/{run_id}/driver", Role.VIEWER, "app.queries")
    def driver(self, run_id: RunId) -> RunDriver | None:
        """Return the driver of an unfinished run; a run that has ended has no driver."""

    @verb("GET /runs/{run_id}/why", Role.VIEWER, "app.queries", heavy=True)
    def why(self, run_id: RunId) -> Why:
        """Return the state of a run, the reason for it, and the next action."""

    @verb("GET /diffs", Role.VIEWER, "app.queries", heavy=True)
    def diff(self, first: Word, second: Word) -> RunDiff:
        """Return the differences between two runs, each named by id, prefix or name."""

    @verb("POST /comparisons", Role.VIEWER, "app.queries", heavy=True, writes="page", file="comparison.html")
    def compare(self, words: Sequence[Word], page: Path | None = None) -> Comparison:
        """Return a comparison of runs or of their evaluate stages.

        Args:
            page: an HTML file, to which the comparison is also written.
        """

    @verb("", Role.VIEWER, "app.queries")
    def comparison(self, words: Sequence[Word]) -> ComparePage:
        """Return the data of a comparison's page."""

    @verb("", Role.VIEWER, "views.status:RunWatcher")
    def watcher(self, run_id: RunId) -> Watcher:
        """Return a watcher of a run, which reads only new data each time."""

    @verb("", Role.VIEWER, "views.logs:RunWatch")
    def watch_run(self, run_id: RunId, say: Callable[[str], None], timeout: float | None) -> RunWatch:
        """Return an object that waits for a run without driving it.

        Args:
            say: called with a line when no process drives the run.
        """

    @verb("", Role.VIEWER, "app.queries")
    def logs(
        self, run_id: RunId, stage: StageName | None, follow: RunWatch | None = None
    ) -> Iterator[tuple[LogFile, str]]:
        """Yield the output of a run's jobs, piece by piece.

        Args:
            follow: the run to wait for: continue until it ends; None: only the existing output.
        """

    @verb("", Role.VIEWER, "views.report:read_report")
    def report(self, run_id: RunId) -> RunReport:
        """Return the data of a run's report page."""

    @verb(
        "GET /runs/{run_id}/report",
        Role.VIEWER,
        "views.report",
        heavy=True,
        command="get --report",
        writes="folder",
    )
    def write_report(self, run_id: RunId, folder: Path | None = None) -> Written:
        """Return the report page and the learning curves of a run, as files."""

    @verb("GET /runs/{run_id}/trace", Role.VIEWER, "views.trace", heavy=True, command="trace", writes="folder")
    def write_trace(self, run_id: RunId, stage: StageName | None, folder: Path) -> WrittenTrace:
        """Return the time trace of a run, as files."""

    @verb(
        "GET /runs/{run_id}/samples",
        Role.VIEWER,
        "views.trace:recorded_samples",
        heavy=True,
        key=lambda one: (one.stage, *numbers(one.sample.id)),
    )
    def samples(
        self, run_id: RunId, stage: StageName | None, step: int | None, say: Callable[[str], None]
    ) -> Sequence[RecordedSample]:
        """Return the samples that a run recorded.

        Args:
            say: called with one line for each error in reading the samples.
        """

    @verb("GET /runs/{run_id}/samples/{sample}", Role.VIEWER, "views.trace:recorded_sample", heavy=True)
    def sample(self, run_id: RunId, sample: SampleId, stage: StageName | None) -> RecordedSample:
        """Return one recorded sample of a run, token by token."""

    @verb("GET /runs/{run_id}/trackers", Role.VIEWER, "app.queries", heavy=True)
    def trackers(self, run_id: RunId) -> list[TrackerState]:
        """Return the states of a run's trackers."""

    @verb("POST /runs/{run_id}/trackers", Role.SUBMITTER, "app.queries", heavy=True)
    def track(self, run_id: RunId, chosen: Mapping[str, Any]) -> list[TrackerState]:
        """Write the missing points of a run's trackers; return the trackers' states.

        Args:
            chosen: trackers to add to the run; if there are any, only these are written.
        """

    @verb("", Role.SUBMITTER, "app.queries")
    def follow(self, run_id: RunId) -> None:
        """Write a run's metrics to its trackers until the run ends; return immediately if another process does so."""


class Channels(Verbs):
    """Verbs for release channels: live releases, policies, approvals and moves."""

    @verb("GET /channels", Role.VIEWER, ".ledger.channel_records", command="ls", key=lambda one: (one.name,))
    def channels(self) -> list[ChannelRecord]:
        """Return every channel, including channels without a release."""

    @verb("GET /releases", Role.VIEWER, "app.channels", command="ls", key=lambda one: (one.channel,))
    def live(self) -> list[ReleaseEntry]:
        """Return the live release of every channel that has a release."""

    @verb("GET /channels/{name}/record", Role.VIEWER, ".ledger.channel_record")
    def channel_record(self, name: Word) -> ChannelRecord:
        """Return a channel's protection, freeze and policy digest; for an unused channel, `generation` is 0."""

    @verb("GET /channels/{name}", Role.VIEWER, "app.channels", command="get")
    def channel(self, name: Name) -> ChannelView:
        """Return everything that is recorded about a channel, which need not exist yet."""

    @verb("GET /channels/{name}/trackers", Role.VIEWER, "trackers.rows:channel_states", heavy=True)
    def channel_trackers(self, name: Name) -> list[TrackerState]:
        """Return the states of the model registries that follow a channel."""

    @verb(
        "POST /channels/{name}/trackers",
        Role.SUBMITTER,
        "trackers.rows:register_channel",
        heavy=True,
        command="track",
    )
    def track_channel(self, name: Name) -> list[TrackerState]:
        """Update every model registry that follows a channel to the channel's current state."""

    @verb("POST /channels/{channel}/releases", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def promote(self, run_id: RunId, channel: Name, lift_quarantine: str = "") -> ReleaseEntry:
        """Point a channel at a run's model, if the run's gates pass; return the release.

        Args:
            lift_quarantine: the reason why a model that was rolled back from the channel may return.
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
        """Point a channel back at an earlier release; return the new release.

        Args:
            to: a release number, run id or digest prefix; None: the newest release that is not quarantined.
            since: the number of the release that must be live now.
            reason: the reason for the rollback.
            lift_quarantine: the reason why the quarantined model that `to` names may return.
        """

    @verb("POST /approvals", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def approve(self, what: Word, channel: Name | None, reason: str) -> ApprovalStatus:
        """Approve a pending request as the current principal; return the status of the request.

        Args:
            what: the id of a run whose model is to be released, or the digest of a request (or a prefix of the digest).
            channel: if `what` is a run: the channel to use instead of the channel that the run file names.

        Raises:
            AccessError: the policy does not name the principal, or the request is the principal's own.
        """

    @verb("POST /rejections", Role.APPROVER, "app.channels", heavy=True, seals=True)
    def reject(self, what: Word, channel: Name | None, reason: str) -> ApprovalStatus:
        """Reject a pending request as the current principal; parameters and errors are those of an approval."""

    @verb(
        "GET /channels/{channel}/approvals",
        Role.VIEWER,
        "app.channels",
        heavy=True,
        key=lambda one: (one.request.at, one.request.digest),
    )
    def approval_requests(self, channel: Name) -> list[ApprovalStatus]:
        """Return the pending approval requests of a channel, oldest first."""

    @verb("GET /channels/{name}/policy", Role.VIEWER, "app.channels", heavy=True, command="channel policy")
    def policy(self, name: Name, request: Word | None = None) -> PinnedPolicy | None:
        """Return the policy that every release of a channel must pass, if the channel has a policy.

        Without a policy, a release must pass only the gates of its run.

        Args:
            request: the digest of an approval request; the policy that this request would set is then returned instead.
        """

    @verb("GET /channels/{name}/policies", Role.VIEWER, "app.channels", key=lambda one: (one.id,))
    def policies(self, name: Name) -> list[Event]:
        """Return the events that set or removed the policy of a channel, oldest first."""

    @verb(
        "GET /channels/{name}/history",
        Role.VIEWER,
        "views.logs:moves",
        command="get",
        newest=lambda move: str(move.entry.sequence),
    )
    def history(self, name: Name, limit: int | None = None, before: Word | None = None) -> list[Move]:
        """Return the moves of a channel, newest first, each with its state, reason and approvers.

        Args:
            before: the number of a release; only older moves are returned.
        """

    @verb("GET /channels/{name}/events/{kind}", Role.VIEWER, "app.channels", key=lambda one: (one.id,))
    def channel_events(self, name: Name, kind: Name) -> list[Event]:
        """Return the events of one kind about a channel, such as `channel.frozen`, oldest first."""

    @verb(
        "PUT /channels/{name}/policy", Role.ADMIN, "app.channels", heavy=True, command="channel set-policy", seals=True
    )
    def set_policy(self, name: Word, path: Path) -> tuple[PinnedPolicy, list[str]]:
        """Set the policy of a channel from a YAML file; return the policy, with hints about possible problems."""

    @verb(
        "DELETE /channels/{name}/policy",
        Role.ADMIN,
        "app.channels",
        heavy=True,
        command="channel remove-policy",
        seals=True,
    )
    def remove_policy(self, name: Word) -> ChannelRecord:
        """Delete the policy of a channel; releases then need to pass only the gates of their runs."""

    @verb(
        "PUT /channels/{name}/protection", Role.ADMIN, "app.channels", heavy=True, command="channel protect", seals=True
    )
    def protect(self, name: Word, *, protected: bool = True, why: str = "") -> ChannelRecord:
        """Require another person's approval for releases to a channel, or remove this requirement.

        Changes of the channel's policy and quarantine then require an approval too. The approver must be neither the
        submitter nor the owner of the released run.

        Args:
            protected: false removes the protection.

        Raises:
            InputError: the current principal is the only possible approver.
            ApprovalError: removing the protection is not approved yet; this call requests the approval.
        """

    @verb(
        "PUT /channels/{name}/freeze", Role.APPROVER, "app.channels", heavy=True, command="channel freeze", seals=True
    )
    def freeze(self, name: Word, *, rollbacks: bool = False, why: str = "") -> ChannelRecord:
        """Freeze a channel, which then accepts no release; return the channel.

        Args:
            rollbacks: whether rollbacks are refused too.
        """

    @verb(
        "DELETE /channels/{name}/freeze",
        Role.APPROVER,
        "app.channels",
        heavy=True,
        command="channel unfreeze",
        seals=True,
    )
    def unfreeze(self, name: Word, *, why: str = "") -> ChannelRecord:
        """Unfreeze a channel, which then accepts releases and rollbacks again; return the channel."""


class Records(Verbs):
    """Verbs for lineage and verification, repair, erasure and garbage collection."""

    @verb("GET /lineage", Role.VIEWER, "app.queries", heavy=True)
    def lineage(self, target: Word) -> Node:
        """Return the lineage of a channel, a run or an asset: everything it was made from.

        Args:
            target: a name; `channel:NAME` means the channel even if a run or an asset has the same name.
        """

    @verb("GET /downstream", Role.VIEWER, "app.queries", heavy=True)
    def downstream(self, target: Word, limit: int = 200) -> Downstream:
        """Return everything that was made from an asset, a digest, a run, or the model that a channel points at.

        Args:
            limit: the maximum number of nodes in the tree; the nearest come first.
        """

    @verb("POST /verifications", Role.VIEWER, "app.queries", heavy=True)
    def verify(self, target: Word = "") -> VerifyReport:
        """Verify a lineage and the event log by hashing them again.

        Args:
            target: a channel, run or asset; empty: the models that all channels point at.
        """

    @verb("GET /dead", Role.VIEWER, "app.runs", heavy=True, key=lambda one: (one.object, one.kind))
    def dead(self, within: Word | None) -> list[Dead]:
        """Return the objects that were set aside: all of them, or those of one run or stage (RUN or RUN/STAGE)."""

    @verb("POST /dead/retry", Role.SUBMITTER, "app.runs", heavy=True, command="dead --retry")
    def look_again(self, within: Word) -> list[Dead]:
        """Resume the objects of a RUN or RUN/STAGE that were set aside; return these objects."""

    @verb("POST /dead/assume", Role.ADMIN, "app.runs", heavy=True, command="dead --assume-dead")
    def assume_dead(self, stage: Word) -> AttemptRecord:
        """Record a person's statement that the job of RUN/STAGE, which cannot be observed, is dead."""

    @verb("POST /erasures", Role.ADMIN, "app.garbage", heavy=True, seals=True)
    def erase(self, what: Word, reason: str) -> Erasure:
        """Erase the free text of a run or of an asset version, or the name of a person."""

    @verb("POST /garbage-collections", Role.ADMIN, "app.garbage:collect_garbage", heavy=True, seals=True)
    def gc(self, older_than: float, *, dry_run: bool) -> Collected:
        """Delete artifacts that no record needs and that are older than a limit; return counts and sizes.

        Args:
            older_than: the limit in seconds.
            dry_run: whether to delete nothing and only return the counts and sizes of what would be deleted.
        """


class Control(Submissions, Runs, Channels, Records, Assets, Sinks, Models, Access):
    """The complete set of verbs."""

    def close(self) -> None:
        """Close the connection or workspace; no verb may be called afterwards."""
        self.asks.close()


VERBS: Mapping[str, Verb[..., Any]] = verbs_of(Control)
OPERATIONS: Mapping[str, Verb[..., Any]] = {name: one for name, one in VERBS.items() if one.path}  # HTTP requests


class Watcher(Protocol):
    """Reads one run repeatedly."""

    def read(self) -> RunStatus:
        """Return the current status of the run."""


class RunWatch(Protocol):
    """Waits for a run that another process drives."""

    def look(self) -> RunRecord:
        """Return the current run; raise DeadlineError after the time-out."""

    def rest(self, seconds: float) -> None:
        """Sleep until the next time to read the run."""
