"""`plan` and `lock`: look before a process starts."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from posttrain.cli.console import Output, OutputOption, console, emit_json, lazily, open_control, say
from posttrain.domain.overrides import single
from posttrain.planner.feasibility import gib
from posttrain.planner.residency import Residency

if TYPE_CHECKING:
    from posttrain.api.values import StagePlan

FileArgument = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="A run file.")]
SeedOption = Annotated[int | None, typer.Option(help="Instead of the file's seed.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="PATH=VALUE",
        help="Instead of the file's, e.g. grpo.steps=100; repeat it.",
        autocompletion=lazily("fields"),
    ),
]


def changes(seed: int | None, sets: Sequence[str] | None) -> str:
    """The options that change a run file, as typed."""
    words = [f"--seed {seed}"] if seed is not None else []
    return "".join(f" {word}" for word in (*words, *(f"--set {shlex.quote(one)}" for one in sets or ())))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (plan, lock):
        app.command(command.__name__)(command)


def plan(
    file: FileArgument, seed: SeedOption = None, sets: SetOption = None, output: OutputOption = Output.TEXT
) -> None:
    """Validate a run file; show stages, cache, cost, power. Writes nothing."""
    control = open_control()
    view = control.plan(file, seed=seed, setting=single(sets or ()))
    control.close()
    if output is Output.JSON:
        emit_json(view.to_json())
        return
    from posttrain.cli.screens import plan_lines, plan_tree

    screen = console()
    screen.print(plan_tree(view))
    for line in plan_lines(view):
        screen.print(line)
    if not view.existing:
        say(f"next:     {_first(view.changes, f'posttrain run {file}{changes(seed, sets)}')}")


def lock(
    file: FileArgument,
    out: Annotated[
        Path | None, typer.Option(help="A name ending in .lock.json; by default RUN.lock.json beside the run file.")
    ] = None,
    seed: SeedOption = None,
    sets: SetOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write the immutable manifest. The SHA-256 of the file is the run's identity."""
    control = open_control()
    planned = control.lock(file, seed=seed, setting=single(sets or ()))
    manifest = planned.manifest
    control.close()
    path = out or planned.place
    planned.write(path)
    if output is Output.JSON:
        emit_json({"digest": manifest.digest, "path": str(path)})
    else:
        say(f"{manifest.digest}  {path}", *(f"warning: {warning}" for warning in planned.warnings))
        again = [f"{change} and lock again" for change in planned.changes[-1:]]
        say(f"next: {_first((*planned.changes[:-1], *again), f'posttrain run {path}')}")


def _first(changes: Sequence[str], command: str) -> str:
    """What to do next: the command, after what should be changed before it."""
    return f"{'; '.join(changes)}; then {command}" if changes else command


def sized(stage: StagePlan) -> Iterator[Text]:
    """What was chosen for a stage that computes, and why."""
    for size in () if stage.cached_from else stage.sizes:
        whose = "" if size.chosen else " (as written)"
        yield Text(f"{size.name}: {size.said}{whose}" + (f": {size.why}" if size.why else ""), style="dim")


def placed(stage: StagePlan) -> Iterator[Text | Table]:
    """Where a training stage runs: one line in one process, else pools and what is resident in them when."""
    if stage.load is None or stage.cached_from:
        return
    placement, found = stage.load.placement, stage.residency
    if stage.load.correction:
        yield Text(f"correction: {stage.load.correction}: the policy reads every response once more", style="dim")
    if placement.is_inline and stage.load.ray_address is None:
        for peak in found.peaks if found else ():
            device = " of its GPU" if peak.device == "cuda" else ""
            yield Text(f"memory: about {gib(peak.bytes)}{device} at most, in {peak.phase}", style="dim")
        if "reward" in stage.load.roles and (scoring := placement.pool_of("reward").ranks) > 1:
            yield Text(f"reward: {scoring} processes score side by side", style="dim")
        return
    where = f" at {stage.load.ray_address}" if stage.load.ray_address else ""
    for name, pool in placement.pools(stage.load.roles).items():
        given = pool.resources
        devices = f", {given.gpus} {given.kind or 'gpus'}" if given.gpus else ""
        ranks = f"{pool.ranks} rank{'s' if pool.ranks > 1 else ''}"
        yield Text(f"pool {name}{where}: {ranks}{devices}: {', '.join(pool.roles)}", style="dim")
    if stage.load.lag:
        ahead = f"batch t is sampled by the policy after t - {stage.load.lag} steps, while another one is trained"
        yield Text(f"lag {stage.load.lag}: {ahead}", style="dim")
    if stage.load.streams:
        yield Text("stream_gradients: groups are trained on as they end, weights change once a step", style="dim")
    if found and found.peaks:
        yield _residency_table(found)


def _residency_table(found: Residency) -> Table:
    """Bytes of one rank: a row for each role, a column for each phase; the fullest phase of a pool is bold."""
    table = Table(box=None, pad_edge=False, header_style="dim", title="resident per rank", title_style="dim")
    table.title_justify = "left"
    for title in ("pool", "role", *found.phases):
        table.add_column(title, justify="left" if title in ("pool", "role") else "right", no_wrap=True)
    for peak in found.peaks:
        for role in dict.fromkeys(held.role for held in found.held if held.pool == peak.pool):
            sizes = [found.total(phase, peak.pool, role) for phase in found.phases]
            table.add_row(peak.pool, role, *(gib(size) if size else "" for size in sizes))
        sums = {phase: found.of_pool(phase, peak.pool) for phase in found.phases}
        cells = [Text(gib(size) if size else "", style="bold" if p == peak.phase else "") for p, size in sums.items()]
        device = "GPU" if peak.device == "cuda" else "CPU"
        table.add_row(peak.pool, f"all ({peak.ranks} × {device})", *cells)
    return table
