"""`import trl-output`, `import mlflow`, `import wandb-export`: runs that other programs made."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.assets import as_json, summary
from posttrain.cli.console import Output, OutputOption, digest, emit_json, open_control, say

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Imported

NameOption = Annotated[
    str | None, typer.Option(help="Of the model and its history; by default the run's own.", show_default=False)
]
app = typer.Typer(
    help="Register an outside run's model, metrics and data.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("trl-output")
def trl_output(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The output_dir of a TRL or transformers trainer.")],
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register the model at DIR's root, else its best or newest checkpoint, with the metrics of trainer_state.json."""
    control = open_control()
    imported = control.import_trl_output(folder, name)
    _tell(control, imported, output)


@app.command("mlflow")
def mlflow(
    where: Annotated[
        str, typer.Argument(metavar="DIR|URI", help="A folder with mlruns or mlflow.db, a file of sqlite, or a URI.")
    ],
    run: Annotated[
        str | None, typer.Option(help="Its id or name, where there are several.", show_default=False)
    ] = None,
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register a run of an MLflow store: metrics, parameters, data sets, the model among its artifacts."""
    control = open_control()
    imported = control.import_mlflow(where, run, name)
    _tell(control, imported, output)


@app.command("wandb-export")
def wandb_export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A run's folder (run-ID.wandb), or its history: CSV, JSONL, Parquet."),
    ],
    name: NameOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Register a W&B run's files: metrics, configuration, the model if it is there."""
    control = open_control()
    imported = control.import_wandb_export(folder, name)
    _tell(control, imported, output)


def _tell(control: Control, imported: Imported, output: Output) -> None:
    control.close()
    record = imported.record
    if output is Output.JSON:
        emit_json(
            {
                "from": record["from"],
                "of": record["of"],
                "record": imported.digest,
                "assets": [as_json(asset) for asset in imported.assets],
                "named": record["named"],
                "withheld": record["withheld"],
                "left_out": record["left_out"],
                "notes": record["notes"],
                "unknown": imported.unknown,
            }
        )
        return
    for asset in imported.assets:
        say(f"{asset.ref}  {digest(asset.digest)}  {summary(asset)}")
    if "model" in record:
        say(f"model: {record['model']['place']}")
    if record.get("history", {}).get("not_finite"):
        say(f"note: {record['history']['not_finite']} of its values are NaN or infinite, kept as they are")
    say(*(f"note: {note}" for note in record["notes"]))
    if named := imported.named_only:
        say(f"known by name only: {', '.join(named)}")
    say(*(f"  {row['name']}: {row['why']}" for row in record["named"] if row.get("why")))
    if record["withheld"]:
        say(f"parameters left out, for they may be secrets: {', '.join(record['withheld'])}")
    if record["left_out"]:
        say(f"left out: {', '.join(f'{name} ({why})' for name, why in record['left_out'].items())}")
    say(f"before this: unknown ({imported.unknown})")
    last = imported.assets[-1].ref
    say(f'next: posttrain sample {last} "…"' if "model" in record else f"next: posttrain asset get {last}")
