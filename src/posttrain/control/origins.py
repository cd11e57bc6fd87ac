"""What stages of runs used and made, and what that is registered as: read from edges, once for each run."""

from __future__ import annotations

from collections.abc import Iterable

from posttrain.control.stores import Stores
from posttrain.domain.contracts import BEST, MODEL
from posttrain.domain.edges import ORIGIN, REUSED, release_of, stage_end, stage_of
from posttrain.domain.manifest import model_output
from posttrain.domain.records import Asset, Edge, StageRecord
from posttrain.store.snapshot import Snapshot

Made = tuple[StageRecord, str]  # a stage, and which of its outputs


class Origins:
    """Edges of one moment. How many statements it takes depends on the runs that are asked about, not on others."""

    def __init__(self, stores: Stores, now: Snapshot) -> None:
        self.stores, self.now = stores, now
        self._stages: dict[str, dict[str, StageRecord]] = {}
        self._used: dict[str, list[Edge]] = {}
        self._made: dict[str, dict[str, str]] = {}
        self._assets: dict[str, list[Asset]] = {}
        self._forms: dict[str, str] = {}
        self._status: dict[tuple[str, str, int], str] | None = None

    def stages(self, run_id: str) -> list[StageRecord]:
        """By position, with what they used and made."""
        if run_id not in self._stages:
            rows = {row.name: row for row in self.now.stages(run_id)}
            ends = [stage_end(run_id, name) for name in rows]
            used, made = self.now.used(*ends), self.now.made(*ends)
            for edge in made:
                self._made.setdefault(edge.producer, {})[edge.output] = edge.digest
            self._take_used(used)
            self.look_up(edge.digest for edge in [*used, *made])
            self._stages[run_id] = rows
        return list(self._stages[run_id].values())

    def used(self, run_id: str, stage: str) -> list[Edge]:
        """What a stage used, by slot."""
        self.stages(run_id)
        return self._used.get(stage_end(run_id, stage), [])

    def made(self, run_id: str, stage: str) -> dict[str, str]:
        """Output → digest of what a stage made."""
        self.stages(run_id)
        return self._made.get(stage_end(run_id, stage), {})

    def of_asset(self, asset: Asset) -> list[Edge]:
        """What a registered version came from."""
        self.look_up([asset.digest])
        return self._used.get(asset.ref, [])

    def assets(self, digest: str) -> list[Asset]:
        """What these bytes are registered as."""
        self.look_up([digest])
        return self._assets[digest]

    def status(self, asset: Asset) -> str:
        """`recalled by user:ann: a licence ran out`; empty where nobody said anything of a version."""
        if self._status is None:
            self._status = {(one.kind, one.name, one.version): one.words for one, _ in self.now.asset_status()}
        return self._status.get((asset.kind, asset.name, asset.version), "")

    def form(self, digest: str) -> str:
        """`file` or `tree`."""
        self.look_up([digest])
        return self._forms.get(digest, "file")

    def look_up(self, digests: Iterable[str]) -> None:
        """Read what is known of bytes, of all of them together."""
        new = [digest for digest in dict.fromkeys(digests) if digest and digest not in self._assets]
        if not new:
            return
        self._assets |= {digest: [] for digest in new}
        for asset in self.now.assets_by_digest(*new):
            self._assets[asset.digest].append(asset)
        self._forms |= {artifact.digest: artifact.form for artifact in self.now.artifacts(*new)}
        self._take_used(self.now.used(*(asset.ref for digest in new for asset in self._assets[digest])))

    def _take_used(self, found: Iterable[Edge]) -> None:
        for edge in found:
            if edge.slot == REUSED:  # the same result: what it came from, this stage was bound to as well
                continue
            self._used.setdefault(edge.consumer, []).append(edge)

    def maker(self, edge: Edge) -> Made | None:
        """The stage whose model an edge hands on, and as which output; of a release's the one that the run releases."""
        release = release_of(edge.producer)
        if release:
            entry = next((e for e in self.now.history(release[0]) if e.sequence == release[1]), None)
            return self.that_made(entry.run_id, edge.digest) if entry else None
        asset = next((asset for asset in self.assets(edge.digest) if asset.ref == edge.producer), None)
        if asset:
            return self.trained(asset)
        found = stage_of(edge.producer)
        if not found:
            return None
        row = next((row for row in self.stages(found[0]) if row.name == found[1]), None)
        output = edge.output or MODEL
        return (row, output) if row and output in self.made(*found) else None

    def trained(self, asset: Asset) -> Made | None:
        """The stage that trained a registered version; None: a person registered it."""
        origin = next((edge for edge in self.of_asset(asset) if edge.slot == ORIGIN), None)
        return self.maker(origin) if origin and stage_of(origin.producer) else None

    def that_made(self, run_id: str | None, digest: str) -> Made | None:
        """The stage of a run that made these weights, and as which output: of several (one that changed nothing makes
        the same as the one before it, and a last model may be the best) what the run releases, else the last.
        """
        if run_id is None:
            return None
        rows = self.stages(run_id)
        made = [(row, out) for row in rows for out in (BEST, MODEL) if self.made(run_id, row.name).get(out) == digest]
        release = self.stores.manifest(self.now.run(run_id)).release
        wanted = model_output(release.model) if release else None
        named = [(row, output) for row, output in made if (row.name, output) == wanted]
        return next(iter([*named, *reversed(made)]), None)
