"""Commands `asset`, `harness` and `import`: versions of assets, and runs of other programs.

`asset` registers, shows, approves and recalls versions. `harness fetch` registers a program that measures models.
`import trl-output`, `import mlflow` and `import wandb-export` register runs of other programs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    ago,
    answer_json,
    aside,
    console,
    digest,
    lazily,
    moment,
    open_control,
    plain_table,
    said_after,
    say,
)
from posttrain.domain.errors import InputError, nearest

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Imported
    from posttrain.domain.records import Asset, AssetStatus

KINDS = ("dataset", "model", "reward", "harness")  # the kinds that `add` registers
_QUIET = 1.0  # seconds of waiting before a progress message
_LISTED = (*KINDS, "history")
_SHOWN = ("uri", "rows", "architecture", "parameters", "entry", "source_digest", "metrics", "points", "run", "program")
app = typer.Typer(
    help="Register and show versioned data sets, models and rewards.", no_args_is_help=True, rich_markup_mode=None
)
RefArgument = Annotated[
    str, typer.Argument(help="KIND:NAME (latest version) or KIND:NAME@VERSION.", autocompletion=lazily("assets"))
]
ReasonOption = Annotated[str, typer.Option(help="Reason; recorded in the event log.", show_default=False)]
NameOption = Annotated[
    str | None, typer.Option(help="Name of the model and its history; default: the run's name.", show_default=False)
]
imports = typer.Typer(
    help="Register another program's run: model, metrics and data.", no_args_is_help=True, rich_markup_mode=None
)


harnesses = typer.Typer(
    help="Fetch lm-eval or Inspect for evaluate stages.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("add")
def add(
    ref: Annotated[
        str, typer.Argument(metavar="KIND:NAME", help="dataset:NAME, model:NAME, reward:NAME or harness:NAME.")
    ],
    path: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Data set: one or more files, or their folder. Model, harness: its folder. Reward: a Python file.",
            metavar="PATH...",
        ),
    ] = None,
    entry: Annotated[str | None, typer.Option(help="Reward: name of the function, or FILE.py:FUNCTION.")] = None,
    dialect: Annotated[
        str, typer.Option(help="Reward: calling convention; auto: detected from its parameters.")
    ] = "auto",
    guideline: Annotated[Path | None, typer.Option(help="Reward: text file that describes what it rewards.")] = None,
    base: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Adapter of peft: the registered model that it was trained on.")
    ] = None,
    external: Annotated[
        str,
        typer.Option(
            metavar="URI", help="Data set: URI of one object, whose bytes stay where they are.", show_default=False
        ),
    ] = "",
    checksum: Annotated[str, typer.Option(help="External: digest of its bytes (sha256:…).", show_default=False)] = "",
    version: Annotated[
        str, typer.Option(help="External: version of the object in its store.", show_default=False)
    ] = "",
) -> None:
    """Register a version of an asset. If a version has equal content, the command returns that version."""
    kind, name = _split(ref)
    if kind != "reward" and (entry or guideline or dialect != "auto"):
        raise InputError(f"asset add {ref}: --entry, --dialect and --guideline are for rewards only, got a {kind}")
    if kind != "model" and base is not None:
        raise InputError(f"asset add {ref}: --base is for adapters of models only, got a {kind}; leave it out")
    _refuse_external(ref, kind, path, external, checksum, version)
    path = path or []
    if kind != "dataset" and len(path) > 1:
        raise InputError(
            f"asset add {ref}: a {kind} must be one file or folder, got {len(path)} paths; give the folder that "
            "contains them"
        )
    control = open_control()
    if external:
        asset = control.add_external(external, name, checksum=checksum, version=version)
    elif kind == "dataset":
        asset = control.add_dataset(path[0], name, *path[1:], progress=_now_and_then())
    elif kind == "model":
        asset = control.add_model(path[0], name, base=base, progress=_now_and_then())
    elif kind == "harness":
        asset = control.add_harness(path[0], name)
    else:
        asset = control.add_reward(path[0], name, entry=entry, dialect=dialect, guideline=guideline)
    say(f"{asset.ref}  {digest(asset.digest)}  {summary(asset)}")


def _now_and_then() -> Callable[[str], None]:
    """Return a function that prints progress, with at most one count per `_QUIET` seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET or not line[:1].isdigit():  # only counts are rate-limited
            last = time.monotonic()
            aside(line)

    return tell


def _refuse_external(
    ref: str, kind: str, path: Sequence[Path] | None, external: str, checksum: str, version: str
) -> None:
    """Refuse a call with a local path and an external URI, with neither, or with options that need an external URI."""
    if external and kind != "dataset":
        raise InputError(f"asset add {ref}: --external is for data sets only, got a {kind}; give its PATH")
    if external and path:
        raise InputError(f"asset add {ref}: give --external URI or PATH, got both; leave {path[0]} out")
    if external and not checksum:
        raise InputError(f"asset add {ref}: --external needs --checksum sha256:…; sha256sum FILE prints it")
    if not external and (checksum or version):
        raise InputError(f"asset add {ref}: --checksum and --version need --external URI, got none; leave them out")
    if not external and not path:
        raise InputError(f"asset add {ref}: needs a PATH or --external URI, got neither")


@app.command("create")
def create(
    ref: Annotated[str, typer.Argument(metavar="model:NAME")],
    config: Annotated[Path, typer.Argument(metavar="MODEL.yaml", help="Parameters of a randomly initialised model.")],
    seed: Annotated[int, typer.Option(help="Seed of the weights.")] = 0,
) -> None:
    """Create a small random base model and register it. A run with one stage computes the weights."""
    kind, name = _split(ref)
    if kind != "model":
        raise InputError(f"asset create: creates models only, got {ref!r}; write model:NAME")
    control = open_control()
    progress = f"creating {ref} in a run with one stage; loading the engine for the first job takes up to a minute"
    with said_after(_QUIET, progress):
        asset, run_id = control.create_model(name, config, seed)
    say(f"{asset.ref}  {digest(asset.digest)}  {summary(asset)}  by run {run_id}")


@app.command("ls")
def ls(
    kind: Annotated[
        str | None, typer.Argument(metavar="[KIND]", help="Only this kind: dataset, model, reward, harness or history.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """List every version of every asset."""
    if kind is not None and kind not in _LISTED:
        raise InputError(f"asset ls: kind must be one of {', '.join(_LISTED)}, got {kind!r}{nearest(kind, _LISTED)}")
    control = open_control()
    found = control.assets(kind)
    said = {_key(one): one for one in control.asset_status()}
    answer_json(output, lambda: [as_json(asset) | _status(said.get(_key(asset))) for asset in found])
    if not found:
        say("no assets yet; next: posttrain asset add KIND:NAME PATH")
        return
    columns = ("ref", "digest", "what", "registered", *(["status"] if said else []))
    table = plain_table(*columns)
    for asset in found:
        when, told = f"{ago(asset.created_at)} by {asset.created_by}", said.get(_key(asset))
        row = (asset.ref, digest(asset.digest), summary(asset), when, told.words if told else "")
        table.add_row(*row[: len(columns)])
    console().print(table)


@app.command("get")
def get(
    ref: RefArgument,
    output: OutputOption = Output.TEXT,
) -> None:
    """Show one version: digest, origin, status and metadata."""
    control = open_control()
    asset = control.asset(ref)
    curves = control.curves(asset.ref) if asset.kind == "history" else []
    said = next((one for one in control.asset_status() if _key(one) == _key(asset)), None)
    answer_json(
        output,
        lambda: as_json(asset) | _status(said) | ({"curves": [asdict(curve) for curve in curves]} if curves else {}),
    )
    say(asset.ref, f"  digest      {asset.digest} ({asset.form})")
    say(f"  registered  {moment(asset.created_at)} by {asset.created_by}")
    if said is not None:
        say(f"  status      {said.words} ({moment(said.at)})")
    say(*(f"  made from   {parent}" for parent in asset.parents))
    shown = {key: value for key, value in asset.meta.items() if asset.kind != "harness" or isinstance(value, str)}
    say(*(f"  {key:11s} {' '.join(str(value).split())}" for key, value in shown.items()))
    if asset.kind == "harness":
        say(f"  packages    {len(asset.meta['packages'])}; -o json lists their versions and digests")
        _tell_tasks(asset.meta)
    if "imported" in asset.meta:
        say(f"  imported from another program; next: posttrain lineage {asset.ref}")
    if "stage" in asset.meta:
        say(f"  next: posttrain lineage {asset.ref}")
    if curves:
        table = plain_table()
        table.add_column("metric", overflow="fold")
        for column in ("points", "steps", "first", "last", "least", "most"):
            table.add_column(column, justify="right", no_wrap=True)
        for curve in curves:
            values = (f"{value:.4g}" for value in (curve.first, curve.last, curve.least, curve.most))
            table.add_row(curve.metric, str(curve.points), f"{curve.steps[0]}…{curve.steps[1]}", *values)
        console().print(table)


@app.command("approve")
def approve(ref: RefArgument, reason: ReasonOption = "") -> None:
    """Mark a version as approved. `asset get` shows the mark. A recalled version must be restored first."""
    _mark(ref, "approved", reason)


@app.command("recall")
def recall(ref: RefArgument, reason: ReasonOption = "") -> None:
    """Recall a version, so that no new run or release uses it.

    The recall also covers everything made from the version. The command lists active runs and live releases; these
    continue.
    """
    _mark(ref, "recalled", reason)


@app.command("restore")
def restore(ref: RefArgument, reason: ReasonOption = "") -> None:
    """Withdraw the approval or recall of a version."""
    _mark(ref, "", reason)


def _mark(ref: str, status: str, reason: str) -> None:
    asset, marked = open_control().mark(ref, status, reason)
    if not status:
        say(f"{asset.ref} is neither approved nor recalled")
    if marked.still is not None:
        whose = f"{marked.still.kind}:{marked.still.name}@{marked.still.version}"
        aside(f"warning: no run can start from these bytes, because {whose} is {marked.still.words}")
    if not status:
        return
    say(f"{asset.ref} is {marked.said.words if marked.said else status}")
    if status == "recalled":
        count, live = len(marked.runs), ", ".join(channel for channel, _ in marked.live)
        say(f"  used by {count} run{'s' * (count != 1)}, live on {live or 'no channel'}")
        say(*(f"  run {run_id} continues with it; posttrain stop {run_id} ends it" for run_id in marked.running))
        for channel, earlier in marked.live:
            back = f"posttrain rollback {channel} --to {earlier}" if earlier else "no earlier release can be restored"
            say(f"  channel {channel} serves a model made from it; {back}")


@harnesses.command("fetch")
def fetch(
    program: Annotated[str, typer.Argument(metavar="PROGRAM", help="lm-eval or inspect.")],
    tasks: Annotated[
        list[str],
        typer.Argument(metavar="TASK...", help="Tasks or groups; Inspect: FILE.py@TASK, PACKAGE/TASK."),
    ],
    name: Annotated[str, typer.Option(help="Name of the asset; default: the program's name.")] = "",
    version: Annotated[str, typer.Option(help="Version of the program; default: the tested one.")] = "",
    include: Annotated[Path | None, typer.Option(help="Folder with further tasks and their data.")] = None,
    packages: Annotated[
        list[str] | None, typer.Option("--with", metavar="PACKAGE", help="Further package for tasks; repeatable.")
    ] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Fetch a harness with its packages and the data of its tasks, and register it as an asset.

    A stage of kind evaluate uses it with harness: NAME. Its jobs need no network.
    """
    from posttrain.app.harnesses import fetch_harness

    control = open_control()
    with tempfile.TemporaryDirectory(prefix="posttrain-harness-") as folder:
        made = Path(folder)
        facts = fetch_harness(
            program, tasks, made, version=version, include=include, packages=packages or (), say=aside
        )
        with said_after(_QUIET, "registering"):
            asset = control.add_harness(made, name or program)
    answer_json(output, lambda: as_json(asset))
    say(f"{asset.ref}  {digest(asset.digest)}  {facts.program} {facts.version}, {len(facts.packages)} packages")
    _tell_tasks(facts.to_json())
    say(f"next, in a run file: {{kind: evaluate, model: …, harness: {name or program}}}")


def _tell_tasks(facts: Mapping[str, Any]) -> None:
    """Print a line for each task of a harness."""
    for task, one in facts["tasks"].items():
        metrics = ", ".join(f"{task}/{metric}" for metric in one["metrics"])
        version = f"version {one['version']}, " if one["version"] else ""
        say(f"  {task}  {version}{one['documents']} documents: {metrics}")
    for group, tasks in facts["groups"].items():
        say(f"  {group}  the tasks {', '.join(tasks)}")


@harnesses.callback()
def harness() -> None:
    """Fetch lm-eval or Inspect for evaluate stages."""


def _key(one: Asset | AssetStatus) -> tuple[str, str, int]:
    return one.kind, one.name, one.version


def _status(said: AssetStatus | None) -> dict[str, Any]:
    """Return a version's status in the form that `-o json` prints."""
    return {"status": {"status": said.status, "by": said.actor, "at": said.at, "reason": said.reason} if said else None}


def _split(ref: str) -> tuple[str, str]:
    kind, colon, name = ref.partition(":")
    if kind == "history":
        raise InputError(f"asset {ref!r}: a history is registered with its run; see posttrain import --help")
    if not colon or kind not in KINDS:
        raise InputError(f"asset must be KIND:NAME with kind {', '.join(KINDS)}, got {ref!r}{nearest(kind, KINDS)}")
    if "@" in name:
        raise InputError(f"asset {ref!r}: versions are assigned, never chosen; leave out @{name.partition('@')[2]}")
    return kind, name


def summary(asset: Asset) -> str:
    """Return a version's metadata as one line of text."""
    shown = {key: asset.meta[key] for key in _SHOWN if isinstance(asset.meta.get(key), str | int)}
    if "source_digest" in shown:
        shown["source_digest"] = digest(str(shown["source_digest"]))
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in shown.items())


def as_json(asset: Asset) -> dict[str, Any]:
    """Return every recorded field of a version."""
    return {
        "ref": asset.ref,
        "kind": asset.kind,
        "name": asset.name,
        "version": asset.version,
        "digest": asset.digest,
        "form": asset.form,
        "created_at": asset.created_at,
        "created_by": asset.created_by,
        "parents": list(asset.parents),
        "meta": dict(asset.meta),
    }


@imports.command("trl-output")
def trl_output(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="output_dir of a TRL or transformers trainer.")],
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register the model and metrics of a TRL output folder.

    The model is the one in DIR, or else the best or newest checkpoint below DIR. The metrics are those in
    trainer_state.json.
    """
    control = open_control()
    _tell(control, control.import_trl_output(folder, name), output)


@imports.command("mlflow")
def mlflow(
    where: Annotated[
        str, typer.Argument(metavar="DIR|URI", help="Folder with mlruns or mlflow.db, SQLite file, or URI.")
    ],
    run: Annotated[
        str | None, typer.Option(help="Id or name of the run, if the store has several.", show_default=False)
    ] = None,
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register a run from an MLflow store.

    The command imports the run's metrics, parameters and data sets, and the model among the run's artifacts.
    """
    control = open_control()
    _tell(control, control.import_mlflow(where, run, name), output)


@imports.command("wandb-export")
def wandb_export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder of a run (run-ID.wandb), or its history as CSV, JSONL or Parquet."),
    ],
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register a W&B run from its files.

    The command imports the metrics, the configuration, and the model if the files contain one.
    """
    control = open_control()
    _tell(control, control.import_wandb_export(folder, name), output)


def _tell(control: Control, imported: Imported, output: Output) -> None:
    record = imported.record
    answer_json(
        output,
        lambda: {
            "from": record["from"],
            "of": record["of"],
            "record": imported.digest,
            "assets": [as_json(asset) for asset in imported.assets],
            "named": record["named"],
            "withheld": record["withheld"],
            "left_out": record["left_out"],
            "notes": record["notes"],
            "unknown": imported.unknown,
        },
    )
    say(*(f"{asset.ref}  {digest(asset.digest)}  {summary(asset)}" for asset in imported.assets))
    if "model" in record:
        say(f"model: {record['model']['place']}")
    if record.get("history", {}).get("not_finite"):
        number = record["history"]["not_finite"]
        say(f"note: {number} values of the history are NaN or infinite and are kept unchanged")
    say(*(f"note: {note}" for note in record["notes"]))
    if named := imported.named_only:
        say(f"known by name only: {', '.join(named)}")
    say(*(f"  {row['name']}: {row['why']}" for row in record["named"] if row.get("why")))
    if record["withheld"]:
        say(f"parameters left out because they may be secrets: {', '.join(record['withheld'])}")
    if record["left_out"]:
        say(f"left out: {', '.join(f'{name} ({why})' for name, why in record['left_out'].items())}")
    say(f"the earlier lineage is unknown: {imported.unknown}")
    last = imported.assets[-1].ref
    say(f'next: posttrain sample {last} "…"' if "model" in record else f"next: posttrain asset get {last}")
