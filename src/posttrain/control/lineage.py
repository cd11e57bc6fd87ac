"""Lineage of models, from released weights back to prompts, reward source, base model and manifest; and downstream.

A lineage is read from the edges between stages and bytes, once for each run, and from the registrations of the bytes.
The downstream of bytes or of a run is every stage, version and release that used these, directly or indirectly.

Models made by runs of this workspace have names: `channel:prod`, `channel:prod@3`, `run:sort-b0ed9b49/sft`,
`run:sort-b0ed9b49/grpo/best`, `model:sort/sft@2`. A name whose target can change (a channel, a run's name) is pinned
when the run file is read: the manifest contains the release or the run id, and the name as written.

A trained model is also a version of an asset: `model:RUN/STAGE@1`, `model:RUN/STAGE/best@1`. Asset names given by
people contain no slash, so the two kinds of names cannot collide. RUN is the run's name, not its id: repeated runs of
one file make versions of one asset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from posttrain.control.approvals import owners
from posttrain.control.channels import policy_of, unknown_channel
from posttrain.control.release_plan import selected
from posttrain.control.verdicts import read_report
from posttrain.data.imports import begins_at
from posttrain.data.refs import AssetRef, Source
from posttrain.decision.releases import live_before, release_states
from posttrain.domain.approvals import APPROVED, Terms
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, nearest
from posttrain.domain.gates import Verdict
from posttrain.domain.ids import canonical
from posttrain.domain.kinds import BEST, METRICS, MODEL, REPORT, kind_of
from posttrain.domain.lifecycle import ReleaseState
from posttrain.domain.manifest import NAMED, InputRef, Manifest, model_output
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import (
    IMPORT,
    ORIGIN,
    PARENT,
    REUSED,
    Asset,
    Edge,
    ReleaseEntry,
    RunRecord,
    StageRecord,
    release_end,
    release_of,
    run_end,
    stage_end,
    stage_of,
)
from posttrain.domain.roles import is_frozen_input, servers_of
from posttrain.domain.sinks import RUN_ENVIRONMENT
from posttrain.store.external import URI, VERSION
from posttrain.store.ledger import Ledger, Stores
from posttrain.store.snapshot import Snapshot
from posttrain.store.trees import read_json

Made = tuple[StageRecord, str]  # a stage and one of its outputs
KIND = "model"


class Origins:
    """The edges of one snapshot. The number of SQL statements depends only on the number of queried runs."""

    def __init__(self, stores: Stores, now: Snapshot) -> None:
        self.stores, self.now = stores, now
        self._stages: dict[str, dict[str, StageRecord]] = {}
        self._used: dict[str, list[Edge]] = {}
        self._made: dict[str, dict[str, str]] = {}
        self._assets: dict[str, list[Asset]] = {}
        self._forms: dict[str, str] = {}
        self._status: dict[tuple[str, str, int], str] | None = None
        self._packages: dict[str, dict[str, list[str]]] = {}

    def stages(self, run_id: str) -> list[StageRecord]:
        """Return a run's stages by position; also reads the edges of their inputs and outputs."""
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

    def params(self, stage: StageRecord) -> Mapping[str, Any]:
        """Return a stage's parameters."""
        return self.stores.manifest(self.now.run(stage.run_id)).stage(stage.name).params

    def used(self, run_id: str, stage: str) -> list[Edge]:
        """Return the edges of a stage's inputs."""
        self.stages(run_id)
        return self._used.get(stage_end(run_id, stage), [])

    def made(self, run_id: str, stage: str) -> dict[str, str]:
        """Return the digests of a stage's outputs, by name."""
        self.stages(run_id)
        return self._made.get(stage_end(run_id, stage), {})

    def of_asset(self, asset: Asset) -> list[Edge]:
        """Return the edges to the origins of a registered version."""
        self.look_up([asset.digest])
        return self._used.get(asset.ref, [])

    def assets(self, digest: str) -> list[Asset]:
        """Return the registrations of these bytes."""
        self.look_up([digest])
        return self._assets[digest]

    def status(self, asset: Asset) -> str:
        """Return a text such as `recalled by user:ann: a licence ran out`; empty for a version without a status."""
        if self._status is None:
            self._status = {(one.kind, one.name, one.version): one.words for one, _ in self.now.asset_status()}
        return self._status.get((asset.kind, asset.name, asset.version), "")

    def packages(self, stage: StageRecord, name: str) -> str:
        """Return the imports of a reward or dataflow in a stage's run (`httpx 0.28.1, sympy 1.13`); empty: unknown."""
        run_id = (stage.cached_from or stage.run_id).partition("/")[0]
        if run_id not in self._packages:
            pinned = self.now.events_about(run_id, RUN_ENVIRONMENT)
            self._packages[run_id] = pinned[-1].payload["packages"] if pinned else {}
        return ", ".join(self._packages[run_id].get(name, ()))

    def form(self, digest: str) -> str:
        """Return `file` or `tree`."""
        self.look_up([digest])
        return self._forms.get(digest, "file")

    def look_up(self, digests: Iterable[str]) -> None:
        """Read the registrations, forms and origins of bytes, together for all digests."""
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
            if edge.slot == REUSED:  # the stage reused an equal result, which has the same inputs
                continue
            self._used.setdefault(edge.consumer, []).append(edge)

    def maker(self, edge: Edge) -> Made | None:
        """Return the stage and output of the model to which an edge refers; None: no stage made the model."""
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
        """Return the stage that trained a registered version; None: a person registered the version."""
        origin = next((edge for edge in self.of_asset(asset) if edge.slot == ORIGIN), None)
        return self.maker(origin) if origin and stage_of(origin.producer) else None

    def that_made(self, run_id: str | None, digest: str) -> Made | None:
        """Return the stage and output of a run that made these weights.

        Several outputs may have these weights: a stage that changes nothing repeats its input, and the last model may
        be the best. Then the output that the run releases is returned, else the last output.
        """
        if run_id is None:
            return None
        rows = self.stages(run_id)
        made = [(row, out) for row in rows for out in (BEST, MODEL) if self.made(run_id, row.name).get(out) == digest]
        release = self.stores.manifest(self.now.run(run_id)).release
        wanted = model_output(release.model) if release else None
        named = [(row, output) for row, output in made if (row.name, output) == wanted]
        return next(iter([*named, *reversed(made)]), None)


@dataclass(frozen=True, slots=True)
class MadeModel:
    """The model that a name denotes: `MadeModel("channel:prod@3", "sha256:…", "sort-b0ed9b49", "grpo", "prod", 3)`."""

    name: str  # a pinned name, so it always denotes the same model
    digest: str
    run_id: str | None  # None: the name denotes a release that no run made
    stage: str | None
    channel: str | None = None
    release: int | None = None
    output: str = MODEL  # the stage's output

    @property
    def word(self) -> str | None:
        """The name of the model in a run file: `grpo` or `grpo/best`."""
        return self.stage and InputRef(source="stage", name=self.stage, output=self.output).word

    def pinned(self, word: str) -> InputRef:
        """Return the model as an input of a stage; `word`: the name as written."""
        meta = {} if word == self.name else {NAMED: word}
        return InputRef(source="asset", name=self.name, digest=self.digest, form="tree", meta=meta)


def made_model(stores: Stores, ref: AssetRef) -> MadeModel:
    """Return the model that a channel points at, that a run's stage made, or that is a version of a trained asset.

    Raises:
        NotFoundError: there is no such channel, release, run or stage; the stage has no model yet; the bytes are
            missing.
        InputError: the prefix of run ids is ambiguous, or the output is invalid.
    """
    found = {Source.CHANNEL: _released, Source.RUN: _of_run, Source.REGISTRY: _trained}[ref.source](stores, ref)
    if not stores.blobs.has(found.digest):
        raise NotFoundError(f"{found.name}: its bytes ({found.digest}) are missing from the store; restore them")
    return found


def _released(stores: Stores, ref: AssetRef) -> MadeModel:
    history = stores.ledger.history(ref.name)
    if not history:
        hint = nearest(ref.name, stores.ledger.channels()) or "; the first release of a run creates it"
        raise NotFoundError(f"{ref}: there is no channel {ref.name!r}{hint}")
    numbered = next((e for e in history if e.sequence == ref.version), None)
    entry = numbered if ref.version else stores.ledger.channel(ref.name)
    if entry is None:
        raise NotFoundError(
            f"{ref}: channel {ref.name} has no release {ref.version}; the latest is {history[-1].sequence}"
        )
    with stores.ledger.snapshot() as now:
        made = Origins(stores, now).that_made(entry.run_id, entry.model_digest)
    name = f"channel:{ref.name}@{entry.sequence}"
    stage, output = (made[0].name, made[1]) if made else (None, MODEL)
    return MadeModel(name, entry.model_digest, entry.run_id, stage, ref.name, entry.sequence, output)


def _trained(stores: Stores, ref: AssetRef) -> MadeModel:
    asset = stores.ledger.asset(ref.kind, ref.name, ref.version)
    run, stage, output = (str(asset.meta[key]) for key in ("run", "stage", "output"))
    return MadeModel(asset.ref, asset.digest, run, stage, output=output)


def _of_run(stores: Stores, ref: AssetRef) -> MadeModel:
    run = stores.ledger.find_run(ref.name)
    manifest = stores.manifest(run)
    makers = [stage.name for stage in manifest.stages if MODEL in stage.outputs]
    word = ref.stage or _main_stage(manifest)
    try:
        name, output = model_output(word)
    except InputError as error:
        raise InputError(f"{ref}: {error}") from error
    if name not in makers:
        raise NotFoundError(f"{ref}: run {run.id} has no stage {word!r} that makes a model{nearest(word, makers)}")
    if output not in manifest.stage(name).outputs:
        raise NotFoundError(
            f"{ref}: stage {name} of run {run.id} has no best model, since its keep_best is not set; {_way(run)}"
        )
    row = next(stage for stage in stores.ledger.stages(run.id) if stage.name == name)
    if output not in row.outputs:
        raise NotFoundError(f"{ref}: stage {name} of run {run.id} has produced no model ({row.state}); {_way(run)}")
    return MadeModel(f"run:{run.id}/{word}", row.outputs[output]["digest"], run.id, name, output=output)


def _way(run: RunRecord) -> str:
    return f"see posttrain why {run.id}, or name another stage: run:{run.id}/STAGE"


def _main_stage(manifest: Manifest) -> str:
    """Return the main model of a run: the released model, else the model of the last stage that trains a policy."""
    if manifest.release:
        return manifest.release.model
    makers = [stage for stage in manifest.stages if "model" in stage.outputs]
    helpers = {ref.name for stage in makers for slot, ref in stage.inputs.items() if is_frozen_input(slot)}
    policies = [stage.name for stage in makers if stage.name not in helpers and not kind_of(stage.kind).scores]
    return (policies or [stage.name for stage in makers] or [""])[-1]


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a lineage: its kind, name, digest, and the nodes that it was made from."""

    kind: str  # release | model | stage | dataset | reward | history | manifest | report | evaluation | import …
    name: str
    digest: str | None
    form: str | None = None  # file | tree, if the node is stored under `digest`
    details: tuple[tuple[str, str], ...] = ()
    children: tuple[Node, ...] = ()

    def walk(self) -> Iterator[Node]:
        """Yield this node and all its descendants."""
        yield self
        for child in self.children:
            yield from child.walk()


def release_lineage(stores: Stores, channel: str) -> Node:
    """Return the lineage of a channel's live release.

    Raises:
        NotFoundError: the channel is unknown or has no release.
    """
    with stores.ledger.snapshot() as now:
        live = now.channel(channel)
        if live is None:
            if now.channel_record(channel).generation:
                raise NotFoundError(f"channel {channel} has no release yet")
            raise unknown_channel(channel, [record.name for record in now.channel_records()])
        return _release_node(Origins(stores, now), live)


def run_lineage(stores: Stores, run_id: str) -> Node:
    """Return the lineage of a run, starting at the last stage that made a model."""
    with stores.ledger.snapshot() as now:
        origins, run = Origins(stores, now), now.run(run_id)
        stages = [stage for stage in origins.stages(run.id) if MODEL in origins.made(run.id, stage.name)]
        release = stores.manifest(run).release
        name, output = model_output(release.model) if release else ("", MODEL)
        made = [(stage, output if stage.name == name else MODEL) for stage in stages[-1:]]
        weights = [origins.made(run.id, stage.name)[out] for stage, out in made]
        decided = (node for digest in weights for node in _decided(origins, run.id, digest))
        children = (*(_stage_node(origins, *one) for one in made), *decided, _manifest_node(origins, run.id))
        return Node("run", run.id, None, children=children, details=(("state", run.state),))


def model_lineage(stores: Stores, made: MadeModel) -> Node:
    """Return the lineage of a model made in this workspace; for a release, with its report and evaluations."""
    with stores.ledger.snapshot() as now:
        origins = Origins(stores, now)
        history = now.history(made.channel) if made.channel else []
        entry = next((entry for entry in history if entry.sequence == made.release), None)
        if entry:
            return _release_node(origins, entry)
        node = _model_node(origins, made.digest, made.run_id)
        if made.run_id is None:
            return node
        decided = _decided(origins, made.run_id, made.digest)
        return replace(node, children=(*node.children, *decided, _manifest_node(origins, made.run_id)))


def asset_lineage(stores: Stores, asset: Asset) -> Node:
    """Return the lineage of a registered version."""
    with stores.ledger.snapshot() as now:
        origins = Origins(stores, now)
        made = origins.trained(asset)
        if not made:
            return _asset_node(origins, asset.digest, asset.ref, asset.kind)
        node = _stage_node(origins, *made)
        return replace(node, children=(*node.children, _manifest_node(origins, made[0].run_id)))


def _release_node(origins: Origins, entry: ReleaseEntry) -> Node:
    children: list[Node] = [_model_node(origins, entry.model_digest, entry.run_id)]
    if entry.report_digest:
        children.append(_report_node(origins.stores.blobs, entry.report_digest))
    if entry.run_id:
        children += _evaluations(origins, entry.run_id, entry.model_digest)
        children.append(_manifest_node(origins, entry.run_id))
    return Node("release", entry.channel, None, details=_release_details(origins, entry), children=tuple(children))


def _decided(origins: Origins, run_id: str, digest: str) -> Iterator[Node]:
    """Yield the gate reports about a model of a run, and the model's releases with their approvals."""
    for stage in origins.stages(run_id):
        made, candidate = origins.made(run_id, stage.name), stage.inputs.get("candidate", {}).get("digest")
        if kind_of(stage.kind).judges and REPORT in made and candidate == digest:
            yield _report_node(origins.stores.blobs, made[REPORT])
    release = origins.stores.manifest(origins.now.run(run_id)).release
    for entry in origins.now.history(release.channel) if release else ():
        if entry.run_id == run_id and entry.model_digest == digest:
            yield Node("release", entry.channel, None, details=_release_details(origins, entry))


def _release_details(origins: Origins, entry: ReleaseEntry) -> tuple[tuple[str, str], ...]:
    state = release_states(origins.now.history(entry.channel)).get(entry.model_digest, entry.action)
    details = [("release", str(entry.sequence)), ("action", entry.action), ("by", entry.actor), ("state", str(state))]
    approved = "; ".join(_approvals(origins, entry))
    return (*details, *([("approved by", approved)] if approved else []))


def _approvals(origins: Origins, entry: ReleaseEntry) -> Iterator[str]:
    """Yield the approvers of a release with their reasons, if approvals were required; the run's owners are omitted."""
    now, before = origins.now, live_before(origins.now.history(entry.channel), entry.sequence)
    for asked in now.approval_requests(entry.channel, entry.run_id) if entry.run_id else ():
        if asked.asked.get("live") != before or asked.asked.get("model") != entry.model_digest:
            continue
        policy = asked.asked["policy"]
        pinned = policy_of(origins.stores, entry.channel, policy) if policy else None
        # `actions.say` has rejected approvals by other principals
        own = owners(now, asked, Terms((), 0, bool(pinned and pinned.policy.self_approval)))
        yield from (
            f"{said.actor}{f': {said.reason}' if said.reason else ''}"
            for said in now.approvals(asked.digest)
            if said.verdict == APPROVED and canonical(said.actor) not in own
        )


def _report_node(blobs: BlobStore, digest: str) -> Node:
    """Return the verdicts on which a release is based, and the models with which the gates compared its model."""
    try:
        report = read_report(blobs, digest)
    except (IntegrityError, NotFoundError):  # `verify` reports the error
        return Node("report", "gate report", digest, "file")
    verdicts = report.verdicts
    compared = dict.fromkeys((v.against_words, v.baseline) for v in verdicts if v.baseline)
    details = tuple(("against", f"{words} {str(baseline)[:19]}…") for words, baseline in compared)
    policy = (Node("policy", f"of channel {report.channel}", report.policy, "file"),) if report.policy else ()
    return Node("report", "gate report", digest, "file", details, (*map(_verdict_node, verdicts), *policy))


def _verdict_node(verdict: Verdict) -> Node:
    """Return one gate with the numbers that decided it."""
    numbers = {"estimate": verdict.estimate, "limit": verdict.limit, "threshold": verdict.threshold}
    told = tuple((name, f"{value:.4g}") for name, value in numbers.items() if value is not None)
    details = (("outcome", verdict.outcome.value), ("metric", verdict.metric), *told, ("items", str(verdict.items)))
    return Node("gate", verdict.gate, None, details=details)


def _manifest_node(origins: Origins, run_id: str) -> Node:
    run = origins.now.run(run_id)
    manifest = origins.stores.manifest(run)
    details = (
        ("state", run.state),
        ("owner", run.owner or "erased"),
        ("seed", str(manifest.seed)),
        *((f"code.{k}", v) for k, v in manifest.code.items()),
    )
    return Node("manifest", run.id, run.manifest_digest, "file", details=details)


def _evaluations(origins: Origins, run_id: str, model: str) -> Iterator[Node]:
    """Yield a run's evaluations of one model."""
    for stage in origins.stages(run_id):
        used, made = origins.used(run_id, stage.name), origins.made(run_id, stage.name)
        measured = next((edge.digest for edge in used if edge.slot == MODEL), None)
        if kind_of(stage.kind).measures and METRICS in made and measured == model:
            suites = tuple(_input_node(origins, stage, edge) for edge in used if edge.slot != MODEL)
            yield Node("evaluation", f"{run_id}/{stage.name}", made[METRICS], "file", children=suites)


def _model_node(origins: Origins, digest: str, run_id: str | None) -> Node:
    made = origins.that_made(run_id, digest)
    return _stage_node(origins, *made) if made else _asset_node(origins, digest, form="tree")


def _stage_node(origins: Origins, stage: StageRecord, output: str) -> Node:
    """Return a stage's model, with the stage's inputs below it; for a cached stage, with the place of computation."""
    made_by = f"{stage.kind} in {stage.cached_from or f'{stage.run_id}/{stage.name}'}"
    children = tuple(_input_node(origins, stage, edge) for edge in origins.used(stage.run_id, stage.name))
    details = [("made by", made_by)] + ([("reused", "from the stage cache")] if stage.cached_from else [])
    asked = servers_of(origins.params(stage)).items()
    details += [(field, f"{one.get('model', 'model')} at {one['url']}, not pinned") for field, one in asked]
    name, chosen = f"{stage.run_id}/{stage.name}", selected(stage.metrics)
    if output == BEST:
        name, details = f"{name}/{BEST}", [*details, ("best by its probe", chosen)]
    digest = origins.made(stage.run_id, stage.name)[output]
    version = next((asset for asset in origins.assets(digest) if origins.trained(asset)), None)
    details += [("registered as", version.ref)] if version else []
    details += [("status", said)] if version and (said := origins.status(version)) else []
    return Node("model", name, digest, "tree", tuple(details), children)


def _input_node(origins: Origins, stage: StageRecord, edge: Edge) -> Node:
    made = origins.maker(edge) if edge.slot == "model" or is_frozen_input(edge.slot) else None
    if made:
        return _stage_node(origins, *made)
    meta = stage.inputs.get(edge.slot, {}).get("meta", {})
    node = _asset_node(origins, edge.digest, edge.producer, edge.slot, entry=meta.get("entry"))
    imported = origins.packages(stage, edge.producer)
    return replace(node, details=(*node.details, ("imports", imported))) if imported else node


def _asset_node(
    origins: Origins, digest: str, name: str = "", slot: str = "model", *, form: str = "", entry: object = None
) -> Node:
    """Return bytes with their registration.

    Args:
        name: the name under which the bytes were used, which selects one of several registrations.
        entry: the function of a reward, since one file may contain several functions.
    """
    assets = origins.assets(digest)
    asset = next((a for a in assets if a.ref == name), assets[0] if assets else None)
    called = (("entry", str(entry)),) if entry and (asset is None or asset.meta.get("entry") != entry) else ()
    if asset is None:
        kind = name.partition(":")[0] or "blob"
        return Node(kind, name or "unregistered", digest, form or origins.form(digest), called)
    children: list[Node] = []
    for edge in origins.of_asset(asset):
        if edge.slot == ORIGIN:
            run_id, _ = stage_of(edge.producer) or (edge.producer.partition(":")[2], "")
            children.insert(0, _manifest_node(origins, run_id))
        elif edge.slot == IMPORT:
            children.append(_import_node(origins, edge.digest, asset.digest))
        elif edge.slot == PARENT and edge.digest and asset.kind == "model":  # the base of an adapter
            children.append(_model_node(origins, edge.digest, None))
    used = () if slot in ("model", asset.kind) else (("as", slot),)
    status = (("status", said),) if (said := origins.status(asset)) else ()
    details = (*used, *called, *status, *_asset_details(asset))
    return Node(asset.kind, asset.ref, asset.digest, asset.form, details, tuple(children))


def _import_node(origins: Origins, digest: str, of: str) -> Node:
    """Return the external run from which an asset was imported, with the ancestors that its record names."""
    try:
        record = read_json(origins.stores.blobs, digest)
        source, made = f"{record['from']} ({record['of']})", " ".join(f"{k} {v}" for k, v in record["tools"].items())
        place = record.get("model", {}).get("place", "no model, metrics only")
    except (IntegrityError, NotFoundError, KeyError, TypeError):  # `verify` reports the error
        return Node("import", "record of the outside run", digest, "file")
    history = record.get("history", {}).get("digest", of)
    kept = () if history == of else (_kept(origins, "history", "metrics by step", history, "file"),)
    end = Node("end", "before this: unknown", None, details=(("not known", begins_at(record)),))
    details = (("model", place), ("made with", made or "an unknown version"))
    return Node(
        "import",
        source,
        digest,
        "file",
        details,
        (*_read_then(record), *kept, *(_named_node(origins, row) for row in record["named"]), end),
    )


def _read_then(record: Mapping[str, Any]) -> Iterator[Node]:
    """Yield the files that an import read, and the parameters in these files."""
    yield from (
        Node("file", name, file["digest"], None, (("read then", f"{file['size']} bytes, not kept"),))
        for name, file in record["read"].items()
    )
    told, secret = record["parameters"], record["withheld"]
    if told or secret:
        without = (("left out", f"{', '.join(secret)} (may be secrets)"),) if secret else ()
        yield Node("parameters", f"{len(told)} of that run", None, details=(*told.items(), *without))


def _named_node(origins: Origins, row: Mapping[str, Any]) -> Node:
    """Return an input of an external run: its bytes if they were available, else its name."""
    kind = "dataset" if row["role"] == "data set" else "model"
    said = tuple((key, str(row[key])) for key in ("said", "why") if row.get(key))
    if "digest" in row:
        return _kept(origins, kind, row["name"], row["digest"], row["form"], (("there as", row["name"]), *said))
    return Node(kind, row["name"], None, details=(("known", "by name only"), *said))


def _kept(
    origins: Origins, kind: str, name: str, digest: str, form: str, details: tuple[tuple[str, str], ...] = ()
) -> Node:
    """Return another result of the same import, with its registration."""
    assets = [asset for asset in origins.assets(digest) if asset.kind == kind]
    return Node(kind, assets[-1].ref if assets else name, digest, form, details)


def _asset_details(asset: Asset) -> tuple[tuple[str, str], ...]:
    shown = (URI, VERSION, "rows", "source_digest", "guideline", "parameters", "architecture", "prompts_digest")
    return (*((key, str(asset.meta[key])) for key in shown if key in asset.meta), ("registered by", asset.created_by))


def trained_models(
    stores: Stores, run: str, stage: StageRecord, outputs: Mapping[str, Mapping[str, str]]
) -> list[Asset]:
    """Return the models among the outputs of a stage, as versions without a number.

    Args:
        run: the name of the stage's run.
    """
    if kind_of(stage.kind).from_nothing:  # `asset create` registers the model under the user's name
        return []
    models = []
    for output in (one for one in (MODEL, BEST) if one in outputs):
        name = f"{run}/{stage.name}" + (f"/{BEST}" if output == BEST else "")
        meta = {"run": stage.run_id, "stage": stage.name, "output": output}
        digest, form = outputs[output]["digest"], outputs[output]["form"]
        models.append(Asset(KIND, name, 0, digest, form, stores.clock.now(), stores.actor, meta))
    return models


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
