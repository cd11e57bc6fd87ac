"""Commands that show runs (`ls`, `get`, `logs`, `why`, `diff`), and `note`, `dead` and `signal`.

`note` records a person's note on a run. `dead` lists runs and stages that drivers set aside after repeated failures.
`signal` lets a waiting stage continue.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    ago,
    answer_json,
    as_typed,
    aside,
    console,
    digest,
    duration,
    glyph,
    harmless,
    lazily,
    open_control,
    pass_on,
    say,
    show,
    style,
    tinted,
)
from posttrain.cli.drive import RunArgument, TagOption, TimeoutOption, run_json
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError, meant
from posttrain.domain.lifecycle import ReleaseState, is_final, meaning

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Why
    from posttrain.domain.approvals import ApprovalStatus
    from posttrain.domain.records import AssetStatus, ChannelRecord, ReleaseEntry

_MOVES = 50  # maximum number of a channel's moves in the text output, newest first
_NO_RUNS = "no runs yet; next: posttrain run RUN.yaml"
_POLL = 0.25  # seconds between reads while watching


def ls(
    limit: Annotated[int, typer.Option(min=1, max=10**6, help="Maximum number of runs.")] = 20,
    tag: Annotated[list[str] | None, typer.Option("--tag", metavar="TAG", help="Only runs with this tag.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs, newest first, and the model of each channel."""
    if tag and len(tag) > 1:
        raise InputError(f"ls: --tag must be given once, got {' and '.join(tag)}; leave the others out")
    control, wanted = open_control(), tag[0] if tag else None
    runs, live = control.ls(limit, tag=wanted), control.live()
    records = {record.name: record for record in control.channels()}
    barred = control.recalled(*(entry.model_digest for entry in live))
    answer_json(output, lambda: {"runs": [asdict(run) for run in runs], "channels": [asdict(entry) for entry in live]})
    if not runs:
        say(f"no run has the tag {wanted}; posttrain note RUN --tag {wanted} adds it" if wanted else _NO_RUNS)
        _say_channels(live, records, barred)
        return

    from posttrain.cli.screens import Column, Grid

    words = [Column(title, wraps=True) for title in ("reason", "next action")]
    table = Grid(
        [Column(), *(Column(title) for title in ("run", "state", "submitted", "took", "driver")), *words], heads=3
    )
    for run in runs:
        mark = tinted(glyph(run.state), style(run.state))
        reason = run.under_way or (run.message.partition("; ")[0] if run.state != "succeeded" else run.reason)
        action = "" if run.state == "succeeded" else run.next_action
        driver, took = str(run.driver or ""), duration(run.seconds)
        reason = f"[{', '.join(run.tags)}] {reason}" if run.tags else reason
        table.row(
            mark, run.id, run.standing, ago(run.created_at), took, driver, " ".join(reason.split()), as_typed(action)
        )
    console().print(table)
    _say_channels(live, records, barred)


def note(
    run: RunArgument,
    text: Annotated[str, typer.Argument(metavar="TEXT", help="Note, in quotes; at most 1000 characters.")] = "",
    tag: TagOption = None,
    untag: Annotated[
        list[str] | None, typer.Option("--untag", metavar="TAG", help="Tag to remove; repeatable.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Record a note on a run, or tag it.

    A run has at most 8 tags; `ls --tag` lists runs by tag. `get`, `why` and the console show notes and tags.
    """
    control = open_control()
    run_id = control.run(run).id
    found = control.note(run_id, text, tag or (), untag or ())
    answer_json(output, lambda: [asdict(one) for one in found])
    tags = ", ".join(sorted(one.tag for one in found if one.tag))
    say(f"run {run_id}: recorded; {f'tags {tags}' if tags else 'no tags'}; posttrain get {run_id} shows it")


def _say_channels(
    live: list[ReleaseEntry], records: dict[str, ChannelRecord], barred: Mapping[str, AssetStatus]
) -> None:
    """Print the model of each channel, and the channels without a release that are frozen or have a policy."""
    for entry in live:
        record = records.pop(entry.channel, None)
        still = (", frozen" if record and record.frozen else "") + (", recalled" * (entry.model_digest in barred))
        which = f"{digest(entry.model_digest)} of run {entry.run_id}"
        say(f"channel {entry.channel} → {which} (release {entry.sequence}{still})")
    for record in records.values():
        words = [word for word, holds in (("a policy", record.policy), ("frozen", record.frozen)) if holds]
        held = f" ({', '.join(words)})" if words else ""
        say(f"channel {record.name}: no release yet{held}")


def get(
    run: Annotated[str, typer.Argument(metavar="RUN|CHANNEL", autocompletion=lazily("runs_and_channels"))],
    watch: Annotated[bool, typer.Option("--watch", help="Show the run until it ends, without driving it.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Write the run's report and learning curves again.")] = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show one run, or the release history of a channel.

    A run is shown with its stages, scores, reason and next action.
    """
    if watch and output is Output.JSON:
        raise InputError("get: --watch cannot be combined with -o json; leave one of them out")
    if timeout is not None and not watch:
        raise InputError("get: --timeout needs --watch; add --watch, or leave --timeout out")
    control = open_control()
    if control.channel_record(run).generation:
        if watch or report:
            raise InputError(f"get: --{'watch' if watch else 'report'} needs a run, got channel {run}; leave it out")
        _get_channel(control, run, output)
        return
    run_id = _run_or_channel(control, run)
    if watch:
        _watch(control, run_id, timeout)
    written = control.write_report(run_id) if report else None
    status = control.status(run_id)
    paths = {"report": str(written.report), "curves": str(written.curves)} if written else {}
    answer_json(output, lambda: run_json(control, status) | paths)
    scores, trackers = control.scores(status.run.id), control.trackers(run_id)
    from posttrain.cli.screens import (
        approval_lines,
        note_lines,
        regression_lines,
        run_footer,
        run_tree,
        score_lines,
        signal_lines,
        tracker_lines,
        warning_lines,
    )

    console().print(
        *regression_lines(scores),
        run_tree(status),
        *score_lines(scores),
        *warning_lines(status),
        *note_lines(status),
        *signal_lines(status),
        *approval_lines(status.approvals),
        *tracker_lines(trackers),
        *run_footer(status),
        sep="\n",
    )
    if written:
        say(f"report: {written.report}", *([f"curves: {written.curves}"] if written.curves else []))


def _run_or_channel(control: Control, word: str) -> str:
    """Return the id of the run that `word` names.

    Raises:
        NotFoundError: there is no such run; the message names a channel with a similar name, if there is one.
    """
    try:
        return control.run(word).id
    except NotFoundError as error:
        near = meant(word, (record.name for record in control.channels()))
        if not near:
            raise
        raise NotFoundError(f"there is no channel {word!r}{near}, and {error}") from error


def _get_channel(control: Control, name: str, output: Output) -> None:
    from posttrain.cli.screens import channel_lines, history_table, release_lines, request_lines, tracker_lines

    asked = control.approval_requests(name)
    channel, trackers = control.channel(name), control.channel_trackers(name)
    history = control.history(name, None if output is Output.JSON else _MOVES)
    record, live = channel.record, channel.live
    recall = control.recalled(live.model_digest).get(live.model_digest) if live else None
    cards = dict(_cards(control, asked))
    answer_json(
        output,
        lambda: {
            "channel": name,
            "live": live.model_digest if live else None,
            "history": [move.to_json() for move in reversed(history)],
            "looks": len(channel.looks),
            "recalled": asdict(recall) if recall else None,
            "policy": record.policy,
            "protected": record.protected,
            "frozen": record.frozen,
            "deployments": [asdict(one) for one in channel.deployments],
            "quarantine": [asdict(one) for one in channel.quarantine],
            "approval_requests": [one.to_json() for one in asked],
            "cards": {run_id: _why_json(card) for run_id, card in cards.items()},
            "trackers": [one.to_json() for one in trackers],
        },
    )
    earlier = ReleaseState.SUPERSEDED in channel.states.values()  # a rollback needs an earlier release
    back = f"posttrain rollback {name}, " if earlier else ""
    lines: list[Any] = [
        *channel_lines(record, channel.frozen, recall),
        *release_lines(channel.quarantine, channel.looks),
        *request_lines(asked, cards),
        *tracker_lines(trackers),
    ]
    if not history:
        console().print(f"channel {name} has no release yet", *lines, sep="\n")
        return
    if len(history) < channel.moves:
        older = channel.moves - len(history)
        lines.insert(0, f"{older} older releases are left out; -o json prints all of them")
    console().print(history_table(history), *lines, as_typed(f"next:   {back}posttrain lineage {name}"), sep="\n")


def _cards(control: Control, asked: Iterable[ApprovalStatus]) -> Iterator[tuple[str, Why]]:
    """Yield the information about each run that an approver needs; skip an unreadable run with a warning."""
    for run_id in dict.fromkeys(one.request.run_id for one in asked if one.request.run_id):
        try:
            yield run_id, control.why(run_id)
        except PosttrainError as error:
            aside(f"warning: run {run_id}: {error}")


def logs(
    run: RunArgument,
    stage: Annotated[str | None, typer.Argument(metavar="[STAGE]", help="Stage; default: all stages.")] = None,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Follow the logs until the run ends.")] = False,
    timeout: TimeoutOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Print the output of a run's jobs. For a reused stage, the output is from the run that computed the stage."""
    if follow and output is Output.JSON:
        raise InputError("logs: -f cannot be combined with -o json; leave one of them out")
    if timeout is not None and not follow:
        raise InputError("logs: --timeout needs -f; add -f, or leave --timeout out")
    control = open_control()
    run_id = control.run(run).id
    pieces = control.logs(run_id, stage, control.watch_run(run_id, aside, timeout) if follow else None)
    answer_json(
        output,
        lambda: [
            {
                "run_id": file.run_id,
                "stage": file.stage,
                "attempt": file.attempt,
                "path": file.path and str(file.path),
                "text": text,
            }
            for file, text in pieces
        ],
    )
    last = None
    for file, text in pieces:
        if file != last:
            last = file
            say(f"==> {file.run_id} {file.stage} attempt {file.attempt}{f' ({file.path})' if file.path else ''}")
        pass_on(text, end=not follow)
        sys.stdout.flush()
    if last is None:
        record = control.run(run_id)
        ended = f"no job printed anything, and the run has ended ({record.state})"
        say(ended if is_final("run", record.state) else "no job has printed anything yet")


def _why_json(found: Why) -> dict[str, Any]:
    return {
        **found.status.to_json(),
        "next_action": found.next_action,
        "compared_with": found.compared_with,
        "gates": found.report.model_dump(mode="json") if found.report else None,
        "scores": found.scores.to_json(),
        "trackers": [tracker.to_json() for tracker in found.trackers],
        "lost": [asdict(attempt) for attempt in found.lost],
        "findings": [asdict(finding) for finding in found.findings],
    }


def why(run: RunArgument, output: OutputOption = Output.TEXT) -> None:
    """Explain why a run is in its state, and what to do next.

    For a gate, the command shows which number missed the threshold, by how much, and with what confidence. For a stage
    that trains badly, the command shows the symptoms with their causes and remedies.
    """
    control = open_control()
    found = control.why(control.run(run).id)
    status, scores, trackers, action = found.status, found.scores, found.trackers, found.next_action
    answer_json(output, lambda: _why_json(found))
    from posttrain.cli.screens import (
        approval_lines,
        attempt_line,
        finding_lines,
        note_lines,
        regression_lines,
        run_tree,
        score_lines,
        signal_lines,
        tracker_lines,
        verdict_lines,
        warning_lines,
    )

    screen, itself = console(), f"posttrain why {status.run.id}"
    stages = tuple(replace(one, next_action="") if one.next_action == itself else one for one in status.stages)
    screen.print(*regression_lines(scores), run_tree(replace(status, stages=stages)), sep="\n")
    verdicts = found.report.verdicts if found.report else ()
    words = f"{sum(v.outcome == 'pass' for v in verdicts)} of {len(verdicts)} gates passed" if verdicts else ""
    gated = words and status.run.reason.startswith("Gate")  # the verdicts below have the details
    say(f"reason: {words if gated else status.why or meaning(status.reason)} ({status.reason})")
    said = (*warning_lines(status), *note_lines(status), *signal_lines(status), *approval_lines(status.approvals))
    show(*verdict_lines(verdicts), *score_lines(scores), *said, *finding_lines(found.findings))
    for attempt in found.lost:
        screen.print(f"{attempt.stage}:", attempt_line(attempt))
    show(*tracker_lines(trackers))
    say(f"next:   {action}")


def diff(
    first: Annotated[str, typer.Argument(metavar="A", help="First run.", autocompletion=lazily("runs"))],
    second: Annotated[str, typer.Argument(metavar="B", help="Second run.", autocompletion=lazily("runs"))],
    output: OutputOption = Output.TEXT,
) -> None:
    """Show the differences between two runs. The command compares manifests, changed assets and measured numbers."""
    found = open_control().diff(first, second)
    one, other = found.metrics
    both = sorted(one.keys() & other.keys())
    metrics: list[dict[str, Any]] = [{"metric": m, "a": one[m], "b": other[m]} for m in both if one[m] != other[m]]
    told = [asdict(difference) for difference in found.differences]
    answer_json(output, lambda: {"a": found.first, "b": found.second, "differences": told, "metrics": metrics})
    from posttrain.cli.screens import difference_lines

    say(f"- {found.first}", f"+ {found.second}")
    show(*difference_lines(found.differences))
    if not found.differences:
        say("nothing that determines the result differs")
    for row in metrics:  # -o json also contains the optimiser's last numbers
        if row["metric"].partition("/")[0] in found.measured or row["metric"].endswith("reward/mean"):
            say(f"  {row['metric']:32s} {row['a']:.4g} → {row['b']:.4g}  ({row['b'] - row['a']:+.4g})")


def _watch(control: Control, run_id: str, timeout: float | None) -> None:
    from posttrain.cli.live import open_display

    watch_run = control.watch_run(run_id, aside, timeout)
    with open_display(control, run_id) as display:
        while True:
            record = watch_run.look()
            display(record)
            if is_final("run", record.state):
                return
            watch_run.rest(_POLL)


def dead(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN[/STAGE]]",
            help="Only this run or stage, with its traceback.",
            autocompletion=lazily("runs"),
            show_default=False,
        ),
    ] = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Process the run or stage again, after the cause is fixed.")
    ] = False,
    assume_dead: Annotated[
        bool,
        typer.Option("--assume-dead", help="Record that the job of RUN/STAGE, which cannot be observed, is dead."),
    ] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """List runs and stages that failed repeatedly and were set aside.

    The list shows the last error of each. With `--retry`, a driver processes the given run or stage again.
    """
    if retry and name is None:
        raise InputError("dead: --retry needs the run or stage to process again; posttrain dead lists them")
    if assume_dead and (retry or name is None):
        raise InputError("dead: --assume-dead needs RUN/STAGE and no --retry; posttrain why RUN names the stage")
    control = open_control()
    if assume_dead and name:
        attempt = control.assume_dead(name)
        answer_json(output, lambda: asdict(attempt))
        say(f"{attempt.name} is recorded as dead", f"next: posttrain attach {attempt.run_id}")
        return
    found = control.look_again(name) if retry and name else control.dead(name)
    answer_json(output, lambda: [asdict(one) for one in found])
    if retry:
        run = found[0].object.partition("/")[0]
        say(*(f"{one.object}: a driver will process it again" for one in found), f"next: posttrain attach {run}")
    elif not found:
        say("nothing was set aside")
    for one in found if not retry else ():
        console().print(
            f"{one.object}: {one.tries} tries, set aside {ago(one.set_aside_at)}: {one.error}", markup=False
        )
        if name:
            say(*harmless(one.traceback).splitlines(), quoted=True)
        say(f"  → posttrain dead {one.object} --retry")


def signal(
    run: RunArgument,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the signal in the run file.")],
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Reason; recorded in the event log.")] = "",
) -> None:
    """Send a signal to a run, so that a waiting stage continues.

    A signal that is sent before the stage begins counts too. Sending a signal again has no further effect.
    """
    control = open_control()
    sent, new = control.signal(control.run(run).id, name, reason)
    before = "" if new else f" already, {ago(sent.at)} by {sent.actor}"
    say(f"run {sent.run_id}: signal {sent.name} sent{before}", f"next: posttrain get {sent.run_id}")
