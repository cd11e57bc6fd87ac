"""One-screen views (a run, its summary, verdicts, differences, a plan), and tables that never cut text.

In the view of a plan, each stage shows where its roles run, the memory that they hold in each phase, and the chosen
sizes.

If the columns of a table do not fit a terminal, each row becomes a block of lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from posttrain.cli.console import (
    ago,
    as_typed,
    branch,
    count,
    digest,
    duration,
    excerpt,
    glyph,
    moment,
    plain_table,
    style,
)
from posttrain.domain.gates import Outcome, Verdict
from posttrain.domain.kinds import Driver, kind_of
from posttrain.domain.lifecycle import AttemptState, StageState, meaning
from posttrain.domain.records import AssetStatus, AttemptRecord, ChannelRecord, Event, Look, Quarantine
from posttrain.domain.roles import servers_of
from posttrain.domain.waits import span
from posttrain.planner.residency import Residency, gib

if TYPE_CHECKING:
    from posttrain.api.values import (
        Difference,
        Finding,
        Move,
        PlanView,
        RunStatus,
        Scores,
        StagePlan,
        StageStatus,
        TrackerState,
        Why,
    )
    from posttrain.domain.approvals import ApprovalStatus

_GAP, _INDENT = 2, 2  # columns between two cells, and before the lines of a block
_WRAPPED = 16  # minimum width of a column that wraps, unless its longest word is wider
_NEAR = ("local", "podman", "fake")  # executors whose handles are processes of this machine
_NOTE = 400  # maximum characters of a note, such as a guideline


@dataclass(frozen=True, slots=True)
class Column:
    """One column. Text in a column that does not wrap, such as ids, digests and intervals, is never broken."""

    title: str = ""
    right: bool = False
    wraps: bool = False  # whether text may wrap between words
    spare: bool = False  # whether the column is left out first if not all columns fit


@dataclass(slots=True)
class Grid:
    """Rows of text under titles; a column without text in any row is left out.

    Args:
        heads: the number of columns that begin a row's block if the table does not fit.
    """

    columns: Sequence[Column]
    heads: int = 1
    title: str = ""
    rows: list[list[Text]] = field(default_factory=list)

    def row(self, *cells: str | Text) -> None:
        """Add a row with a cell for each column."""
        self.rows.append([Text(cell) if isinstance(cell, str) else cell for cell in cells])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the first form that fits: a table, a table without the spare columns, or blocks."""
        told = [n for n in range(len(self.columns)) if any(row[n].plain for row in self.rows)]
        if self.title:
            yield Text(self.title, style="dim")
        for shown in (told, [n for n in told if not self.columns[n].spare]):
            widths = self._widths(shown, options.max_width)
            if widths:
                yield self._table(shown, widths)
                return
        for row in self.rows:
            yield from self._block(row, told, options.max_width)

    def _widths(self, shown: Sequence[int], most: int) -> list[int]:
        """Return the width of each column; an empty list if the columns do not fit."""
        texts = [[self.columns[n].title, *(row[n].plain for row in self.rows)] for n in shown]
        whole = [max(map(cell_len, cells)) for cells in texts]
        widths = [
            min(width, max(_WRAPPED, *(cell_len(word) for cell in cells for word in cell.split() or [""])))
            if self.columns[n].wraps
            else width
            for n, width, cells in zip(shown, whole, texts, strict=True)
        ]
        left = most - sum(widths) - _GAP * (len(shown) - 1)
        if left < 0:
            return []
        for place, width in enumerate(whole):
            more = min(width - widths[place], left)
            widths[place], left = widths[place] + more, left - more
        return widths

    def _table(self, shown: Sequence[int], widths: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for number, width in zip(shown, widths, strict=True):
            column = self.columns[number]
            justify = "right" if column.right else "left"
            table.add_column(column.title, justify=justify, no_wrap=not column.wraps, width=width)  # type: ignore[arg-type]
        for row in self.rows:
            table.add_row(*(row[n] for n in shown))
        return table

    def _block(self, row: Sequence[Text], told: Sequence[int], most: int) -> Iterator[RenderableType]:
        """Yield a line with the first cells, then lines with as many of the other titled cells as fit on each."""
        head = Text("  ").join([row[n] for n in told if n < self.heads and row[n].plain])
        if head.plain:
            yield head
        line = Text()
        for number in told:
            if number < self.heads or not row[number].plain:
                continue
            title = self.columns[number].title
            piece = Text.assemble((f"{title} " if title else "", "dim"), row[number])
            if line.plain and _INDENT + line.cell_len + _GAP + piece.cell_len > most:
                yield Padding(line, (0, 0, 0, _INDENT))
                line = Text()
            line = Text(" " * _GAP).join([line, piece]) if line.plain else piece
        if line.plain:
            yield Padding(line, (0, 0, 0, _INDENT))


def sized(stage: StagePlan, *, chosen: bool) -> Iterator[Text]:
    """Yield the sizes of a stage that will be computed, with reasons; `chosen`: include sizes that Posttrain chose."""
    for size in () if stage.cached_from else stage.sizes:
        if size.chosen and not chosen:
            continue
        whose = "" if size.chosen else " (as written)"
        yield Text(f"{size.name}: {size.said}{whose}" + (f": {size.why}" if size.why else ""), style="dim")


def placed(stage: StagePlan) -> Iterator[Text | Table]:
    """Yield where a training stage runs: a line for one process, or the pools and their memory per phase."""
    if stage.load is None or stage.cached_from:
        return
    placement, found = stage.load.placement, stage.residency
    if stage.load.correction:
        words = (
            f"correction: {stage.load.correction}: the policy computes log-probabilities of every response once more"
        )
        yield Text(words, style="dim")
    if placement.is_inline and stage.load.ray_address is None:
        for peak in found.peaks if found else ():
            device = " of its GPU" if peak.device == "cuda" else ""
            yield Text(f"memory: about {gib(peak.bytes)}{device} at most, in {peak.phase}", style="dim")
        if stage.load.role("reward") and (scoring := placement.pool_of("reward").ranks) > 1:
            yield Text(f"reward: {scoring} processes score in parallel", style="dim")
        return
    where = f" at {stage.load.ray_address}" if stage.load.ray_address else ""
    for name, pool in placement.pools(stage.load.names).items():
        given = pool.resources
        devices = f", {given.gpus} {given.kind or 'gpus'}" if given.gpus else ""
        ranks = f"{pool.ranks} rank{'s' if pool.ranks > 1 else ''}"
        yield Text(f"pool {name}{where}: {ranks}{devices}: {', '.join(pool.roles)}", style="dim")
    if stage.load.lag:
        ahead = f"batch t is sampled by the policy after t - {stage.load.lag} steps, while another batch is trained on"
        yield Text(f"lag {stage.load.lag}: {ahead}", style="dim")
    if stage.load.streams:
        words = "stream_gradients: each group is trained on when it is complete; the weights change once per step"
        yield Text(words, style="dim")
    if found and found.peaks:
        yield _residency_table(found)


def _residency_table(found: Residency) -> Table:
    """Return a table of one rank's memory: a row per role, a column per phase; a pool's fullest phase is bold."""
    table = plain_table("pool", "role", *found.phases, right=found.phases)
    table.title, table.title_style, table.title_justify = "resident per rank", "dim", "left"
    for peak in found.peaks:
        for role in dict.fromkeys(held.role for held in found.held if held.pool == peak.pool):
            sizes = [found.total(phase, peak.pool, role) for phase in found.phases]
            table.add_row(peak.pool, role, *(gib(size) if size else "" for size in sizes))
        sums = {phase: found.of_pool(phase, peak.pool) for phase in found.phases}
        cells = [Text(gib(size) if size else "", style="bold" if p == peak.phase else "") for p, size in sums.items()]
        device = "GPU" if peak.device == "cuda" else "CPU"
        table.add_row(peak.pool, f"all ({peak.ranks} × {device})", *cells)
    return table


def run_tree(status: RunStatus) -> Tree:
    """Return the run, its stages, and each attempt that failed, was lost or is one of several."""
    run = status.run
    head = Text.assemble(
        (f"{glyph(run.state)} {run.id}", f"bold {style(run.state)}"),
        f"  {status.standing}",
        (f"  {duration(status.seconds)}, {count(status.tokens)} tokens, owner {run.owner}", "dim"),
    )
    root = Tree(branch(head), guide_style="dim")
    if status.image:
        root.add(branch(Text(f"image: {status.image}", style="dim")))
    for stage in status.stages:
        below = root.add(branch(_stage_line(stage)))
        for told in (stage.begun, *stage.drawn, stage.selection):
            if told:
                below.add(branch(Text(told, style="dim")))
        for attempt in stage.attempts:
            if len(stage.attempts) > 1 or attempt.state in (AttemptState.LOST, AttemptState.FAILED):
                below.add(branch(attempt_line(attempt)))
    return root


def run_footer(status: RunStatus) -> list[Text]:
    """Return the reason of the run's state, and the next action."""
    run, driver = status.run, status.driver
    lines = [Text(f"reason: {status.why or run.reason}"), Text(as_typed(f"next:   {status.next_action}"), style="bold")]
    if driver is not None:
        said = f" (the background driver gave the run up: {driver.trouble})" if driver.trouble else ""
        log = f"; log of the background driver{said}: {driver.log}" if driver.log else ""
        lines.insert(1, Text(f"driver: {driver}{log}"))
    return [Text(f"error:  {status.trouble}", style=style("error")), *lines] if status.trouble else lines


def signal_lines(status: RunStatus) -> Iterator[Text]:
    """Yield the signals that people sent to the run, with their reasons."""
    yield from (
        Text(f"signal: {sent.name}, sent by {sent.actor} {ago(sent.at)}" + (f": {sent.reason}" if sent.reason else ""))
        for sent in status.signals
    )


def note_lines(status: RunStatus) -> Iterator[Text]:
    """Yield the run's tags and notes."""
    if status.tags:
        yield Text(f"tags: {', '.join(status.tags)}")
    for note in status.notes:
        if not note.tag:
            words = " ".join(note.text.split()) or "its words were erased"
            yield Text(f"note: {words} ({note.actor}, {ago(note.at)})")


def approval_lines(statuses: Iterable[ApprovalStatus]) -> Iterator[Text]:
    """Yield the approvals and rejections of requests, and whether each counts."""
    for one in statuses:
        what = f"channel {one.request.channel}, {one.request.words} ({digest(one.request.digest)}):"
        for approval in [*one.given, *([one.refusal] if one.refusal else [])]:
            void = f"; does not count: {one.outdated}" if one.outdated else ""
            yield Text(f"approval: {what} {approval.words}, {ago(approval.at)}{void}")
        yield from (
            Text(f"approval: {what} {approval.words}, {ago(approval.at)}; does not count: {one.outdated or why}")
            for approval, why in one.void
        )


def request_lines(statuses: Iterable[ApprovalStatus], cards: Mapping[str, Why]) -> Iterator[Grid | Text]:
    """Yield a channel's requests that wait for approvals, and who may give the approvals.

    Args:
        cards: run id → the run's scores and verdicts, which an approver reads first.
    """
    for one in statuses:
        request = one.request
        yield Text(f"asked:  {request.words}, by {request.actor} {ago(request.at)}: {one.words}", style=style("warn"))
        yield from card_lines(cards.get(request.run_id or ""))
        if "set" in request.asked:
            yield Text(
                as_typed(f"        posttrain channel policy {request.channel} --asked {request.digest[:19]}"),
                style="dim",
            )
        yield Text(f"        {request.command}", style="dim")


def card_lines(found: Why | None) -> Iterator[Grid | Text]:
    """Yield the information about a run that an approver needs: regressions first, then verdicts and scores."""
    if found is not None:
        yield from regression_lines(found.scores)
        yield from verdict_lines(found.report.verdicts if found.report else ())
        yield from score_lines(found.scores)


def warning_lines(status: RunStatus) -> Iterator[Text]:
    """Yield the warnings about a run."""
    yield from (Text(f"warning: {warning}", style=style("warn")) for warning in status.warnings)


def finding_lines(found: Iterable[Finding]) -> Iterator[Text]:
    """Yield the symptoms of the run's stages: the evidence, the cause and the remedy."""
    for one in found:
        yield Text(f"symptom: {one.stage}: {one.symptom} ({one.page})", style=style("warn"))
        yield from (Text(f"  {words}") for words in (one.evidence, f"cause: {one.cause}", f"remedy: {one.remedy}"))


def tracker_lines(trackers: Iterable[TrackerState]) -> Iterator[Text]:
    """Yield the state of each tracker; for a failing tracker, the error and the remedy."""
    for one in trackers:
        if one.in_trouble:
            yield Text(f"warning: tracker {one.kind} ({one.where}): {one.message}", style=style("warn"))
        else:
            said = f" ({one.message})" if one.message else ""
            yield Text(f"tracker: {one.kind} {one.state}: {one.where}{said}", style="dim")


def attempt_line(attempt: AttemptRecord) -> Text:
    """Return a line such as `attempt 2  lost  its supervisor ended`."""
    words = f"attempt {attempt.number}  {attempt.state}  {attempt.message or meaning(attempt.reason)}"
    resumed = "  (resumed from a checkpoint)" if attempt.resume else ""
    stopped = f"  (stopped: {attempt.stop_cause})" if attempt.stop_cause else ""
    return Text(f"{glyph(attempt.state)} {words}{resumed}{stopped}", style=style(attempt.state))


def _stage_line(stage: StageStatus) -> Text:
    row, progress = stage.record, stage.progress
    line = Text.assemble((f"{glyph(row.state)} {row.name}", style(row.state)), (f"  {stage.standing}", "default"))
    if row.cached_from:
        line.append(f"  reused from {row.cached_from}", style="dim")
    elif row.state == StageState.RUNNING:
        live = stage.attempts[-1] if stage.attempts else None
        if live is not None and live.handle and live.executor not in _NEAR:
            line.append(f"  {live.executor} job {live.handle}", style="dim")
        if progress.total and not progress.stale:
            line.append(f"  step {progress.step}/{progress.total}")
        if stage.held_up:
            line.append(f"  {stage.reason}", style=style("warn"))
        elif progress.eta is not None:
            line.append(f"  eta {duration(progress.eta)}", style="dim")
    elif row.state == StageState.SUCCEEDED and stage.attempts:
        line.append(f"  {duration(stage.seconds)}, {count(row.tokens)} tokens", style="dim")
    else:
        line.append(f"  {stage.reason}", style="dim")
    if row.state not in (StageState.SUCCEEDED, StageState.RUNNING):
        line.append(as_typed(f"  next: {stage.next_action}"), style="dim")
    return line


def stage_table(status: RunStatus) -> Grid:
    """Return the stages of an ended run."""
    counts = [Column(title, right=True) for title in ("attempts", "seconds", "tokens")]
    names = [Column(), Column("stage"), Column("kind", spare=True), Column("state")]
    table = Grid([*names, *counts, Column("output", wraps=True), Column(wraps=True)], heads=2)
    for stage in status.stages:
        row = stage.record
        table.row(
            Text(glyph(row.state), style=style(row.state)),
            row.name,
            row.kind,
            row.state,
            str(len(stage.attempts)) if stage.attempts else "",
            f"{stage.seconds:.1f}" if stage.attempts else "",
            count(row.tokens) if row.tokens else "",
            _made(stage),
            Text(f"reused from {row.cached_from}" if row.cached_from else "", style="dim"),
        )
    return table


def _made(stage: StageStatus) -> str:
    best = f", best: {digest(stage.best)}" if stage.best else ""
    return f"{digest(stage.output)}{best}" if stage.output else ""


def history_table(history: Sequence[Move]) -> Grid:
    """Return a table of a channel's moves, newest first."""
    titles = ("release", "action", "model", "of run", "state", "by", "at", "gate report")
    table = Grid([*(Column(title) for title in titles), Column("why", wraps=True)], heads=2)
    for move in history:
        entry, state = move.entry, str(move.state)
        approved = f"approved by {', '.join(move.approved_by)}" if move.approved_by else ""
        table.row(
            str(entry.sequence),
            entry.action,
            digest(entry.model_digest),
            entry.run_id or "-",
            Text(state.replace("_", " "), style=style(state)),
            entry.actor,
            moment(entry.at),
            digest(entry.report_digest),
            "; ".join(filter(None, (move.why, approved))),
        )
    return table


def frozen_by(told: Event) -> str:
    """Return `since 2026-03-01 12:00:00 by user:ann: the fair` for the event of a freeze."""
    why = told.payload.get("why", "")
    return f"since {moment(told.at)} by {told.actor}{f': {why}' if why else ''}"


def channel_lines(
    record: ChannelRecord, frozen: Event | None = None, recall: AssetStatus | None = None
) -> Iterator[Text]:
    """Yield a channel's recall, policy, protection and freeze, if it has them.

    Args:
        frozen: the event of the last freeze.
        recall: the recall of the live model, or of a version from which the model was made.
    """
    if recall:
        words = f"recalled: its live model comes from {recall.kind}:{recall.name}@{recall.version}, {recall.words}"
        yield Text(words, style=style("warn"))
    if record.policy:
        yield Text(as_typed(f"policy: {digest(record.policy)} (posttrain channel policy {record.name})"), style="dim")
    if record.protected:
        words = "protected: releases and changes of its policy wait for another person's approval"
        yield Text(words, style=style("warn"))
    if record.frozen:
        still = "and rollbacks are stopped" if record.frozen == "all" else "rollbacks are allowed"
        words = as_typed(f"frozen: nothing is released to it, {still} (posttrain channel unfreeze {record.name})")
        yield Text(words, style=style("warn"))
        if frozen is not None:
            yield Text(f"        {frozen_by(frozen)}", style="dim")


def release_lines(barred: Sequence[Quarantine], looks: Sequence[Look]) -> Iterator[Text]:
    """Yield a channel's quarantined models, and how often the data that judged its release was evaluated."""
    for one in barred:
        words = f"quarantined: {digest(one.model_digest)}, rolled back by release {one.release} ({one.actor})"
        yield Text(words, style=style("warn"))
    if looks:
        times = f"{len(looks)} time{'s' if len(looks) > 1 else ''}"
        yield Text(f"looks: the data that judged this release was evaluated {times}", style="dim")


def verdict_lines(verdicts: Iterable[Verdict]) -> Iterator[Text]:
    """Yield one line per gate: its outcome, and a sentence with its numbers."""
    for verdict in verdicts:
        passed = verdict.outcome is Outcome.PASS
        line = Text.assemble(
            (f"{glyph('succeeded' if passed else 'failed')} {verdict.gate:16s}", style(verdict.outcome))
        )
        line.append(f" {verdict.outcome.upper():13s}", style=f"bold {style(verdict.outcome)}")
        line.append(verdict.reason)
        yield line.append(f" ({verdict.test})", style="dim") if not passed else line


def regression_lines(scores: Scores) -> Iterator[Text]:
    """Yield the metrics that are significantly worse than before; views show these lines first."""
    yield from (Text(f"warning: {regression}", style=style("error")) for regression in scores.regressions)


def score_lines(scores: Scores) -> Iterator[Grid | Text]:
    """Yield the scores before and after training, with intervals; below them, the names of the methods."""
    yield from (Text(f"score left out: {trouble}", style=style("warn")) for trouble in scores.troubles)
    if not scores.rows:
        return
    yield _score_table(scores) if scores.trained else _value_table(scores)
    yield Text(f"{100 * scores.confidence:g} % intervals: {'; '.join(scores.methods)}", style="dim")
    if scores.lone:
        yield Text(
            "before: add an evaluate stage of the starting model, or a gate against another model",
            style="dim",
        )


def _score_table(scores: Scores) -> Grid:
    items, words = Column("items", right=True), [Column(title) for title in ("before", "after", "difference")]
    table = Grid([Column("score"), items, *words, Column(wraps=True)])
    for row in scores.rows:
        label, after = f"{row.metric}  ({row.of})", str(row.estimate)
        if not row.before:
            none = Text("not measured" if row.trained else "", style="dim")
            table.row(label, str(row.estimate.items), none, after, "", "")
        for before in row.before:
            change = str(before.paired) if before.paired else Text(f"not paired: {before.unpaired}", style="dim")
            against = Text(f"before: {before.of}", style="dim")
            table.row(label, str(row.estimate.items), str(before.estimate), after, change, against)
            label = after = ""
    return table


def _value_table(scores: Scores) -> Grid:
    """Return the scores of a run that trained nothing."""
    table = Grid([Column("score"), Column("items", right=True), Column("value")])
    for row in scores.rows:
        table.row(f"{row.metric}  ({row.of})", str(row.estimate.items), str(row.estimate))
    return table


def difference_lines(differences: Iterable[Difference]) -> Iterator[Text]:
    """Yield every field that differs, with notes on changed assets."""
    for difference in differences:
        yield Text(difference.path, style="bold")
        yield Text(f"  - {excerpt(difference.before, _NOTE)}", style="red")
        yield Text(f"  + {excerpt(difference.after, _NOTE)}", style="green")
        yield from (Text(f"    {excerpt(note, _NOTE)}", style="dim") for note in difference.notes)


def plan_tree(view: PlanView, *, verbose: bool) -> Tree:
    """Return the stage graph with inputs, cached results and cost; `verbose`: include all sizes."""
    manifest = view.manifest
    root = Tree(branch(Text(f"{manifest.name}  {manifest.digest}", style="bold")), guide_style="dim")
    if manifest.image:
        root.add(branch(Text(f"image: {manifest.image}", style="dim")))
    for stage in view.stages:
        state = f"cached: {stage.cached_from}" if stage.cached_from else _cost(stage)
        tint = "green" if stage.cached_from else "default"
        kind = stage.kind + "".join(f" ({package})" for package in stage.packages)
        head = Text.assemble((stage.name, "bold"), (f"  {kind}", "cyan"), (f"  {state}", tint))
        below = root.add(branch(head))
        inputs = stage.inputs if kind_of(stage.kind).driver is Driver.JOB else ()  # the tree shows other inputs
        for slot, name, full in inputs:
            below.add(branch(Text(f"{slot}: {name}" + (f"  {digest(full)}" if full else ""), style="dim")))
        for place, one in servers_of(manifest.stage(stage.name).params).items():
            below.add(branch(Text(f"{place}: {one.get('model', 'model')} at {one['url']}  not pinned", style="dim")))
        if stage.passes:
            below.add(branch(Text(str(stage.passes), style="dim")))
        if stage.flavour:
            below.add(branch(Text(f"runs on flavour {stage.flavour}", style="dim")))
        if trained := manifest.stage(stage.name).params.get("adapter"):
            below.add(branch(Text(_adapted(trained), style="dim")))
        for shown in (*placed(stage), *sized(stage, chosen=verbose)):
            below.add(branch(shown) if isinstance(shown, Text) else shown)
    return root


def _adapted(adapter: Mapping[str, Any]) -> str:
    """Return the adapter that a stage trains, and of what its base is."""
    lora, kind = adapter["lora"], adapter.get("quantize")
    targets = lora["targets"] if isinstance(lora["targets"], str) else ", ".join(lora["targets"])
    base = f"base frozen in {kind}" if kind else "base frozen"
    return f"adapter: lora, rank {lora['rank']}, alpha {lora['alpha']:g}, targets {targets}; {base}"


def plan_lines(view: PlanView, *, verbose: bool) -> Iterator[Text]:
    """Yield totals, the power of gates, warnings and an existing run of the manifest; `verbose`: include evaluators."""
    known = [stage.estimate for stage in view.stages]
    tokens, seconds = [e.tokens for e in known], [e.seconds for e in known]
    total = count(sum(t for t in tokens if t is not None)) + (" and more" if None in tokens else "")
    unknown = [stage.name for stage in view.stages if stage.estimate.seconds is None]
    time = duration(sum(s for s in seconds if s is not None)) if None not in seconds else None
    yield Text(f"estimate: {total} tokens, " + (time or f"time unknown (no history yet for {', '.join(unknown)})"))
    for note in view.power:
        power = f"{note.power:.0%}" if note.power is not None else "unknown"
        needed = f", {note.needed} items give 80%" if note.needed is not None else ""
        yield Text(
            f"power:    gate {note.gate}: {power} on {note.items} items{needed} ({note.assumption}); {note.test}"
        )
    yield from _stall_lines(view)
    yield from (Text(f"gate:     {name}: {whose}") for name, whose in view.gates)
    if view.approvals:
        needed = f"{view.approvals} approval{'s' * (view.approvals != 1)}"
        yield Text(f"approve:  the release waits for {needed} (approvers: {', '.join(view.approvers)})")
    for suite, evaluator in view.evaluators if verbose else ():
        yield Text(f"measure:  suite {suite}: evaluator {evaluator}", style="dim")
    yield from (Text(f"tracker:  {kind}: {where}") for kind, where in view.trackers)
    yield from (Text(f"warning:  {warning}", style="yellow") for warning in view.warnings)
    if view.existing:
        yield Text(
            f"next:     this manifest was submitted: run {view.existing.id} ({view.existing.state})", style="bold"
        )


def _stall_lines(view: PlanView) -> Iterator[Text]:
    """Yield the time without progress after which a job counts as hung; stages with the same limit share a line."""
    limits: dict[float, list[str]] = {}
    for stage in view.stages:
        if stage.stall_after is not None and not stage.cached_from:
            limits.setdefault(stage.stall_after, []).append(stage.name)
    for limit, names in limits.items():
        whose = f" in {', '.join(names)}" if len(limits) > 1 else ""
        yield Text(f"stall:    a job{whose} is retried if it reports no progress for {span(limit)}", style="dim")


def _cost(stage: StagePlan) -> str:
    estimate = stage.estimate
    if estimate.tokens is None or not (estimate.tokens or estimate.seconds):
        return estimate.basis
    seconds = f", {duration(estimate.seconds)}" if estimate.seconds is not None else ""
    return f"about {count(estimate.tokens)} tokens{seconds} ({estimate.basis})"
