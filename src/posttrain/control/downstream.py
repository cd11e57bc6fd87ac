"""The downstream of bytes or of a run: every stage, version and release that used these, directly or indirectly."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from posttrain.control.lineage import Node
from posttrain.decision.releases import release_states
from posttrain.domain.lifecycle import ReleaseState
from posttrain.domain.records import Edge, release_end, release_of, run_end, stage_end, stage_of
from posttrain.store.hosts import Ledger
from posttrain.store.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class Downstream:
    """The tree, and the names of its runs and releases."""

    tree: Node
    runs: tuple[str, ...]  # runs whose stages used the root
    releases: tuple[str, ...]  # channel:NAME@RELEASE
    live: tuple[str, ...]  # channels that point at a model made from the root
    left_off: int = 0  # number of nodes that exceed the limit and are not in the tree

    @property
    def words(self) -> str:
        """One line, such as `used by 3 runs; 2 releases, live on prod`."""
        if not self.runs and not self.releases:
            return "nothing was made from it"
        runs = f"used by {len(self.runs)} run{'s' * (len(self.runs) != 1)}"
        count = len(self.releases)
        shipped = f"{count} release{'s' * (count != 1)}, live on {', '.join(self.live) or 'no channel'}"
        more = f"; {self.left_off} more distant objects are left out (--limit)" if self.left_off else ""
        return f"{runs}; {shipped if count else 'never released'}{more}"


def of_bytes(ledger: Ledger, digest: str, name: str = "", limit: int = 0) -> Downstream:
    """Return everything that used these bytes under any name.

    Args:
        name: the name that is shown for the bytes.
        limit: the maximum number of nodes in the tree; the nearest nodes have priority.
    """
    with ledger.snapshot() as now:
        held = tuple(("held by", hold.holder) for hold in now.holds(digest))
        kind = name.partition(":")[0] if name else "artifact"
        return _downstream(now, Node(kind, name or digest, digest, None, held), now.uses_of_bytes(digest), limit)


def of_run(ledger: Ledger, run_id: str, limit: int) -> Downstream:
    """Return everything that used a run or its outputs; `limit`: the maximum number of nodes in the tree."""
    with ledger.snapshot() as now:
        run = now.run(run_id)
        ends = [run_end(run.id), *(stage_end(run.id, stage.name) for stage in now.stages(run.id))]
        own = [Edge(run_end(run.id), "", end, "", "") for end in ends[1:]]
        return _downstream(
            now, Node("run", run.id, None, details=(("state", run.state),)), [*own, *now.uses(*ends)], limit
        )


def _downstream(now: Snapshot, root: Node, first: Sequence[Edge], limit: int) -> Downstream:
    """Return everything made from a root, by breadth-first search: the number of statements grows with the depth."""
    by: dict[str, Edge] = {}  # consumer → the first edge that led to it
    order: dict[str, list[str]] = {"": []}  # producer → its new consumers
    found = [("", edge) for edge in first]
    while found:
        new: list[str] = []
        for above, edge in found:
            if edge.consumer not in by:
                by[edge.consumer] = edge
                order.setdefault(above, []).append(edge.consumer)
                new.append(edge.consumer)
        found = [(edge.producer, edge) for edge in now.uses(*new)]
    return _told(now, root, by, order, limit)


def _told(now: Snapshot, root: Node, by: dict[str, Edge], order: Mapping[str, Sequence[str]], limit: int) -> Downstream:
    places = {end: place for end in by if (place := stage_of(end))}
    runs = tuple(sorted({run_id for run_id, _ in places.values()}))
    rows = {stage_end(row.run_id, row.name): row for row in now.stages(*runs)}
    releases = {end: release for end in by if (release := release_of(end))}
    states = _states(now, {channel for channel, _ in releases.values()})
    digests = {edge.producer: edge.digest for edge in now.made(*(by.keys() - places.keys() - releases.keys()))}
    nodes: dict[str, Node] = {}
    for end in reversed(list(by)[:limit]):  # in reverse: descendants were found later and are built first
        below = tuple(nodes[one] for one in order.get(end, ()) if one in nodes)
        used = (("as", by[end].slot),) if by[end].slot else ()
        if end in places:
            row = rows.get(end)
            told = (("kind", row.kind), ("state", row.state)) if row else ()
            nodes[end] = Node("stage", "/".join(places[end]), None, None, (*used, *told), below)
        elif end in releases:
            channel, sequence = releases[end]
            nodes[end] = Node(
                "release", channel, None, None, (("release", str(sequence)), ("state", states[end])), below
            )
        else:
            nodes[end] = Node(end.partition(":")[0], end, digests.get(end), None, used, below)
    tree = replace(root, children=tuple(nodes[end] for end in order[""] if end in nodes))
    ends = tuple(release_end(*place) for place in sorted(releases.values()))
    live = {channel for end, (channel, _) in releases.items() if states[end] == ReleaseState.LIVE}
    return Downstream(tree, runs, ends, tuple(sorted(live)), len(by) - len(nodes))


def _states(now: Snapshot, channels: Iterable[str]) -> dict[str, str]:
    """Return the state of every release of these channels, by release."""
    states: dict[str, str] = {}
    for channel in sorted(channels):
        history = now.history(channel)
        found = release_states(history)
        states |= {
            release_end(channel, entry.sequence): str(found.get(entry.model_digest, entry.action)) for entry in history
        }
    return states
