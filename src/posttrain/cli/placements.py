"""A stage of a plan: where its roles run, what is resident when, and the sizes that were chosen for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from posttrain.planner.feasibility import gib
from posttrain.planner.residency import Residency

if TYPE_CHECKING:
    from posttrain.api.values import StagePlan


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
