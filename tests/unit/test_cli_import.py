"""Runs of other trainers, imported through the command line."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from cli_world import World, make_world, write_model
from outside_runs import CARD, children, state, trl_output, weights, with_model

from posttrain.app.workspace import open_workspace
from posttrain.foreign.outside import named_in_params, public_params
from posttrain.store.trees import materialise


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.ok("init")
    return made


@pytest.fixture
def out(world: World) -> Path:
    return trl_output(world.root / "out")


def known(world: World) -> list[str]:
    return [row["ref"] for row in world.json("asset", "ls")]


def points(world: World, ref: str) -> list[dict[str, Any]]:
    workspace = open_workspace(world.root)
    data = workspace.blobs.get(workspace.catalog.find(ref).digest)
    workspace.close()
    rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
    return rows


def model_files(world: World, ref: str) -> dict[str, bytes]:
    workspace = open_workspace(world.root)
    folder = materialise(workspace.blobs, workspace.catalog.find(ref).digest, world.root / "looked-at")
    workspace.close()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(world: World, *words: str, code: int = 2) -> str:
    """The one line with which a command that registers nothing is refused."""
    before = known(world)
    result = world("import", *words)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exception)
    assert result.stderr.startswith("error: "), result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "bug in Posttrain" not in result.stderr
    assert known(world) == before
    return str(result.stderr)


class TestTheModel:
    def test_the_root_goes_before_checkpoints(self, world: World, out: Path) -> None:
        with_model(out, 9.0)
        said = world.ok("import", "trl-output", "out")
        assert "model: the model at the root of the folder" in said
        files = model_files(world, "model:out@1")
        assert files == {
            "config.json": (out / "config.json").read_bytes(),
            "model.safetensors": weights(9.0),
            "README.md": CARD.encode(),
        }

    def test_the_best_checkpoint_goes_before_the_newest(self, world: World) -> None:
        trl_output(world.root / "out", best_model_checkpoint="/elsewhere/out/checkpoint-2", best_metric=0.25)
        assert "checkpoint-2, the best of 2 checkpoints" in world.ok("import", "trl-output", "out")
        assert model_files(world, "model:out")["model.safetensors"] == weights(2.0)

    def test_without_a_best_the_newest_by_number(self, world: World) -> None:
        trl_output(world.root / "out", steps=(9, 10))
        assert "checkpoint-10, the newest of 2 checkpoints" in world.ok("import", "trl-output", "out")
        assert model_files(world, "model:out")["model.safetensors"] == weights(10.0)

    def test_a_best_that_was_deleted_is_not_it(self, world: World) -> None:
        trl_output(world.root / "out", best_model_checkpoint="out/checkpoint-1")
        assert "checkpoint-4, the newest" in world.ok("import", "trl-output", "out")

    def test_pickles_stay_where_they_are_and_it_is_said(self, world: World, out: Path) -> None:
        told = world.json("import", "trl-output", "out")
        assert told["left_out"]["checkpoint-4/optimizer.pt"] == "a pickle, which Posttrain never opens"
        assert told["left_out"]["checkpoint-2/"] == "another checkpoint"
        assert set(model_files(world, "model:out")) == {"config.json", "model.safetensors"}

    def test_metrics_alone_where_no_model_was_saved(self, world: World) -> None:
        (world.root / "out").mkdir()
        world.write("out/trainer_state.json", state(4))
        assert "only its metrics are registered" in world.ok("import", "trl-output", "out")
        assert [ref for ref in known(world) if ":out@" in ref] == ["history:out@1"]

    def test_a_model_alone_where_no_state_was_saved(self, world: World) -> None:
        (world.root / "out").mkdir()
        with_model(world.root / "out", 3.0)
        world.write("out/README.md", CARD)
        assert "the metrics of this run are unknown" in world.ok("import", "trl-output", "out")
        assert [ref for ref in known(world) if ":out@" in ref] == ["model:out@1"]


class TestTheHistory:
    def test_points_are_what_was_logged_in_the_columns_of_the_parquet_tracker(self, world: World, out: Path) -> None:
        world.ok("import", "trl-output", "out")
        found = points(world, "history:out@1")
        assert list(found[0]) == ["run", "stage", "step", "wall_time", "metric", "value"]
        loss = [(row["step"], row["value"]) for row in found if row["metric"] == "loss"]
        assert loss == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 0.25)]
        assert {(row["run"], row["stage"], row["wall_time"]) for row in found} == {("out", "sft", None)}
        assert {row["metric"] for row in found} == {"epoch", "learning_rate", "loss", "eval_loss", "train_runtime"}

    def test_get_shows_first_and_last_values(self, world: World, out: Path) -> None:
        world.ok("import", "trl-output", "out")
        curves = {row["metric"]: row for row in world.json("asset", "get", "history:out")["curves"]}
        assert curves["loss"] == {
            "metric": "loss", "points": 4, "steps": [1, 4], "first": 1.0, "last": 0.25, "least": 0.25, "most": 1.0,
        }  # fmt: skip
        assert "loss" in world.ok("asset", "get", "history:out")

    def test_audit_31_compare_takes_an_imported_history(self, world: World, out: Path) -> None:
        world.prepare()
        world.ok("import", "trl-output", "out")
        world.ok("run", "run.yaml")
        shown = world.ok("compare", "history:out", "sort", "--html", "page.html")
        assert "A  sort-" in shown, "a run is what the others are held against"
        assert re.search(r"loss +B +4 +1-4 +1 +0.25 +0.25 +1\n", shown), shown
        found = world.json("compare", "sort", "history:out")
        (history,) = found["histories"]
        assert (history["label"], history["ref"]) == ("B", "history:out@1")
        assert {one["metric"]: one["last"] for one in history["curves"]}["loss"] == 0.25
        page = (world.root / "page.html").read_text()
        assert page.count("B history:out@1") >= 2, "its loss lies over those of both stages"
        for words, said in (
            (["history:out", "history:out@1"], "at least one run must be named"),
            (["sort", "history:typo"], "typo"),
        ):
            result = world("compare", *words)
            assert (result.exit_code, said in result.stderr, result.stderr.count("\n")) == (2, True, 1), result.stderr

    def test_nan_is_kept_and_told(self, world: World) -> None:
        rows = [{"step": 1, "loss": float("nan")}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": float("inf")}]
        trl_output(world.root / "out", rows=rows)
        assert "2 values of the history are NaN or infinite and are kept unchanged" in world.ok(
            "import", "trl-output", "out"
        )
        loss = [row["value"] for row in points(world, "history:out")]
        assert loss[0] != loss[0]
        assert loss[1:] == [0.5, float("inf")]
        assert world.json("asset", "get", "history:out")["curves"][0]["most"] == 0.5
        assert world.json("lineage", "model:out")["kind"] == "model"

    def test_what_is_no_number_is_told(self, world: World) -> None:
        trl_output(world.root / "out", rows=[{"step": 1, "loss": 0.5, "table": [1], "note": "x"}])
        assert "2 entries of log_history are not numbers" in world.ok("import", "trl-output", "out")

    @pytest.mark.slow
    def test_a_million_rows(self, world: World) -> None:
        (world.root / "out").mkdir()
        rows = [{"step": s, "loss": 0.5, "lr": 0.1} for s in range(10**6)]
        world.write("out/trainer_state.json", state(10**6, rows))
        world.ok("import", "trl-output", "out")
        assert world.json("asset", "get", "history:out")["meta"]["points"] == 2 * 10**6

    def test_a_history_is_no_data_and_is_not_added_by_hand(self, world: World, out: Path) -> None:
        world.prepare()
        world.ok("import", "trl-output", "out")
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec["data"]["train"] = "history:out"
        result = world("plan", world.write("bad.yaml", yaml.safe_dump(spec)))
        assert result.exit_code == 2
        assert "expected a dataset, got a history" in result.stderr
        assert "posttrain import" in world("asset", "add", "history:x", "run.yaml").stderr


class TestVersions:
    def test_the_same_folder_again_is_the_same_version(self, world: World, out: Path) -> None:
        first = world.json("import", "trl-output", "out")
        moved = shutil.copytree(out, world.root / "elsewhere" / "out")
        assert [a["ref"] for a in world.json("import", "trl-output", str(moved))["assets"]] == [
            a["ref"] for a in first["assets"]
        ]

    def test_a_folder_that_changed_is_a_new_version(self, world: World, out: Path) -> None:
        world.ok("import", "trl-output", "out")
        world.write("out/checkpoint-4/trainer_state.json", state(5))
        refs = [asset["ref"] for asset in world.json("import", "trl-output", "out")["assets"]]
        assert refs == ["history:out@2", "model:out@2"]

    def test_a_name_of_ones_own(self, world: World, out: Path) -> None:
        refs = [a["ref"] for a in world.json("import", "trl-output", "out", "--name", "capybara")["assets"]]
        assert refs == ["history:capybara@1", "model:capybara@1"]

    def test_a_folders_name_is_put_into_the_letters_of_names(self, world: World, out: Path) -> None:
        out.rename(world.root / "My Run (β)")
        assert "model:my-run@1" in world.ok("import", "trl-output", "My Run (β)")


class TestLineage:
    def check(self, tree: dict[str, Any]) -> None:
        imported = children(tree, "import")[0]
        assert imported["name"] == "out (trl-output)"
        assert "checkpoint-4, the newest" in dict(imported["details"])["model"]
        assert dict(imported["details"])["made with"] == "transformers 5.23.0 trl 1.16.0"
        files = {node["name"] for node in children(tree, "file")}
        assert files == {"checkpoint-4/trainer_state.json", "README.md"}
        assert dict(children(tree, "parameters")[0]["details"])["train_batch_size"] == "4"
        named = {node["name"] for node in imported["children"] if dict(node["details"]).get("known") == "by name only"}
        assert named == {"Qwen/Qwen3-0.6B", "trl-lib/Capybara"}
        end = children(tree, "end")[0]
        assert end["name"] == "before this: unknown"
        assert "the origin of Qwen/Qwen3-0.6B" in dict(end["details"])["not known"]

    def test_of_the_model_itself(self, world: World, out: Path) -> None:
        world.ok("import", "trl-output", "out")
        self.check(world.json("lineage", "model:out"))
        assert "end before this: unknown" in world.ok("lineage", "model:out@1")
        assert children(world.json("lineage", "history:out"), "end")

    def test_of_a_released_channel_and_what_is_exported(self, world: World, out: Path) -> None:
        world.prepare()
        world.ok("import", "trl-output", "out")
        spec = yaml.safe_load(Path("run.yaml").read_text()) | {"model": "model:out"}
        world.ok("run", world.write("on.yaml", yaml.safe_dump(spec)))
        self.check(world.json("lineage", "prod"))
        world.ok("export", "prod", "taken")
        self.check(json.loads(Path("taken/lineage.json").read_text())["lineage"])
        card = Path("taken/README.md").read_text()
        assert "import out (trl-output)" in card
        assert "end before this: unknown" in card

    def test_of_the_imported_model_exported_as_it_is(self, world: World, out: Path) -> None:
        with_model(out, 3.0)
        world.ok("import", "trl-output", "out")
        world.ok("export", "model:out", "taken")
        assert Path("taken/README.md").read_text() == CARD
        said = json.loads(Path("taken/lineage.json").read_text())
        assert said["model"]["name"] == "model:out@1"
        assert children(said["lineage"], "end")

    def test_verify_covers_what_has_bytes(self, world: World, out: Path) -> None:
        world.ok("import", "trl-output", "out")
        assert world.json("verify", "model:out")["checked"] == 3  # the model, the record, the history
        digest = world.json("asset", "get", "history:out")["digest"]
        blob = next(p for p in (world.root / ".posttrain/blobs").rglob("*") if p.is_file() and digest.endswith(p.name))
        blob.chmod(0o600)
        blob.write_bytes(b"other bytes")
        result = world("verify", "model:out")
        assert result.exit_code == 8
        assert "history:out@1" in result.stderr


class TestRefused:
    def test_no_folder(self, world: World) -> None:
        assert "no such folder" in refused(world, "trl-output", "nowhere")

    def test_no_run(self, world: World) -> None:
        (world.root / "empty").mkdir()
        assert "is not an output_dir" in refused(world, "trl-output", "empty")
        write_model(world.root / "base", 0.1)
        assert "posttrain asset add model:NAME" in refused(world, "trl-output", "base")

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            (state(4)[:-30], "is not JSON or is truncated"),
            ("", "is not JSON or is truncated"),
            ("[" * 100_000, "is not JSON or is truncated"),
            ("[1]", "must be a JSON map, got list"),
            (state(4, rows=["x"]), "log_history[0] must be a map, got str"),
            (json.dumps({"log_history": {}}), "log_history must be a list, got dict"),
            (state(4, rows=[{"loss": 1.0}]), "step must be a whole number from 0, got None"),
            (state(4, rows=[{"step": -1, "loss": 1.0}]), "step must be a whole number from 0, got -1"),
            (state(4, rows=[{"step": float("nan"), "loss": 1.0}]), "step must be a whole number from 0, got nan"),
            (state(4, rows=[{"step": 10**30, "loss": 1.0}]), "step must be a whole number from 0"),
            (state(4, rows=[{"step": 1, "loss": 10**400}]), "must be in the range of a 64-bit float"),
            (state(4, rows=[{"step": 1, "\ud800": 1.0}]), "UTF-8"),
        ],
    )
    def test_a_state_that_is_none(self, world: World, out: Path, text: str, why: str) -> None:
        world.write("out/checkpoint-4/trainer_state.json", text)
        assert why in refused(world, "trl-output", "out")

    def test_an_adapter(self, world: World) -> None:
        place = world.root / "out" / "checkpoint-2"
        place.mkdir(parents=True)
        for name in ("adapter_config.json", "trainer_state.json"):
            (place / name).write_text(state(2))
        (place / "adapter_model.safetensors").write_bytes(weights(1.0))
        said = refused(world, "trl-output", "out")
        assert "checkpoint-2 contains an adapter" in said
        assert "merge_and_unload" in said

    def test_weights_as_a_pickle(self, world: World, out: Path) -> None:
        for step in (2, 4):
            place = out / f"checkpoint-{step}"
            (place / "model.safetensors").rename(place / "pytorch_model.bin")
        assert "pytorch_model.bin), which Posttrain never reads" in refused(world, "trl-output", "out")

    def test_weights_that_were_cut_short(self, world: World, out: Path) -> None:
        (out / "checkpoint-4" / "model.safetensors").write_bytes(weights(1.0)[:-2])
        assert "model.safetensors" in refused(world, "trl-output", "out")

    @pytest.mark.parametrize("name", ["model.safetensors", "trainer_state.json", "config.json"])
    def test_a_link_out_of_the_folder(self, world: World, out: Path, name: str) -> None:
        own = out / "checkpoint-4" / name
        own.rename(world.root / f"outside-{name}")
        own.symlink_to(world.root / f"outside-{name}")
        assert "must not be a link out of the folder" in refused(world, "trl-output", "out")

    def test_a_checkpoint_that_lies_elsewhere(self, world: World, out: Path) -> None:
        (out / "checkpoint-4").rename(world.root / "elsewhere")
        (out / "checkpoint-4").symlink_to(world.root / "elsewhere")
        assert "must not be a link out of the folder" in refused(world, "trl-output", "out")

    def test_a_pipe_is_not_waited_for(self, world: World, out: Path) -> None:
        (out / "checkpoint-4" / "trainer_state.json").unlink()
        os.mkfifo(out / "checkpoint-4" / "trainer_state.json")
        assert "must be a plain file" in refused(world, "trl-output", "out")

    @pytest.mark.parametrize("name", ["a/b", "../up", "Groß", "x" * 64, "@1", ""])
    def test_a_name_that_no_asset_has(self, world: World, out: Path, name: str) -> None:
        if name:
            assert "name must match" in refused(world, "trl-output", "out", "--name", name)
        else:
            out.rename(world.root / "モデル")
            assert "give a name with --name" in refused(world, "trl-output", "モデル")

    @pytest.mark.parametrize("what", ["put", "transaction"])
    def test_a_full_disk_registers_nothing(
        self, world: World, out: Path, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from posttrain.domain.errors import WorkspaceError

        def full(*_: Any, **__: Any) -> Any:
            raise WorkspaceError("the disk is full; free some space")

        place = {"put": "store.blobs.ObjectBlobs.put", "transaction": "store.transaction.Transaction._insert"}[what]
        with monkeypatch.context() as patch:
            patch.setattr(f"posttrain.{place}", full)
            refused(world, "trl-output", "out", code=10)
        world.ok("import", "trl-output", "out")


CONFIG = "learning_rate:\n  desc: null\n  value: 0.1\napi_key:\n  value: abc\ntrain_file:\n  value: rows.jsonl\n"
EXPORTED = [{"_step": 0, "_timestamp": 5.5, "loss": 1.5, "eval/acc": None}, {"_step": 3, "loss": 0.5, "eval/acc": 1.0}]


def exported(folder: Path, suffix: str) -> Path:
    """A history as people export it, with its configuration."""
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    path = folder / f"history{suffix}"
    if suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(EXPORTED), path)
    elif suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in EXPORTED))
    else:
        path.write_text("_step,_timestamp,loss,eval/acc\n0,5.5,1.5,\n3,,0.5,1.0\n")
    return folder


class TestWandbExport:
    @pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
    def test_a_history_with_its_configuration(self, world: World, suffix: str) -> None:
        exported(world.root / "w", suffix)
        world.write("w/rows.jsonl", '{"prompt": "a", "completion": "b"}\n')
        if suffix == ".jsonl":
            (world.root / "w/rows.jsonl").rename(world.root / "rows.jsonl")
        told = world.json("import", "wandb-export", "w")
        assert [asset["ref"] for asset in told["assets"]] == ["dataset:w-rows@1", "history:w@1"]
        assert told["withheld"] == ["api_key"]
        found = [(row["step"], row["wall_time"], row["metric"], row["value"]) for row in points(world, "history:w")]
        assert found == [(0, 5.5, "loss", 1.5), (3, None, "loss", 0.5), (3, None, "eval/acc", 1.0)]
        tree = world.json("lineage", "history:w")
        assert children(tree, "parameters")[0]["details"]["learning_rate"] == "0.1"
        assert children(tree, "dataset")[0]["name"] == "dataset:w-rows@1"
        assert world.json("verify", "history:w")["checked"] == 3

    def test_the_model_that_is_there(self, world: World) -> None:
        exported(world.root / "w", ".csv")
        write_model(world.root / "w" / "files" / "final", 4.0)
        assert "model: files/final" in world.ok("import", "wandb-export", "w")
        assert model_files(world, "model:w")["model.safetensors"] == weights(4.0)

    @pytest.mark.parametrize(
        ("name", "text", "why"),
        [
            ("history.csv", "step,loss\n1,2\n", "must have _step"),
            ("history.csv", "_step,loss\n1\n", "as many cells"),
            ("history.csv", "_step,loss\n-1,2\n", "step must be a whole number"),
            ("history.csv", "_step,loss\nnan,2\n", "step must be a whole number"),
            ("history.csv", '_step,loss\n1,"2', "cannot be read"),
            ("history.jsonl", '{"_step": 1, "loss"', "cannot be read"),
            ("history.jsonl", "[" * 100_000, "cannot be read"),
            ("history.jsonl", "[1]\n", "must be a JSON map"),
            ("history.parquet", "PAR1", "cannot be read"),
            ("run-x.wandb", "is not a wandb file", "wandb"),
            ("notes.txt", "", "is not a W&B run"),
        ],
    )
    def test_what_is_no_history(self, world: World, name: str, text: str, why: str) -> None:
        (world.root / "w").mkdir()
        world.write(f"w/{name}", text)
        assert why in refused(world, "wandb-export", "w")

    def test_two_histories_or_a_link_out(self, world: World) -> None:
        exported(world.root / "w", ".csv")
        world.write("w/history-2.csv", "_step,loss\n")
        assert "must contain one history" in refused(world, "wandb-export", "w")
        (world.root / "w/history-2.csv").unlink()
        (world.root / "w/history.csv").rename(world.root / "elsewhere.csv")
        (world.root / "w/history.csv").symlink_to(world.root / "elsewhere.csv")
        assert "must not be a link out of the folder" in refused(world, "wandb-export", "w")

    def test_without_the_package(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        (world.root / "w").mkdir()
        world.write("w/run-x.wandb", ":W&B")
        monkeypatch.setitem(sys.modules, "wandb.proto.wandb_internal_pb2", None)
        assert "pip install 'posttrain[wandb]'" in refused(world, "wandb-export", "w")


def test_without_the_package_one_line_says_what_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow.tracking", None)
    assert "pip install 'posttrain[mlflow]'" in refused(world, "mlflow", "mlruns")


def test_data_sets_that_a_run_names_are_looked_for_beside_it(world: World) -> None:
    world.write("rows.jsonl", "{}")
    params = {"args": {"dataset_name": "org/set"}, "data.train_files": ["rows.jsonl", "gone.jsonl"], "lr": 1, "x": "y"}
    found = {named.name: named.path for named in named_in_params(params, world.root / "run")}
    assert found == {"org/set": None, "rows.jsonl": world.root / "rows.jsonl", "gone.jsonl": None}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hub_token", "x1"),
        ("args.hub_token", "x1"),
        ("api_key", "abc"),
        ("WANDB_API_KEY", "0123"),
        ("env.password", "hunter2"),
        ("anything", "hf_" + "a" * 34),
        ("url", "https://me:secret@example.org/x"),
        ("nested", {"deep": {"openai_api_key": "sk-x"}}),
        ("listed", ["ghp_" + "a" * 36]),
    ],
)
def test_parameters_that_may_be_secrets_stay_out(name: str, value: Any) -> None:
    kept, withheld = public_params({name: value, "learning_rate": 1e-3})
    assert kept == {"learning_rate": "0.001"}
    assert len(withheld) == 1


def test_parameters_that_only_sound_like_secrets_stay() -> None:
    harmless = {"eos_token": "</s>", "pad_token_id": 0, "num_input_tokens_seen": 5, "hub_token": None, "max_tokens": 8}
    kept, withheld = public_params(harmless)
    assert set(kept) == set(harmless)
    assert withheld == ()
