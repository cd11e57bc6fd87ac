"""Kinds of stages: what Posttrain's own are, and that one of an installed package goes every way that they go."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import RUN, World, make_world
from installed import install, on_path, package_of, run_of

from posttrain.domain import kinds, plugins
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN, Driver, StageKind, installed_kind, kind_of
from posttrain.engine.config import STAGE_CONFIGS
from posttrain.execution.trainers.native import NativeTrainer

PAGE = "docs/howto/plugin.md"
POINTS = "[posttrain.kinds]\n{name} = {module}:KIND\n"
SOURCE = """
    from posttrain.domain.kinds import StageContract
    from posttrain.domain.kinds import Driver, StageKind, algorithm_kind
    from posttrain.domain.kinds import RATE

    def contract(params):
        return {contract}

    KIND = {kind}
"""
MODEL = 'StageContract({"model": "model", "steps": 3}, {"model": ("model", str(params["model"]))}, {"model": "tree"})'
EXAM = (
    'StageContract({"model": "model", "suites": "none"}, {"model": ("model", str(params["model"]))},'
    ' {"metrics": "file"}, {"heldout/accuracy": RATE})'
)


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    yield
    plugins._scan.cache_clear()
    kinds._loaded.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def add(site: Path, name: str, module: str, *, contract: str = MODEL, kind: str = "", version: str = "1.0") -> None:
    """Install a package with one kind."""
    outputs = '{"metrics": "file"}' if "metrics" in contract else '{"model": "tree"}'
    made = kind or f'StageKind("{name}", contract, outputs={outputs}, module="{module}_job")'
    source = SOURCE.replace("{contract}", contract).replace("{kind}", made)
    points = POINTS.format(name=name, module=module)
    install(site, f"posttrain-{name}", version, points, {f"{module}.py": source, f"{module}_job.py": "LEVEL = 1\n"})
    plugins._scan.cache_clear()


def check(kind: str, **params: Any) -> Any:
    return NativeTrainer().check(kind, params)


LACKS = "must have an algorithm, or a contract and the module of a job"


# --- Posttrain's own --------------------------------------------------------------------------------------------------


def test_the_engine_reads_every_kind_that_a_run_file_may_name() -> None:
    assert {*kinds.WRITTEN} - {kinds.WAIT.name} == STAGE_CONFIGS.keys()
    assert {kind.name for kind in OWN.values() if kind.driver is Driver.CONTROL} == {"gate", "release"}


def test_a_stage_leaves_what_its_kind_says() -> None:
    """And what it keeps besides, where it is told to."""
    data, reward = {"data": "d"}, {"reward": "r"}
    written: dict[str, dict[str, Any]] = {
        "sft": data,
        "reward_model": data,
        **dict.fromkeys(("dpo", "orpo", "simpo", "kto"), data),
        **dict.fromkeys(("grpo", "dr_grpo", "rloo", "dapo", "gspo", "cispo"), data | reward),
        **dict.fromkeys(("reinforce_plus_plus", "ppo", "pf_ppo"), data | reward),
        "vapo": data | reward | {"critic": {"warmup": 1}},
        "distill": data | {"teacher": "base"},
        "dataflow": data | {"recipe": "f"},
        "evaluate": {"suites": {"h": data}},
        "init_model": {},
    }
    for name, kind in OWN.items():
        if kind.driver is Driver.JOB:
            params = {**written[name], **({} if kind.measures or kind.from_nothing else {"steps": 2})}
            contract = check(name, **params) if name == "init_model" else check(name, model="base", **params)
            assert contract.outputs == kind.outputs, name
            assert bool(contract.load and contract.load.trained) == (kind.algorithm is not None), name


def test_a_kind_is_a_value() -> None:
    with pytest.raises(FrozenInstanceError):
        OWN["sft"].name = "other"  # type: ignore[misc]
    assert replace(OWN["sft"]) == OWN["sft"]
    assert kind_of("sft") is OWN["sft"]
    assert kind_of("of-a-run-of-long-ago") == StageKind("of-a-run-of-long-ago")


def test_own_kinds_look_at_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_scan", lambda: pytest.fail("looked at the packages"))
    assert installed_kind("grpo") is None
    assert check("sft", model="base", data="d", steps=1).outputs == {"model": "tree"}


# --- installed ones ---------------------------------------------------------------------------------------------------


def test_an_unknown_kind_is_told_of_those_that_are_installed(site: Path) -> None:
    add(site, "distil", "kind_hint")
    with pytest.raises(InputError, match=r"unknown stage kind 'destil' \(did you mean 'distil'\?\)"):
        check("destil")


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("3", "must name a StageKind, got 3"),
        ('StageKind("other", contract, module="m")', "its kind must have the entry point's name, got 'other'"),
        (
            'StageKind("distil", contract, Driver.CONTROL, module="m")',
            "driver must be job, got control: only a job runs a package's code",
        ),
        ('StageKind("distil", contract)', LACKS),
        ('StageKind("distil", None, module="m")', LACKS),
        ('StageKind("distil", contract, module="m; rm")', LACKS),
        ('algorithm_kind("distil", "no path", "a:b")', LACKS),
        ('StageKind("distil", contract, ships=True, module="m")', "must not set `ships` (its stages"),
        ('StageKind("distil", contract, from_nothing=True, module="m")', "must not set `from_nothing`"),
        ("1 / 0", "loading kind_bad_{}:KIND raised ZeroDivisionError: division by zero; fix or uninstall it"),
    ],
    ids=["number", "name", "driver", "no-module", "no-contract", "module", "path", "ships", "nothing", "raises"],
)
def test_a_kind_that_is_none_is_one_line(site: Path, kind: str, says: str, request: pytest.FixtureRequest) -> None:
    one = request.node.callspec.id.replace("-", "_")
    add(site, "distil", f"kind_bad_{one}", kind=kind)
    with pytest.raises(InputError) as caught:
        check("distil", model="base")
    assert str(caught.value).startswith("kind 'distil' of posttrain-distil 1.0: ")
    assert says.format(one) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert kind_of("distil") == StageKind("distil"), "a run of it can be looked at"


@pytest.mark.parametrize(
    ("contract", "says"),
    [
        ("None", "must return a StageContract, got NoneType"),
        ('StageContract({"a": {1}}, {}, {"model": "tree"})', "parameters must be JSON"),
        ('StageContract({"runtime": "fast"}, {}, {"model": "tree"})', "runtime must be a map whose threads are"),
        ('StageContract({"placement": {}}, {}, {"model": "tree"})', "the parameter placement must have a load"),
        ('StageContract({}, {"m": ("weights", "w")}, {"model": "tree"})', "input 'm' must be one of model, dataset"),
        ("StageContract({}, {}, {})", "must have at least one output"),
        ('StageContract({}, {}, {"model": "file"})', "output 'model' must be a tree, got 'file'"),
        ('StageContract({}, {}, {"model": "tree", "report": "file"})', "output 'report' is for gates only"),
        ('StageContract({}, {}, {"model": "tree"}, {"a": RATE})', "metrics require the output 'metrics'"),
        ('StageContract({}, {}, {"other": "tree"})', "its contract must declare the output model in the kind's form"),
        ('params["no"]', "its contract raised KeyError: 'no'; fix or uninstall it"),
    ],
    ids=["none", "json", "runtime", "placement", "input", "outputs", "form", "report", "metrics", "lacks", "raises"],
)
def test_a_contract_that_is_none_is_one_line(
    site: Path, contract: str, says: str, request: pytest.FixtureRequest
) -> None:
    kind = 'StageKind("distil", contract, outputs={"model": "tree"}, module="m")'
    add(site, "distil", f"kind_contract_{request.node.callspec.id}", contract=contract, kind=kind)
    with pytest.raises(InputError) as caught:
        check("distil")
    assert str(caught.value).startswith("kind 'distil' of posttrain-distil 1.0: ")
    assert says in str(caught.value)


def with_distil(world: World) -> None:
    """The middle stage is of an installed kind; its model is measured, judged and shipped."""
    run = yaml.safe_load(RUN)
    run["stages"]["grpo"] = {"kind": "distil", "model": "sft"}
    world.write("run.yaml", yaml.safe_dump(run, sort_keys=False))


@pytest.mark.slow
def test_its_model_is_measured_judged_and_shipped(world: World, site: Path) -> None:
    add(site, "distil", "kind_whole")
    with_distil(world)
    world.write("run.yaml", Path("run.yaml").read_text().replace("at_least: 0.9", "at_least: 0.3"))
    planned = world.json("plan", "run.yaml")
    stages = {stage["name"]: stage for stage in planned["stages"]}
    assert stages["grpo"]["packages"] == ["posttrain-distil 1.0"]
    assert "packages" not in stages["sft"]
    assert planned["manifest"]["code"].keys() == {"native", "kind:distil"}
    assert "distil (posttrain-distil 1.0)" in world.ok("plan", "run.yaml")
    world.ok("run", "run.yaml")
    run = world.newest()
    for verb in ("get", "why", "lineage", "verify", "diff"):
        world.ok(verb, run, *([run] if verb == "diff" else []))
    assert world.json("ls")["runs"][0]["state"] == "succeeded"
    shutil.rmtree(site)
    plugins._scan.cache_clear()
    kinds._loaded.cache_clear()
    assert world.json("get", run)["state"] == "succeeded", "and is looked at when the package is gone"
    world.ok("why", run)
    world.ok("lineage", "prod")


@pytest.mark.slow
def test_what_it_measures_is_judged(world: World, site: Path) -> None:
    """By its own parameters: it has no suites, and its `suites` is a word."""
    add(site, "exam", "kind_exam", contract=EXAM)
    world.measuring.add("exam")
    run = yaml.safe_load(RUN)
    run["stages"]["evaluate"] = {"kind": "exam", "model": "grpo"}
    world.write("run.yaml", yaml.safe_dump(run, sort_keys=False))
    for _ in range(2):  # the second time there is a baseline
        world.ok("plan", "run.yaml")
        world.ok("run", "run.yaml")
        run["seed"] += 1
        world.write("run.yaml", yaml.safe_dump(run, sort_keys=False))
    scores = world.json("get", world.newest())["scores"]
    assert {row["metric"] for row in scores["rows"]} == {"heldout/accuracy"}
    assert scores["troubles"] == []
    world.ok("get", world.newest(), "--report")


def test_its_sources_and_version_are_in_the_cache_key(world: World, site: Path) -> None:
    def cached() -> dict[str, bool]:
        plugins._scan.cache_clear()
        kinds._loaded.cache_clear()
        return {stage["name"]: bool(stage["cached_from"]) for stage in world.json("plan", "run.yaml")["stages"]}

    add(site, "distil", "kind_cached")
    with_distil(world)
    world("run", "run.yaml")
    assert [name for name, found in cached().items() if found] == ["sft", "grpo", "evaluate"]
    (site / "kind_cached_job.py").write_text("LEVEL = 2\n")
    assert (cached()["sft"], cached()["grpo"]) == (True, False), "the job's sources"
    (site / "kind_cached_job.py").write_text("LEVEL = 1\n")
    assert cached()["grpo"]
    shutil.rmtree(site / "posttrain_distil-1.0.dist-info")
    add(site, "distil", "kind_cached", version="1.1")
    assert not cached()["grpo"], "its version"


def test_a_run_without_it_keeps_its_digest(world: World, site: Path) -> None:
    before = world.json("plan", "run.yaml")["digest"]
    add(site, "distil", "kind_beside")
    assert world.json("plan", "run.yaml")["digest"] == before


def test_code_that_changes_on_the_way_is_not_mixed(world: World, site: Path) -> None:
    add(site, "distil", "kind_changed")
    with_distil(world)
    world.broken["sft"] = [3, 3]
    assert world("run", "run.yaml").exit_code != 0
    (site / "kind_changed_job.py").write_text("LEVEL = 2\n")
    result = world("retry", world.newest())
    assert result.exit_code != 0
    assert "the code of kind 'distil' must be sha256:" in result.stderr


def test_a_run_whose_package_is_gone_says_so(world: World, site: Path) -> None:
    add(site, "distil", "kind_gone")
    with_distil(world)
    world.ok("lock", "run.yaml")
    shutil.rmtree(site)
    plugins._scan.cache_clear()
    kinds._loaded.cache_clear()
    for file in ("run.yaml", "run.lock.json"):
        result = world("run", file)
        assert result.exit_code == 2, result.stdout
        says = "unknown stage kind 'distil'" if file == "run.yaml" else "kind 'distil' must be installed; install its"
        assert says in result.stderr


def test_the_package_of_the_documentation_is_planned(world: World, site: Path) -> None:
    """Its files and its run file as they stand on the page; tests/e2e/test_plugin.py installs and runs it."""
    install(site, *package_of(PAGE))
    plugins._scan.cache_clear()
    world.ok("asset", "add", "dataset:sort-train", "train.jsonl")
    world.ok("asset", "add", "model:tiny-sort", "base")
    world.write("run.yaml", run_of(PAGE))
    stages = {stage["name"]: stage for stage in world.json("plan", "run.yaml")["stages"]}
    assert {name: stage["packages"] for name, stage in stages.items()} == {
        "words": ["posttrain-words 1.0"],
        "raft": ["posttrain-words 1.0"],
        "anchored": ["posttrain-words 1.0"],
        "copy": ["posttrain-words 1.0"],
    }


def test_a_plan_of_own_kinds_imports_no_package(tmp_path: Path) -> None:
    program = (
        "from posttrain.domain import plugins\n"
        "from posttrain.execution.trainers.native import NativeTrainer\n"
        "NativeTrainer().check('sft', {'model': 'base', 'data': 'd', 'steps': 1})\n"
        "print(plugins._scan.cache_info().currsize)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def test_a_job_that_leaves_less_than_its_stage_declares_has_failed(world: World, site: Path) -> None:
    add(site, "distil", "kind_lacking")
    world.measuring.add("distil")  # its job measures, where its stage promises a model
    with_distil(world)
    result = world("run", "run.yaml")
    assert result.exit_code == 5
    assert "it must leave output model as a tree, as its stage declares, got nothing" in result.stderr
