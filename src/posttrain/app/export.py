"""A model out of the workspace: a Hugging Face folder with its model card and its lineage."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from posttrain._version import __version__
from posttrain.app.naming import NamedModel
from posttrain.app.reporting import tree_lines
from posttrain.app.workspace import Workspace
from posttrain.control.explain import explain_run
from posttrain.control.lineage import model_lineage
from posttrain.control.models import MadeModel
from posttrain.domain.errors import InputError, IntegrityError
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.domain.records import StageRecord
from posttrain.execution.foreground import answers
from posttrain.store.atomic import sync_folder, sync_tree, unwritable
from posttrain.store.scratch import scratch
from posttrain.store.trees import tree_listing
from posttrain.web.card import ModelCard, ScoreLine, StageLine, render_card

_CAST = "posttrain.jobs.cast"
_CAST_SECONDS = 21600.0
_CARD, _LINEAGE = "README.md", "lineage.json"
Dtype = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[str, ...] = get_args(Dtype)


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    name: str  # run:sort-b0ed9b49/grpo, channel:prod@3, model:base@1
    digest: str  # of the model in the workspace
    dtype: str
    cast: bool  # whether the weights were converted
    files: tuple[str, ...]
    bytes: int
    card: bool  # false: no run of this workspace made the model, so it has the card that it came with


def export_model(
    workspace: Workspace,
    model: NamedModel,
    target: Path,
    *,
    dtype: str | None = None,
    progress: Callable[[str], None] = lambda file: None,
) -> Exported:
    """Write a model's files into a new folder. It appears whole, or not at all.

    Args:
        dtype: convert the weights; None: as they are, byte for byte.
        progress: told each file.

    Raises:
        InputError: something is at `target`, an unknown dtype, or weights that the dtype cannot hold.
        NotFoundError, IntegrityError: a file of the model is missing or corrupt.
        WorkspaceError: `target` cannot be written.
    """
    if dtype is not None and dtype not in DTYPES:
        raise InputError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if model.ref.on_disk:
        raise InputError(f"{model.word}: is a folder on this machine already; copy it")
    target = target.expanduser().absolute()
    _refuse_occupied(target)
    with scratch(target.parent, f".{target.name}.export-") as work:
        made = work / "made"
        _copied(workspace, model.digest, made, progress)
        stored = str(_config(made).get("dtype") or _config(made).get("torch_dtype") or "float32")
        if dtype not in (None, stored):
            for answer in answers(_CAST, {"folder": str(made), "dtype": dtype}, timeout=_CAST_SECONDS):
                progress(f"{answer['file']} in {dtype}")
        kind = dtype or stored
        described = model.made is not None and _describe(workspace, model.made, made, kind, cast=kind != stored)
        sync_tree(made)
        _put(made, target)
    files = tuple(sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file()))
    size = sum((target / name).stat().st_size for name in files)
    return Exported(target, model.pinned.name, model.digest, kind, kind != stored, files, size, described)


def _refuse_occupied(target: Path) -> None:
    try:
        there = target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir())))
    except OSError as error:
        raise InputError(f"{target}: cannot be looked into: {error.strerror}; choose another folder") from error
    if there:
        raise InputError(f"{target}: must be a new or an empty folder, and something is there; choose another")


def _copied(workspace: Workspace, digest: str, folder: Path, progress: Callable[[str], None]) -> None:
    """Put the model's files into `folder`, each hashed on the way, as readable as folders made here are."""
    folder.mkdir()
    mode = folder.stat().st_mode & 0o666
    for name, file in tree_listing(workspace.blobs, digest).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        workspace.blobs.fetch(file.digest, folder / name)
        (folder / name).chmod(mode)
        progress(name)


def _config(folder: Path) -> dict[str, Any]:
    try:
        value = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise IntegrityError(
            f"the model's config.json cannot be read: {error}; posttrain verify finds out why"
        ) from error
    return value if isinstance(value, dict) else {}


def _put(made: Path, target: Path) -> None:
    try:
        os.rename(made, target)  # an empty folder makes way
        sync_folder(target.parent)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise InputError(f"{target}: must be new or empty, and something came there meanwhile") from error
        raise unwritable(target, error) from error


# --- what the folder says of itself -----------------------------------------------------------------------------------


def _describe(workspace: Workspace, made: MadeModel, folder: Path, dtype: str, *, cast: bool) -> bool:
    """Write the model card and `lineage.json`; false for a model of which no run knows how it was made."""
    if made.run_id is None or made.stage is None:
        return False
    run = workspace.ledger.run(made.run_id)
    manifest, rows = workspace.wiring.manifest(run), {row.name: row for row in workspace.ledger.stages(run.id)}
    chain = list(_chain(manifest, made.stage))
    report = explain_run(workspace.wiring, run.id).report
    tree = model_lineage(workspace.wiring, made)
    card = ModelCard(
        title=f"{run.name}, {made.stage}",
        digest=made.digest,
        dtype=dtype,
        cast=cast,
        made=f"{run.id}/{made.stage}",
        release=f"{made.channel}, release {made.release}" if made.channel else "",
        manifest=run.manifest_digest,
        base=_base(chain),
        seed=manifest.seed,
        stages=tuple(_stage_line(stage, rows[stage.name]) for stage in chain),
        scores=tuple(_scores(manifest, made.stage, rows)),
        gates=report.verdicts if report and report.candidate == made.digest else (),
        lineage=tuple(tree_lines(tree)),
        version=__version__,
    )
    (folder / _CARD).write_text(render_card(card), encoding="utf-8")
    said = {"posttrain": __version__, "model": asdict(made), "dtype": dtype, "cast": cast, "lineage": asdict(tree)}
    verdicts = [verdict.model_dump(mode="json") for verdict in card.gates]
    scores = {f"{score.stage}/{score.metric}": score.value for score in card.scores}
    text = json.dumps({**said, "scores": scores, "gates": verdicts}, indent=2, ensure_ascii=False)
    (folder / _LINEAGE).write_text(text + "\n", encoding="utf-8")
    return True


def _chain(manifest: Manifest, name: str) -> Iterator[StageManifest]:
    """The stages of this run that the model went through, first to last."""
    stage = manifest.stage(name)
    before = stage.inputs.get("model")
    if before is not None and before.source == "stage":
        yield from _chain(manifest, before.name)
    yield stage


def _base(chain: Sequence[StageManifest]) -> str:
    first = chain[0].inputs.get("model")
    return first.name if first else ""


def _stage_line(stage: StageManifest, row: StageRecord) -> StageLine:
    inputs = tuple((slot, str(blob["name"]), str(blob["digest"])) for slot, blob in row.inputs.items())
    settings = {key: value for key, value in stage.params.items() if key not in stage.inputs}
    params = tuple((key, json.dumps(value, ensure_ascii=False)) for key, value in settings.items())
    started, finished = row.started_at, row.finished_at
    seconds = finished - started if started and finished and not row.cached_from else None
    return StageLine(stage.name, stage.kind, inputs, params, row.tokens, seconds)


def _scores(manifest: Manifest, name: str, rows: Mapping[str, StageRecord]) -> Iterator[ScoreLine]:
    """What this run measured of the model."""
    for stage in manifest.stages:
        model = stage.inputs.get("model")
        if stage.kind != "evaluate" or model is None or (model.source, model.name) != ("stage", name):
            continue
        suites = {slot.removeprefix("suites."): ref.name for slot, ref in stage.inputs.items() if slot != "model"}
        for metric, value in rows[stage.name].metrics.items():
            suite = metric.partition("/")[0]
            if suite in suites:
                yield ScoreLine(stage.name, metric, value, suites[suite])
