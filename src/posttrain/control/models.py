"""Models that runs of this workspace made, by the words people have for them: `channel:prod`, `channel:prod@3`,
`run:sort-b0ed9b49/sft`, `run:sort-b0ed9b49/grpo/best`, `model:sort/sft@2`.

A word that moves (a channel, a run's name) is pinned when it is read: the manifest holds the release or the run that it
meant then, and the word beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from posttrain.control.origins import Origins
from posttrain.control.stores import Stores
from posttrain.data.refs import AssetRef, Source
from posttrain.domain.contracts import MODEL
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.kinds import kind_of
from posttrain.domain.manifest import NAMED, InputRef, Manifest, model_output
from posttrain.domain.placement import NAMED_MODELS
from posttrain.domain.records import RunRecord
from posttrain.domain.spelling import nearest


@dataclass(frozen=True, slots=True)
class MadeModel:
    """What a word meant: `MadeModel("channel:prod@3", "sha256:…", "sort-b0ed9b49", "grpo", "prod", 3)`."""

    name: str  # says the same for ever
    digest: str
    run_id: str | None  # None: a release that no run made
    stage: str | None
    channel: str | None = None
    release: int | None = None
    output: str = MODEL  # of the stage

    @property
    def word(self) -> str | None:
        """The stage's model as a run file names it: `grpo`, `grpo/best`."""
        return self.stage and InputRef(source="stage", name=self.stage, output=self.output).word

    def pinned(self, word: str) -> InputRef:
        """As an input of a stage; `word` as somebody wrote it."""
        meta = {} if word == self.name else {NAMED: word}
        return InputRef(source="asset", name=self.name, digest=self.digest, form="tree", meta=meta)


def made_model(stores: Stores, ref: AssetRef) -> MadeModel:
    """The model that a channel points at, that a run's stage made, or that is a version of what a stage trains.

    Raises:
        NotFoundError: no such channel, release, run or stage; a stage that has made none yet; bytes that are gone.
        InputError: the start of several runs' ids.
    """
    ways = {Source.CHANNEL: _released, Source.RUN: _of_run, Source.REGISTRY: _trained}
    found = ways[ref.source](stores, ref)
    if not stores.blobs.has(found.digest):
        raise NotFoundError(f"{found.name}: its bytes ({found.digest}) are missing from the store; restore them")
    return found


def _released(stores: Stores, ref: AssetRef) -> MadeModel:
    history = stores.ledger.history(ref.name)
    if not history:
        known = stores.ledger.channels()
        hint = nearest(ref.name, known) or "; the first release of a run makes one"
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
        raise NotFoundError(f"{ref}: stage {name} of run {run.id} keeps no best model (keep_best); {_way(run)}")
    row = next(stage for stage in stores.ledger.stages(run.id) if stage.name == name)
    if output not in row.outputs:
        raise NotFoundError(f"{ref}: stage {name} of run {run.id} has made no model ({row.state}); {_way(run)}")
    return MadeModel(f"run:{run.id}/{word}", row.outputs[output]["digest"], run.id, name, output=output)


def _way(run: RunRecord) -> str:
    return f"see posttrain why {run.id}, or name another stage: run:{run.id}/STAGE"


def _main_stage(manifest: Manifest) -> str:
    """The model that a run is for: the one that it releases, else that of the last stage that makes a policy."""
    if manifest.release:
        return manifest.release.model
    makers = [stage for stage in manifest.stages if "model" in stage.outputs]
    helpers = {ref.name for stage in makers for slot, ref in stage.inputs.items() if slot in NAMED_MODELS}
    policies = [stage.name for stage in makers if stage.name not in helpers and not kind_of(stage.kind).scores]
    return (policies or [stage.name for stage in makers] or [""])[-1]
