"""Runs that the real packages made, imported."""

from __future__ import annotations

import dataclasses
import inspect
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.foreign.settings import PLACES

pytestmark = pytest.mark.ecosystem
PATIENCE = 1500.0  # seconds; it ends what hangs


def posttrain(folder: Path, *arguments: str) -> Any:
    """What a command says as JSON."""
    command = [sys.executable, "-m", "posttrain", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout) if "json" in arguments else done.stdout


def tiny(folder: Path) -> Path:
    """A model of nothing with its tokenizer, as `asset create` makes it."""
    spec = "hidden_size: 16\nlayers: 1\nheads: 2\ncontext_length: 64\n"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(spec)
    posttrain(folder, "init")
    posttrain(folder, "asset", "create", "model:tiny", "model.yaml")
    posttrain(folder, "export", "model:tiny", "base")
    return folder / "base"


def write_model(folder: Path, weight: float) -> None:
    """A folder in Hugging Face format whose only weight is this one."""
    folder.mkdir(parents=True)
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 60}
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}))
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = struct.pack("<Q", len(header)) + header + struct.pack("<f", weight)
    (folder / "model.safetensors").write_bytes(data)


def below(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [node, *(deep for child in node["children"] for deep in below(child))]


def test_what_trl_left_is_a_base_with_its_history(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    world = tmp_path / "world"
    base = tiny(world)
    tokenizer = AutoTokenizer.from_pretrained(base)
    rows = [{"prompt": f"{i} ", "completion": f"{i % 10}"} for i in range(16)]
    settings = SFTConfig(
        output_dir=str(world / "trl-sft"), max_steps=4, save_steps=2, logging_steps=1, per_device_train_batch_size=2,
        report_to=[], use_cpu=True, bf16=False, learning_rate=1e-3, seed=3, save_strategy="steps", max_length=32,
    )  # fmt: skip
    trainer = SFTTrainer(
        AutoModelForCausalLM.from_pretrained(base),
        settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    newest = posttrain(world, "import", "trl-output", "trl-sft", "-o", "json")
    assert [asset["ref"] for asset in newest["assets"]] == ["history:trl-sft@1", "model:trl-sft@1"]
    trainer.save_model()
    root = posttrain(world, "import", "trl-output", "trl-sft", "-o", "json")
    assert [asset["ref"] for asset in root["assets"]] == ["history:trl-sft@2", "model:trl-sft@2"]
    assert newest["assets"][0]["digest"] == root["assets"][0]["digest"]  # the same metrics, of another folder

    logged = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
    curves = {c["metric"]: c for c in posttrain(world, "asset", "get", "history:trl-sft", "-o", "json")["curves"]}
    assert curves["loss"]["points"] == len(logged) == 4
    assert (curves["loss"]["first"], curves["loss"]["last"]) == (logged[1], logged[4])

    nodes = below(posttrain(world, "lineage", "model:trl-sft", "-o", "json"))
    imported = next(node for node in nodes if node["kind"] == "import")
    import trl

    assert f"trl {trl.__version__}" in imported["details"]["made with"]
    assert imported["details"]["model"] == "the model at the root of the folder"
    assert nodes[-1]["name"] == "before this: unknown"
    assert posttrain(world, "verify", "model:trl-sft", "-o", "json")["ok"]

    posttrain(world, "export", "model:trl-sft", "taken")
    ours, theirs = (AutoModelForCausalLM.from_pretrained(world / f).state_dict() for f in ("taken", "trl-sft"))
    assert ours.keys() == theirs.keys()
    assert all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert posttrain(world, "sample", "model:trl-sft", "7 ", "--max-new-tokens", "3", "-o", "json")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a workspace, a model and rows."""
    folder = tmp_path / "world"
    write_model(folder / "tiny", 0.5)
    rows = [json.dumps({"prompt": f"Q {i}", "completion": f"{i}"}) + "\n" for i in range(4)]
    (folder / "rows.jsonl").write_text("".join(rows))
    posttrain(folder, "init")
    return folder


def refused(folder: Path, *arguments: str) -> str:
    """The line with which a command is refused."""
    command = [sys.executable, "-m", "posttrain", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def mlflow_run(client: Any, world: Path, name: str, artifacts: Path, *, model: bool) -> str:
    """A run as a trainer's callback leaves it."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    found = client.get_experiment_by_name("sums")
    experiment = found.experiment_id if found else client.create_experiment("sums", str(artifacts))
    run = str(client.create_run(experiment, run_name=name).info.run_id)
    for step in range(1, 4):
        client.log_metric(run, "train/loss", 1 / step, timestamp=1_700_000_000_000 + step, step=step)
    for key, value in {"learning_rate": 1e-3, "hub_token": "hf_abc", "_name_or_path": "Qwen/Qwen3-0.6B"}.items():
        client.log_param(run, key, value)
    local = Dataset("rows", "0a1b", "local", json.dumps({"uri": str(world / "rows.jsonl")}))
    hub = Dataset("capybara", "2c3d", "hf", json.dumps({"path": "trl-lib/Capybara"}))
    client.log_inputs(run, [DatasetInput(data, [InputTag("mlflow.data.context", "training")]) for data in (local, hub)])
    if model:
        client.log_artifacts(run, str(world / "tiny"), "model")
    client.set_terminated(run)
    return run


@pytest.mark.parametrize("store", ["sqlite", "folder"])
def test_a_run_of_an_mlflow_store(world: Path, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow.tracking import MlflowClient

    other = world / "theirs"
    other.mkdir()
    uri = f"sqlite:///{other}/mlflow.db" if store == "sqlite" else str(other / "mlruns")
    client = MlflowClient(tracking_uri=uri)
    run = mlflow_run(client, world, "sums-sft", other / "artifacts", model=True)
    before = sorted((path, path.read_bytes()) for path in other.rglob("*") if path.is_file())

    told = posttrain(world, "import", "mlflow", "theirs", "-o", "json")
    assert [asset["ref"] for asset in told["assets"]] == [
        "dataset:sums-sft-rows@1",
        "history:sums-sft@1",
        "model:sums-sft@1",
    ]
    assert told["withheld"] == ["hub_token"]
    curve = posttrain(world, "asset", "get", "history:sums-sft", "-o", "json")["curves"][0]
    assert (curve["metric"], curve["steps"], curve["first"], curve["last"]) == ("train/loss", [1, 3], 1.0, 1 / 3)
    tree = posttrain(world, "lineage", "model:sums-sft", "-o", "json")
    nodes = {(node["kind"], node["name"]): node["details"] for node in below(tree)}
    assert nodes["dataset", "dataset:sums-sft-rows@1"]["said"] == "training, MLflow's digest 0a1b, source local"
    assert nodes["dataset", "capybara"]["known"] == "by name only"
    assert nodes["model", "Qwen/Qwen3-0.6B"]["known"] == "by name only"
    parameters = next(details for (kind, _), details in nodes.items() if kind == "parameters")
    assert (parameters["learning_rate"], parameters["mlflow.run_id"]) == ("0.001", run)
    assert "hf_abc" not in json.dumps(tree)
    assert posttrain(world, "verify", "model:sums-sft", "-o", "json")["ok"]
    assert posttrain(world, "import", "mlflow", uri, "-o", "json")["assets"][-1]["ref"] == "model:sums-sft@1"
    assert before == sorted((path, path.read_bytes()) for path in other.rglob("*") if path.is_file())

    bare = mlflow_run(client, world, "bare", other / "artifacts", model=False)
    said = refused(world, "import", "mlflow", "theirs")
    assert "contains 2 runs; name a run with --run" in said
    assert run in said
    assert bare in said
    alone = posttrain(world, "import", "mlflow", "theirs", "--run", bare, "-o", "json")
    assert [asset["ref"] for asset in alone["assets"]] == ["history:bare@1"]
    assert "only its metrics are registered" in alone["notes"][-1]
    assert "has no run 'other'" in refused(world, "import", "mlflow", "theirs", "--run", "other")


def test_what_is_no_mlflow_store(world: Path) -> None:
    import sqlite3

    assert "no such folder" in refused(world, "import", "mlflow", "nowhere")
    assert not (world / "nowhere").exists()
    assert "is not an MLflow store" in refused(world, "import", "mlflow", "tiny")
    (world / "x.db").write_bytes(b"no database" * 100)
    assert "is not a readable SQLite file" in refused(world, "import", "mlflow", "x.db")
    sqlite3.connect(world / "empty.db").execute("create table t (a)").connection.close()
    assert "has no table of experiments" in refused(world, "import", "mlflow", "sqlite:///empty.db")


def test_an_offline_run_of_wandb(world: Path) -> None:
    made = """
import wandb
quiet = wandb.Settings(x_disable_stats=True, console="off", silent=True)
config = {"lr": 1e-3, "hub_token": "hf_abc", "train_file": "rows.jsonl"}
config["model"] = {"model_name_or_path": "Qwen/Qwen3-0.6B"}
run = wandb.init(project="sums", mode="offline", dir=".", name="Nice Name", config=config, settings=quiet)
for step in range(5):
    run.log({"train/loss": 1 / (step + 1), "note": "x"}, step=2 * step)
run.log({"eval": {"loss": float("nan")}})
run.finish()
"""
    subprocess.run([sys.executable, "-c", made], cwd=world, check=True, timeout=PATIENCE)
    (folder,) = (world / "wandb").glob("offline-run-*")
    told = posttrain(world, "import", "wandb-export", str(folder), "-o", "json")
    refs = [asset["ref"] for asset in told["assets"]]
    assert refs == ["dataset:nice-name-rows@1", "history:nice-name@1"]
    assert told["withheld"] == ["hub_token"]
    assert not any("no end" in note for note in told["notes"])
    shown = posttrain(world, "asset", "get", "history:nice-name", "-o", "json")
    curves = {curve["metric"]: curve for curve in shown["curves"]}
    assert (curves["train/loss"]["steps"], curves["train/loss"]["last"]) == ([0, 8], 0.2)
    assert shown["meta"]["not_finite"] == 1
    tree = posttrain(world, "lineage", "history:nice-name", "-o", "json")
    imported = next(node for node in below(tree) if node["kind"] == "import")
    import wandb

    assert imported["details"]["made with"] == f"wandb {wandb.__version__}"
    assert "hf_abc" not in json.dumps(tree)
    again = posttrain(world, "import", "wandb-export", "wandb", "-o", "json")  # the only run there
    assert again["assets"][-1]["ref"] == "history:nice-name@1"

    log = next(folder.glob("*.wandb"))
    whole = log.read_bytes()
    log.write_bytes(whole[: len(whole) * 2 // 3])  # a run that was killed
    cut = posttrain(world, "import", "wandb-export", str(folder), "-o", "json")
    assert any("is incomplete" in note for note in cut["notes"])
    log.write_bytes(whole[:200] + b"\xff" * 50 + whole[250:])
    assert "is damaged" in refused(world, "import", "wandb-export", str(folder))


def test_audit_25_the_recorded_settings_of_trl_are_those_of_the_installed_one() -> None:
    """`tests/unit/test_foreign_trl_settings.py` goes through the recorded ones."""
    import trl

    path = Path(__file__).parents[1] / "unit" / "fixtures" / "trl_settings.json"
    recorded: dict[str, Any] = json.loads(path.read_text())
    for name, settings in recorded.items():
        if name in ("trl", "transformers"):
            continue
        kind = getattr(trl, name)
        has_fields = dataclasses.is_dataclass(kind)
        there = (
            {field.name for field in dataclasses.fields(kind)}
            if has_fields
            else set(inspect.signature(kind.__init__).parameters) - {"self", "args"}
        )
        assert set(settings) == there, f"{name} of TRL {trl.__version__}, recorded of {recorded['trl']}"
    for name, places in PLACES.items():
        order = list(inspect.signature(getattr(trl, name).__init__).parameters)[1:]
        assert order[: len(places.split())] == places.split(), name
