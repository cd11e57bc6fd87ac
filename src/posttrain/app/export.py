"""Export of a model: a Hugging Face folder with its model card and its lineage."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from posttrain._version import __version__
from posttrain.api.control import Control
from posttrain.api.values import Exported
from posttrain.api.verbs import answers
from posttrain.app.models import NamedModel, named_model
from posttrain.app.workspace import Workspace
from posttrain.control.budgets import spending
from posttrain.control.lineage import MadeModel, Node, asset_lineage, model_lineage
from posttrain.control.release_plan import selected
from posttrain.control.scores import run_scores
from posttrain.control.verdicts import explain_run
from posttrain.data.assets import floating_types
from posttrain.data.refs import Source
from posttrain.decision.releases import release_states
from posttrain.domain.adapters import CONFIG as ADAPTER, FOLDER, SavedAdapter, base_files, has_adapter
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import BEST
from posttrain.domain.manifest import Manifest, StageManifest, deciding
from posttrain.domain.records import IMPORTED, StageRecord
from posttrain.domain.rendering import CONFIG, is_classifier
from posttrain.execution import foreground
from posttrain.store.atomic import sync_folder, sync_tree, unwritable, write_json
from posttrain.store.trees import TreeFile, listing_bytes, scratch, tree_listing
from posttrain.views.report import tree_lines
from posttrain.web.pages import ModelCard, ScoreLine, StageLine, render_card

_CAST = "posttrain.jobs.cast"
_CAST_SECONDS = 21600.0
_CARD, _LINEAGE = "README.md", "lineage.json"
_PARTIAL = ".posttrain-export-"  # the next export to the same place deletes the leftovers of a killed export
_PRIVATE = ("by", "owner", "registered by", "uri")
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)
FORMS = ("adapter", "merged")


@answers(Control.export)
def export(
    workspace: Workspace,
    model: str,
    folder: Path,
    *,
    dtype: str | None,
    form: str | None = None,
    progress: Callable[[str], None],
) -> Exported:
    """Write a model's files into a new folder, which appears complete or not at all.

    Args:
        dtype: the dtype to which the weights are converted; None: copy the weights byte for byte.
        form: of a model with an adapter: `adapter` (the files of the adapter) or `merged` (one model, whose weights are
            sums that are rounded to the base's dtype).
        progress: receives each file name.

    Raises:
        InputError: `folder` exists and is not empty, or the dtype is unknown or cannot represent the weights; `form` is
            missing for a model with an adapter, or given for another.
        NotFoundError: a file of the model is missing.
        IntegrityError: a file of the model is corrupt.
        WorkspaceError: `folder` cannot be written.
    """
    named = named_model(workspace, model)
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if named.ref.on_disk:
        raise InputError(f"{named.word}: is already a folder on this machine; copy the folder")
    target = _place(folder, workspace)
    with scratch(target.parent, _PARTIAL) as work:
        made = work / "made"
        listing = tree_listing(workspace.blobs, named.digest)
        _refuse_form(form, named.word, adapted=has_adapter(listing))
        base = base_files(listing)
        only = {name: file for name, file in listing.items() if name not in base}
        _copied(workspace, only if form == "adapter" else listing, made, progress)
        judge = _scores(made)
        if form == "adapter":
            _lift(made)
        kind, cast = _converted(made, dtype, merge=form == "merged", progress=progress)
        digest = digest_bytes(listing_bytes(base)) if only else ""
        paper = _Paper(made, kind, cast, judge, form or "", digest, _named(workspace, digest) if only else "")
        if form == "adapter":
            _name_base(made, paper.of)
        described = named.made is not None and _describe(workspace, named.made, paper)
        if not described:
            _say_lineage(workspace, named, paper)
        opener = "AutoModelForSequenceClassification" if judge else "AutoModelForCausalLM"
        sync_tree(made)
        _put(made, target)
    files = tuple(sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()))
    size = sum((target / name).stat().st_size for name in files)
    opener = "PeftModel" if form == "adapter" else opener
    return Exported(target, named.pinned.name, named.digest, kind, cast, files, size, described, opener, paper.of)


def _refuse_form(form: str | None, model: str, *, adapted: bool) -> None:
    if form is not None and form not in FORMS:
        raise InputError(f"form must be one of {', '.join(FORMS)}, got {form!r}")
    if adapted and form is None:
        raise InputError(
            f"{model}: has an adapter, which transformers would ignore in a folder with its base; add --adapter for "
            "the adapter alone, or --merged for one model"
        )
    if form is not None and not adapted:
        raise InputError(f"{model}: has no adapter, so it cannot be exported as {form}; leave --{form} out")


def _lift(folder: Path) -> None:
    """Move the files of an adapter up into the model's folder."""
    for path in (folder / FOLDER).iterdir():
        path.rename(folder / path.name)
    (folder / FOLDER).rmdir()


def _converted(folder: Path, dtype: str | None, *, merge: bool, progress: Callable[[str], None]) -> tuple[str, bool]:
    """Merge an adapter and convert weights, in place; return the types of the weights, and whether they changed."""
    stored = floating_types(folder, below=not merge)
    if merge or (dtype is not None and stored != {dtype}):
        request = {"folder": str(folder), "dtype": dtype, "merge": merge}
        for answer in foreground.answers(_CAST, request, timeout=_CAST_SECONDS):
            progress(f"{answer['file']} in {answer['dtype']}")
    written = floating_types(folder)
    return dtype or ", ".join(sorted(written)), written != stored


def _named(workspace: Workspace, digest: str) -> str:
    """Return the name under which a base is registered, or its digest."""
    return next((asset.ref for asset in workspace.ledger.assets_by_digest(digest)), digest)


def _name_base(folder: Path, base: str) -> None:
    """Name the base in the configuration of an exported adapter."""
    written = json.loads((folder / ADAPTER).read_bytes())
    write_json(folder / ADAPTER, {**written, "base_model_name_or_path": base})


def _place(target: Path, workspace: Workspace) -> Path:
    """Return the path of the target folder, and create its parents.

    Raises:
        InputError: the folder exists and is not empty, or is in the workspace.
        WorkspaceError: a parent cannot be created.
    """
    try:
        target = Path(os.path.normpath(target.expanduser().absolute()))
    except RuntimeError as error:  # an unknown user in `~USER`
        raise InputError(f"{target}: {error}; name another folder") from error
    if target.resolve().is_relative_to(workspace.root):
        raise InputError(f"{target}: must not be in the workspace {workspace.root}; name another folder")
    _refuse_occupied(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(target.parent, error) from error
    return target


def _refuse_occupied(target: Path) -> None:
    try:
        there = target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir())))
    except OSError as error:
        raise InputError(f"{target}: cannot be read: {error.strerror}; choose another folder") from error
    if there:
        raise InputError(f"{target}: must be a new or empty folder; choose another")


def _copied(workspace: Workspace, files: Mapping[str, TreeFile], folder: Path, progress: Callable[[str], None]) -> None:
    """Copy the model's files into `folder` and verify their hashes; the copies get the permissions of new files."""
    folder.mkdir()
    mode = folder.stat().st_mode & 0o666
    for name, file in files.items():
        progress(name)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        workspace.blobs.fetch(file.digest, folder / name)
        (folder / name).chmod(mode)


def _scores(folder: Path) -> bool:
    """Return whether the model in a folder, or an adapter in it, scores responses."""
    adapter, config = folder / FOLDER / ADAPTER, folder / CONFIG
    if adapter.is_file() and SavedAdapter.from_json(json.loads(adapter.read_bytes()), str(adapter)).scores:
        return True
    return config.is_file() and is_classifier(json.loads(config.read_bytes()))


def _release_state(workspace: Workspace, made: MadeModel) -> str:
    """Return `live`, `superseded`, `rolled back` or `never live`."""
    states = release_states(workspace.ledger.history(str(made.channel)))
    return str(states.get(made.digest, "never live")).replace("_", " ")


def _public(node: Node) -> Node:
    """Return a lineage without the names of people, since exports may be published."""
    details = tuple(pair for pair in node.details if pair[0] not in _PRIVATE)
    return replace(node, details=details, children=tuple(map(_public, node.children)))


def _put(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)  # replaces an empty folder
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InputError(
                f"{target}: a file was created in the folder during the export; choose another folder"
            ) from error
        raise unwritable(target, error) from error


# --- description of the model in the folder ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Paper:
    """The folder that is described, and what was written into it."""

    folder: Path
    dtype: str
    cast: bool
    judge: bool  # whether the model scores responses
    form: str  # of a model with an adapter: adapter, or merged
    base: str  # digest of the base of an adapter
    of: str  # name of the base of an adapter

    @property
    def words(self) -> dict[str, object]:
        return {"dtype": self.dtype, "cast": self.cast, **({"base": self.base} if self.base else {})}


def _describe(workspace: Workspace, made: MadeModel, paper: _Paper) -> bool:
    """Write the model card and `lineage.json`; return False for a model that no run of this workspace made."""
    if made.run_id is None or made.stage is None:
        return False
    run = workspace.ledger.run(made.run_id)
    manifest, rows = workspace.stores.manifest(run), {row.name: row for row in workspace.ledger.stages(run.id)}
    chain = list(_chain(manifest, made.stage))
    base = chain[0].inputs.get("model")
    report = explain_run(workspace.stores, run.id).report
    worse = run_scores(workspace.blobs, manifest, rows).regressions
    tree = _public(model_lineage(workspace.stores, made))
    approved = "".join(f", approved by {words}" for key, words in tree.details if key == "approved by")
    card = ModelCard(
        title=f"{run.name}, {made.word}",
        digest=made.digest,
        dtype=paper.dtype,
        cast=paper.cast,
        made=f"{run.id}/{made.word}",
        chosen=selected(rows[made.stage].metrics) if made.output == BEST else "",
        release=f"{made.channel}, release {made.release} ({_release_state(workspace, made)}){approved}"
        if made.channel
        else "",
        manifest=run.manifest_digest,
        base=base.name if base else "",
        state=run.state,
        judge=paper.judge,
        adapter_of=f"{paper.of} {paper.base}" if paper.base else "",
        form=paper.form,
        seed=manifest.seed,
        stages=tuple(_stage_line(workspace, stage, rows[stage.name]) for stage in chain),
        scores=tuple(_score_lines(manifest, made.digest, rows)),
        regressions=tuple(line for line in worse if line.startswith(f"stage {made.word} ")),
        gates=report.verdicts if report and report.candidate == made.digest else (),
        lineage=tuple(tree_lines(tree)),
        version=__version__,
    )
    (paper.folder / _CARD).write_text(render_card(card), encoding="utf-8")
    said = {
        "model": asdict(made),
        **paper.words,
        "lineage": asdict(tree),
        "state": run.state,
        "scores": {f"{s.stage}/{s.metric}": s.value if math.isfinite(s.value) else None for s in card.scores},
        "gates": [verdict.model_dump(mode="json") for verdict in card.gates],
        "regressions": list(card.regressions),
    }
    _write_lineage(paper.folder, said)
    return True


def _say_lineage(workspace: Workspace, model: NamedModel, paper: _Paper) -> None:
    """Write `lineage.json` of an imported model, whose model card was copied with its files."""
    if model.ref.source is not Source.REGISTRY:
        return
    asset = workspace.catalog.find(model.pinned.name)
    if IMPORTED not in asset.meta:
        return
    tree = _public(asset_lineage(workspace.stores, asset))
    named = {"name": asset.ref, "digest": asset.digest}
    _write_lineage(paper.folder, {"model": named, **paper.words, "lineage": asdict(tree)})


def _write_lineage(folder: Path, said: Mapping[str, object]) -> None:
    text = json.dumps({"posttrain": __version__, **said}, indent=2, ensure_ascii=False, allow_nan=False)
    (folder / _LINEAGE).write_text(text + "\n", encoding="utf-8")


def _chain(manifest: Manifest, name: str) -> Iterator[StageManifest]:
    """Yield the stages of this run that made the model and its predecessors, first to last."""
    stage = manifest.stage(name)
    before = stage.inputs.get("model")
    if before is not None and before.source == "stage":
        yield from _chain(manifest, before.name)
    yield stage


def _stage_line(workspace: Workspace, stage: StageManifest, row: StageRecord) -> StageLine:
    inputs = tuple((slot, str(blob["name"]), str(blob["digest"])) for slot, blob in row.inputs.items())
    settings = {key: value for key, value in deciding(stage.params).items() if key not in stage.inputs}
    params = tuple((key, json.dumps(value, ensure_ascii=False)) for key, value in settings.items())
    own = [attempt for attempt in workspace.ledger.attempts(row.run_id, row.name) if attempt.run_id == row.run_id]
    seconds = spending((), own).seconds if own else None  # the billed time, as `get` shows it
    return StageLine(stage.name, stage.kind, inputs, params, row.tokens, seconds)


def _score_lines(manifest: Manifest, digest: str, rows: Mapping[str, StageRecord]) -> Iterator[ScoreLine]:
    """Yield this run's measurements of the model."""
    for stage in manifest.stages:
        if not stage.measures or rows[stage.name].inputs.get("model", {}).get("digest") != digest:
            continue
        suites = {
            slot.removeprefix("suites."): ref.name for slot, ref in stage.inputs.items() if slot.startswith("suites.")
        }
        for metric, value in rows[stage.name].metrics.items():
            suite = metric.partition("/")[0]
            if suite in suites:
                yield ScoreLine(stage.name, metric, value, suites[suite])
