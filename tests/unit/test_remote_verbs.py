"""Verbs whose answers are large, or whose input lies on the client's machine: the same from afar as in process."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from cli_world import BAD_REWARD, World, make_world
from hypothesis import given, strategies as st
from server_bench import KEY, ServerBench, serving

import posttrain
from posttrain.api.codec import adapter
from posttrain.api.control import VERBS, Control
from posttrain.app.control import control_of
from posttrain.app.workspace import Workspace
from posttrain.cli.main import app
from posttrain.client.blobs import Fetcher
from posttrain.client.transport import Transport
from posttrain.decision.gates import Evidence
from posttrain.domain.errors import AccessError, DeadlineError, InputError, IntegrityError, PosttrainError
from posttrain.domain.ids import Role
from posttrain.domain.overrides import parse_overrides
from posttrain.foreign.outside import RUN as FOUND, FoundModel, Named, OutsideRun, Points, carried, carry
from posttrain.server.authentication import to_json


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, list[str]]]:
    """A good run and a spoiled one."""
    with pytest.MonkeyPatch.context() as patch:
        world = make_world(tmp_path_factory.mktemp("compare"), patch)
        world.prepare()
        world.ok("run", "run.yaml")
        good = world.newest()
        world.ok("asset", "add", "reward:sort", world.write("reward_v2.py", BAD_REWARD))
        assert world("run", "run.yaml").exit_code == 3
        yield world, [good, world.newest()]


@pytest.fixture(scope="module")
def bench(story: tuple[World, list[str]]) -> Iterator[ServerBench]:
    with serving(Workspace(story[0].root / ".posttrain")) as made:
        yield made


@pytest.mark.slow
def test_a_comparison_is_the_same_from_afar(bench: ServerBench, story: tuple[World, list[str]]) -> None:
    here, there = control_of(bench.workspace).compare(story[1]), bench.control(KEY).compare(story[1])
    assert there.to_json() == here.to_json()
    assert (there.metrics, there.parameters, there.notes) == (here.metrics, here.parameters, here.notes)
    for mine, theirs in zip(here.subjects, there.subjects, strict=True):
        assert (theirs.run, theirs.manifest, theirs.rows, theirs.name) == (
            mine.run,
            mine.manifest,
            mine.rows,
            mine.name,
        )
        for one, other in zip(mine.evaluations, theirs.evaluations, strict=True):
            for metric, evidence in one.evidence.items():
                found = other.evidence[metric]
                assert (found.item_ids, found.range) == (evidence.item_ids, evidence.range)
                assert found.values.dtype == np.float64
                assert np.array_equal(found.values, evidence.values)


def test_its_page_is_written_where_it_was_asked_for(
    bench: ServerBench, story: tuple[World, list[str]], tmp_path: Path
) -> None:
    page = tmp_path / "mine.html"
    bench.control(KEY).compare(story[1], page)
    assert "<html" in page.read_text()
    assert str(bench.workspace.root) not in page.read_text()
    assert [one.name for one in tmp_path.iterdir()] == ["mine.html"]
    with pytest.raises(InputError, match="name 2 to"):
        bench.control(KEY).compare(story[1][:1])


def test_a_sweep_is_planned_submitted_and_ranked_from_afar(bench: ServerBench, story: tuple[World, list[str]]) -> None:
    here, there = control_of(bench.workspace), bench.control(KEY)
    asked = (story[0].root / "run.yaml", parse_overrides(["grpo.steps=4,6"]))
    mine, theirs = (one.plan_sweep(*asked, seeds=1, metric=None, better=None) for one in (here, there))
    assert (theirs.points, theirs.source, theirs.metric) == (mine.points, mine.source, mine.metric)
    made = there.submit_point(theirs.points[1])
    assert (made.attached, made.run.id) == (False, here.submit_point(mine.points[1]).run.id)
    runs = {(theirs.points[1].place, theirs.points[1].seed): made.run.id}
    assert there.rank(theirs, runs).to_json([{}, {}]) == here.rank(mine, runs).to_json([{}, {}])
    with pytest.raises(InputError, match="the sweep has no point number 9"):
        there.submit_point(replace(theirs.points[1], place=9))


def test_a_parameter_that_a_verb_does_not_have_is_refused_as_over_http(bench: ServerBench) -> None:
    control: Any = control_of(bench.workspace)
    with pytest.raises(
        InputError, match=r"ls: unknown parameter 'limits' \(did you mean 'limit'\?\); remove or rename it"
    ):
        control.ls(limits=5)
    there: Any = bench.control(KEY)
    for ask in (lambda: there.ls(limits=5), lambda: there.drive("x", limits=5)):
        with pytest.raises(InputError, match="unknown parameter 'limits'"):
            ask()
    for words, options in (((), {}), ((5, None, None, 7), {}), ((5,), {"limit": 6})):
        with pytest.raises(InputError, match=r"ls: .*limit|ls: too many"):
            control.ls(*words, **options)
    found = bench.ask("GET", "/v1/projects/default/runs?limits=5", KEY)
    assert (found.status, "ls: unknown parameter 'limits'" in found.json["detail"]) == (422, True)


@given(st.lists(st.floats(width=64), max_size=20))
def test_arrays_come_back_bit_by_bit(values: list[float]) -> None:
    before = Evidence(tuple(map(str, range(len(values)))), np.array(values, dtype=np.float64), None)
    after = adapter(Evidence).validate_json(to_json(before))
    assert np.array_equal(after.values, before.values, equal_nan=True)
    assert np.array_equal(np.signbit(after.values), np.signbit(before.values)) or np.isnan(before.values).any()


# --- runs of other programs -------------------------------------------------------------------------------------------


def outside(folder: Path) -> OutsideRun:
    points = Points()
    for step in range(5):
        points.add("loss", step, 1.0 / (step + 3), 1000.0 + step)
        points.add("odd", step, float("nan") if step == 2 else float(step))
    (folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    (folder / "config.yaml").write_text("x: 1\n")
    (folder / "secret.txt").write_text("not for anybody")
    named = Named("data set", "rows.jsonl", folder / "rows.jsonl", "by its parameter train_file")
    return OutsideRun(
        "mlflow", "a run ü", points, tools={"mlflow": "3"}, params={"lr": "0.1"}, withheld=("api_key",),
        read={"config.yaml": folder / "config.yaml"}, named=(named, Named("base model", "tiny")), notes=("a note",),
    )  # fmt: skip


def plain(run: OutsideRun) -> Any:
    points = {name: list(getattr(run.points, name)) for name in ("names", "metric", "step", "at", "value")}
    rest = {name: getattr(run, name) for name in ("format", "source", "stage", "tools", "params", "withheld", "notes")}
    read = {name: path.read_bytes() for name, path in run.read.items()}
    named = [(one.role, one.name, one.path and (one.path.name, one.path.read_bytes()), one.said) for one in run.named]
    return json.dumps([points, run.points.strange, rest], default=str), read, named


def test_what_was_read_here_is_registered_there(
    bench: ServerBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = outside(tmp_path)
    monkeypatch.setattr("posttrain.foreign.mlflow_run.read_mlflow", lambda where, name: run)
    there: Control = bench.control(KEY)
    from_afar = there.import_mlflow("sqlite:///nowhere.db", "x", "mine")
    assert [one.ref for one in from_afar.assets] == ["dataset:mine-rows@1", "history:mine@1"]
    here = control_of(bench.workspace).import_mlflow("sqlite:///nowhere.db", "x", "mine")
    assert here.record == from_afar.record
    assert here.digest == from_afar.digest
    assert [one.ref for one in here.assets] == ["history:mine@1"], "the same again is the same"


def sent(folder: Path) -> Path:
    """As a server has it: without links."""
    return shutil.copytree(folder, folder.parent / f"{folder.name}-sent")


def test_a_run_comes_back_as_it_was_read(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    run = outside(tmp_path / "from")
    assert plain(carried(sent(carry(run, tmp_path / "to")))) == plain(run)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "again").mkdir()
    model = OutsideRun(
        "mlflow", "m", Points(), model=FoundModel({"config.json": tmp_path / "model/config.json"}, "root")
    )
    back = carried(sent(carry(model, tmp_path / "again"))).model
    assert back is not None
    assert (back.place, back.files["config.json"].read_text()) == ("root", "{}")


@pytest.mark.parametrize(
    "place", ["../secret.txt", "/etc/passwd", "files/0/../../../secret.txt", "", "files/9/x", "link"]
)
def test_a_run_that_came_from_afar_names_no_file_of_the_server(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "sent"
    folder.mkdir()
    carry(outside(tmp_path), folder)
    (folder / "link").symlink_to(tmp_path / "secret.txt")
    said = json.loads((folder / FOUND).read_text())
    for change in ({"read": {"x": place}}, {"model": {"place": "x", "files": {"x": place}}}):
        (folder / FOUND).write_text(json.dumps({**said, **change}))
        with pytest.raises(PosttrainError):
            carried(folder)
    if place:
        (folder / FOUND).write_text(json.dumps({**said, "named": [["data set", "x", place, ""]]}))
        with pytest.raises(PosttrainError):
            carried(folder)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": "posttrain.outside/1"}', '{"format": "posttrain.outside/9"}']
)
def test_a_run_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FOUND).write_text(text)
    with pytest.raises(InputError):
        carried(tmp_path)


def test_an_address_from_afar_is_not_connected_to(bench: ServerBench) -> None:
    body = {"folder": {"name": "x", "digest": "sha256:" + "0" * 64, "form": "tree"}, "name": None, "where": "http://x"}
    found = bench.ask("POST", "/v1/projects/default/imports/mlflow", KEY, body)
    assert (found.status, "where" in found.json["detail"]) == (422, True)


def test_whoever_asks_a_server_loads_nothing_of_a_workspace() -> None:
    """Seconds of each command: the ledger's and the store's libraries are the embedded side's."""
    code = """
import os, sys
os.environ |= {"POSTTRAIN_SERVER": "http://127.0.0.1:9", "POSTTRAIN_TOKEN": "x"}
from posttrain.app.control import open_control
from posttrain.api.control import VERBS
open_control().close()
[VERBS[name].answer for name in ("whoami", "stop", "tokens")]
print(sorted({"sqlalchemy", "alembic", "obstore", "numpy", "scipy", "pyarrow", "fastapi"} & set(sys.modules)))
"""
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=500)
    assert shown.stdout.strip() == "[]", shown.stdout


def test_a_refusal_names_the_command_that_was_typed(bench: ServerBench) -> None:
    group: Any = typer.main.get_command(app)
    for verb, declared in VERBS.items():
        if not declared.command:
            continue
        words = declared.command.split()
        known = group.get_command(None, words[0])  # type: ignore[arg-type]
        assert known is not None, verb
        if hasattr(known, "commands"):
            assert words[1] in known.commands, verb
    bench.person("root", Role.ADMIN)
    token = bench.person("vic", Role.VIEWER)
    with pytest.raises(AccessError, match="posttrain member set needs the role admin"):
        bench.control(token).set_member("user:x", "viewer")
    with pytest.raises(AccessError, match="posttrain asset add needs the role submitter"):
        bench.control(token).add_external("https://x/y", "x", checksum="", version="")


def test_python_is_told_what_a_run_asks_of_a_person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(tmp_path, monkeypatch)
    world.prepare()
    world.write("wait.yaml", "name: w\nowner: ada\nseed: 1\nstages: {hold: {kind: wait, signal: go}}\n")
    run = posttrain.submit("wait.yaml")
    words = f"run {run.id}: hold .*; posttrain signal {run.id} go"
    with pytest.warns(RuntimeWarning, match=words) as told, pytest.raises(DeadlineError):
        run.wait(timeout=20)
    asked = [str(one.message) for one in told if one.category is RuntimeWarning]  # not what the collector closes
    assert len(asked) == 1, asked
    run.signal("go")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run.wait().state == "succeeded"


@pytest.mark.parametrize(
    ("word", "what"),
    [
        ("~nosuchuser/x", "model ~nosuchuser/x: is not a readable path"),
        ("./nowhere", "no such file or folder"),
        ("DEEP", "must nest at most 16 folders"),
        ("EMPTY", "config.json"),
    ],
)
def test_audit_41_a_word_that_is_no_model_folder_is_refused_before_its_files_are_read(
    bench: ServerBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str, what: str
) -> None:
    monkeypatch.setattr("posttrain.client.remote.tree_digest", lambda *_, **__: pytest.fail("it was read"))
    (tmp_path / "DEEP" / "/".join("d" * 17)).mkdir(parents=True)
    (tmp_path / "EMPTY").mkdir()
    named = str(tmp_path / word) if word.isupper() else word
    with pytest.raises(PosttrainError, match=what) as raised:
        bench.control(KEY).compare([named, named])
    assert (raised.value.exit_code in (2, 4), "\n" in str(raised.value)) == (True, False)


@pytest.mark.parametrize("name", ["/etc/posttrain", "../beside", "a/../../beside"])
def test_a_server_names_no_file_outside_the_folder(tmp_path: Path, name: str) -> None:
    fetcher = Fetcher(Transport("http://127.0.0.1:9", KEY), "default")
    with pytest.raises(IntegrityError, match="outside"):
        fetcher.fetch({name: {"digest": "sha256:" + "0" * 64, "bytes": 1}}, tmp_path / "out")
    assert not (tmp_path / "beside").exists()
