"""Engines by name: what a plan refuses of an installed one, what a job opens, and whose code is in the cache key."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import RUN, World, make_world
from installed import install, on_path
from test_engine_recipes import TINY, TOKENIZER, inline

from posttrain.app.doctor import _packages
from posttrain.domain import plugins
from posttrain.domain.engines import ENGINE, OWN_ENGINES, PROVIDED, engines_in
from posttrain.domain.errors import InputError
from posttrain.domain.manifest import StageManifest, deciding, suite_evaluator
from posttrain.engine.config import STAGE_CONFIGS, DataflowConfig, GRPOConfig, stage_config
from posttrain.engine.groups.port import RankContext
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker, decoding_fallbacks, open_rollout
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.execution.trainers.native import NativeTrainer

POINTS = """
    [posttrain.rollout_engines]
    fast = {module}:ROLLOUT
    [posttrain.train_engines]
    fast = {module}:TRAIN
"""
SPECS = """
    from posttrain.domain.engines import EngineSpec

    ROLLOUT = {rollout}
    TRAIN = {train}
"""
ENGINES = """
    from posttrain.engine.roles.training import TorchEngine
    from posttrain.engine.rollout.backends.module import ModuleRollout

    class Fast(ModuleRollout):
        pass

    class Trained(TorchEngine):
        pass

    class Hollow:
        name, context_length = "hollow", 8

        def __init__(self, *given, **words):
            self.model = given[1] if len(given) > 1 else None
"""
GRPO: dict[str, Any] = {"model": "base", "data": "d", "reward": "r", "steps": 2}
PPO: dict[str, Any] = {**GRPO, "kl": None}
SFT: dict[str, Any] = {"model": "base", "data": "d", "steps": 2}
SUITE = {"model": "base", "suites": {"h": {"data": "d"}}}
APART = {"policy": {"ranks": 1}, "rollout": {"ranks": 1}}
FAST = {"rollout": {"engine": "fast"}}
TRAINED = {"train": {"engine": "fast"}}
MODULES = iter(range(10**6))


@pytest.fixture(autouse=True)
def _look_anew() -> Iterator[None]:
    yield
    plugins._scan.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    on_path(monkeypatch, tmp_path / "site")
    return tmp_path / "site"


def add(site: Path, *provides: str, rollout: str = "", opened: str = "Fast") -> str:
    """Install a package with an engine of each sort; return its module."""
    module = f"engines_{next(MODULES)}"
    abilities = {field: tuple(one for one in provides if one in PROVIDED[field]) for field in OWN_ENGINES}
    learns = "Trained" if opened == "Fast" else opened
    specs = SPECS.format(
        rollout=rollout or f'EngineSpec("{module}_job:{opened}", {abilities["rollout"]})',
        train=f'EngineSpec("{module}_job:{learns}", {abilities["train"]})',
    )
    sources = {f"{module}.py": specs, f"{module}_job.py": "1 / 0" if opened == "Raises" else ENGINES}
    install(site, "posttrain-fast", "1.0", POINTS.format(module=module), sources)
    plugins._scan.cache_clear()
    return module


def check(kind: str, **params: Any) -> Any:
    return NativeTrainer().check(kind, params)


def refused(kind: str, **params: Any) -> str:
    with pytest.raises(InputError) as caught:
        check(kind, **params)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- what a plan refuses ----------------------------------------------------------------------------------------------


def test_an_unknown_engine_is_told_of_those_there_are(site: Path) -> None:
    add(site)
    assert refused("grpo", **GRPO, rollout={"engine": "fest"}).startswith(
        "rollout.engine: unknown engine 'fest' (did you mean 'fast'?); correct the name, or install its package"
    )
    assert "(known: auto, fast, module, native)" in refused("evaluate", **SUITE, rollout={"engine": "xyz"})
    assert "train.engine: unknown engine 'xyz' (known: fast, torch)" in refused("sft", **SFT, train={"engine": "xyz"})


LACKING: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {**GRPO, **FAST, "stop": ["x"]}, "rollout stop"),
    ("evaluate", {**SUITE, **FAST, "suites": {"h": {"data": "d"}, "i": {"data": "d", "stop": ["x"]}}}, "rollout stop"),
    ("grpo", {**GRPO, **FAST, "placement": APART}, "rollout attest"),
    ("grpo", {**GRPO, **FAST, "placement": {"collocated": {"ranks": 2}}}, "rollout attest"),
    ("sft", {**SFT, **TRAINED, "placement": {"collocated": {"ranks": 2}}}, "train ranks"),
    (
        "ppo",
        {**PPO, **TRAINED, "placement": {"policy": {"ranks": 1}, "critic": {"ranks": 2}}},
        "train ranks",
    ),
    ("ppo", {**PPO, **TRAINED}, "train values"),
    ("reward_model", {**SFT, **TRAINED}, "train values"),
]


@pytest.mark.parametrize(("kind", "params", "needs"), LACKING, ids=range(len(LACKING)))
def test_an_engine_that_lacks_what_a_stage_needs_is_refused(
    site: Path, kind: str, params: dict[str, Any], needs: str
) -> None:
    field, need = needs.split()
    all_of_them = {one for abilities in PROVIDED.values() for one in abilities}
    add(site, *all_of_them - {need})
    says = refused(kind, **params)
    assert says.startswith(f"{field}.engine: {field} engine 'fast' of posttrain-fast 1.0 does not provide {need}, ")
    assert f"for {PROVIDED[field][need]}; choose another engine" in says
    add(site, *all_of_them)
    assert check(kind, **params).params[field] == {"engine": "fast"}


def test_what_a_stage_does_not_need_is_not_asked_for(site: Path) -> None:
    """Frozen roles on several ranks, and a critic beside a rollout engine, are no matter of the engine."""
    add(site)
    check("grpo", **GRPO, **FAST, **TRAINED)
    check("evaluate", **SUITE, **FAST)
    check("sft", **SFT, **TRAINED)
    check("ppo", **PPO, **FAST)
    apart = {"policy": {"ranks": 1}, "reference": {"ranks": 2}}
    check("grpo", **GRPO, **TRAINED, kl={"coefficient": 0.1}, placement=apart)


BROKEN = [
    ("3", "must name an EngineSpec whose open is module:Name, got 3"),
    ('EngineSpec("no path")', "must name an EngineSpec whose open is module:Name"),
    ("EngineSpec(3)", "reading its EngineSpec raised TypeError"),
    ('EngineSpec("a:B", ("stop", "speed"))', "provides must be some of stop, attest, sessions, got speed"),
    ("1 / 0", "raised ZeroDivisionError: division by zero; fix or uninstall it"),
]


@pytest.mark.parametrize(("spec", "says"), BROKEN, ids=["number", "path", "type", "ability", "raises"])
def test_an_engine_that_is_none_is_one_line(site: Path, spec: str, says: str) -> None:
    add(site, rollout=spec)
    line = refused("grpo", **GRPO, **FAST)
    assert line.startswith("rollout engine 'fast' of posttrain-fast 1.0: ")
    assert says in line


def test_own_engines_look_at_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_scan", lambda: pytest.fail("looked at the packages"))
    for name in OWN_ENGINES["rollout"]:
        check("ppo", **PPO, stop=["x"], placement={"collocated": {"ranks": 2}}, rollout={"engine": name})


def test_a_default_is_in_no_manifest() -> None:
    """Digests of runs are those of versions without the fields."""
    written: dict[str, dict[str, Any]] = {"evaluate": SUITE, "grpo": GRPO, "dapo": GRPO, "dpo": SFT, "sft": SFT}
    for kind, params in written.items():
        for given in ({}, {"rollout": {"engine": "auto"}} if kind in ("evaluate", "grpo", "dapo") else {}):
            found = stage_config(kind, {**params, **given}).model_dump(mode="json")
            assert not {"rollout", "train"} & found.keys(), kind
    assert stage_config("grpo", GRPO | {"rollout": {"engine": "module"}}).model_dump()["rollout"] == {
        "engine": "module"
    }
    assert {kind for kind in STAGE_CONFIGS if "train" in STAGE_CONFIGS[kind].model_fields} == {
        *STAGE_CONFIGS.keys() - {"evaluate", "init_model"}
    }


def test_doctor_lists_engines_and_refuses_taken_names(site: Path) -> None:
    module = add(site)
    told = _packages()
    assert told.state == "ok"
    assert "rollout engine 'fast' of posttrain-fast 1.0; train engine 'fast' of posttrain-fast 1.0" in told.finding
    points = f"[posttrain.rollout_engines]\nnative = {module}:ROLLOUT\n"
    install(site, "posttrain-taken", "1.0", points, {})
    plugins._scan.cache_clear()
    assert "rollout engine 'native' of posttrain-taken 1.0: Posttrain itself has this name" in _packages().finding


# --- whose code is in the cache key -----------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


def with_engines(world: World) -> None:
    run = yaml.safe_load(RUN)
    run["stages"]["grpo"] |= FAST | TRAINED
    run["stages"]["evaluate"] |= FAST
    world.write("run.yaml", yaml.safe_dump(run, sort_keys=False))


def test_an_engines_code_is_part_of_the_cache_key(world: World, site: Path) -> None:
    def cached() -> list[str]:
        plugins._scan.cache_clear()
        return [stage["name"] for stage in world.json("plan", "run.yaml")["stages"] if stage["cached_from"]]

    module = add(site)
    with_engines(world)
    planned = world.json("plan", "run.yaml")
    assert planned["manifest"]["code"].keys() == {"native", "engine:rollout/fast", "engine:train/fast"}
    packages = {stage["name"]: stage["packages"] for stage in planned["stages"] if "packages" in stage}
    assert packages == {name: ["posttrain-fast 1.0"] for name in ("grpo", "evaluate", "baseline-evaluate")}
    world("run", "run.yaml")
    assert cached() == ["sft", "grpo", "evaluate", "baseline-evaluate"]
    source = (site / f"{module}_job.py").read_text()
    (site / f"{module}_job.py").write_text(source + "LEVEL = 2\n")
    assert cached() == ["sft"]
    (site / f"{module}_job.py").write_text(source)
    assert cached() == ["sft", "grpo", "evaluate", "baseline-evaluate"]


def test_an_engines_code_that_changes_on_the_way_is_not_mixed(world: World, site: Path) -> None:
    module = add(site)
    with_engines(world)
    world.broken["sft"] = [3, 3]
    assert world("run", "run.yaml").exit_code != 0
    with (site / f"{module}_job.py").open("a") as file:
        file.write("LEVEL = 2\n")
    result = world("retry", world.newest())
    assert result.exit_code != 0
    assert "the code of rollout engine 'fast' must be sha256:" in result.stderr


def test_a_run_whose_engine_is_gone_says_so(world: World, site: Path) -> None:
    add(site)
    with_engines(world)
    world.ok("lock", "run.yaml")
    shutil.rmtree(site)
    plugins._scan.cache_clear()
    for file in ("run.yaml", "run.lock.json"):
        result = world("run", file)
        assert result.exit_code == 2, result.stdout
        assert ".engine: unknown engine 'fast'" in result.stderr
        assert "install its package" in result.stderr


def test_another_engine_is_another_evaluator() -> None:
    params = dict(check("evaluate", **SUITE).params)

    def evaluator(code: dict[str, str], **more: Any) -> str:
        stage = StageManifest(
            name="e", kind="evaluate", trainer="native", after=(), inputs={}, params=params | more, outputs={}
        )
        return suite_evaluator(stage, code, "h")

    code = {"native": "a", "engine:rollout/fast": "b"}
    assert evaluator(code) == evaluator({"native": "a"}), "a stage that does not name the engine"
    assert evaluator(code, **FAST) != evaluator(code | {"engine:rollout/fast": "c"}, **FAST)
    assert deciding(params | FAST)["rollout"] == FAST["rollout"]


def test_parameters_of_other_trainers_are_no_engines(site: Path) -> None:
    """Words that look like an engine, in the parameters of a kind or trainer that Posttrain does not read."""
    for params in ({"rollout": "fast"}, {"rollout": {"engine": 3}}, {"train": {}}, {"rollout": {"engine": "native"}}):
        assert list(engines_in(params)) == []
    assert list(engines_in(FAST | TRAINED)) == [f"{ENGINE}rollout/fast", f"{ENGINE}train/fast"]


# --- what a job opens -------------------------------------------------------------------------------------------------


def model() -> Any:
    return adopt_module(initial_model(TINY, TOKENIZER, 0))


def learner(name: str) -> TrainWorker:
    return TrainWorker(RankContext(), model(), OptimizerConfig(), RuntimeConfig(), steps=2, seed=0, engine=name)


def test_a_job_opens_the_engine_that_is_named(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(site)
    opened = {name: type(open_rollout(model(), name=name)).__name__ for name in ("auto", "native", "module", "fast")}
    assert opened == {"auto": "NativeRollout", "native": "NativeRollout", "module": "ModuleRollout", "fast": "Fast"}
    assert type(learner("torch").engine).__name__ == "TorchEngine"
    assert type(learner("fast").engine).__name__ == "Trained"
    monkeypatch.setattr("posttrain.engine.rollout.worker.why_not_fusable", lambda module: "it is odd")
    assert type(open_rollout(model())).__name__ == "ModuleRollout"
    with pytest.raises(InputError, match="native cannot decode this model: it is odd; write auto or module"):
        open_rollout(model(), name="native")
    assert [bool(decoding_fallbacks(model(), name)) for name in ("auto", "module", "fast")] == [True, False, False]


def test_a_stages_engines_reach_its_workers(site: Path) -> None:
    add(site)
    config = GRPOConfig(data="d", reward="r", steps=1, **FAST, **TRAINED)
    roles = open_roles(config, model(), 11, inline())
    assert roles.rollout is not None
    assert roles.rollout.one(lambda worker: type(worker._engine).__name__) == "Fast"
    assert roles.learners["policy"].one(lambda worker: type(worker.engine).__name__) == "Trained"


def test_earlier_turns_are_planned_only_for_engines_without_sessions(site: Path) -> None:
    """Three turns of 20 with observations of 4: the third reads 44 and the second 20 tokens again, and the prompt."""
    talk: dict[str, Any] = {"data": "d", "recipe": "m:A", "steps": 2, "prompts_per_step": 3, "group_size": 5}
    talk |= {"turns": 3, "observation_tokens": 4, "max_new_tokens": 20}

    def work(engine: str) -> tuple[float, float]:
        found = DataflowConfig(**talk, rollout={"engine": engine}).work()
        return found["prompts"], found.get("again", 0)

    add(site)
    without = (2 * (3 + 2 * 15), 2 * 15 * (20 + 44))
    assert [work(name) for name in ("auto", "native", "module", "fast")] == [(6, 0), (6, 0), without, without]
    assert GRPOConfig(data="d", reward="r", steps=2, rollout={"engine": "module"}).work().get("again") is None


def test_an_engine_has_the_sessions_that_it_declares(site: Path) -> None:
    add(site, "sessions")
    with pytest.raises(InputError, match=r"provides sessions, but its holds_sessions is False; fix one of them$"):
        open_rollout(model(), name="fast")


@pytest.mark.parametrize("opened", ["Hollow", "Absent", "Raises"])
def test_a_broken_engine_is_one_line_of_its_package(site: Path, opened: str) -> None:
    add(site, opened=opened)
    says = {
        "Hollow": " lacks holds_sessions, attest, counts, submit, completed, progress, score, release, abort, pause, ",
        "Absent": ": loading ",
        "Raises": " raised ZeroDivisionError: division by zero; fix or uninstall it",
    }[opened]
    context, lent = RankContext(), model()
    context.lend(lent)
    with pytest.raises(InputError) as caught:
        RolloutWorker(context, name="fast")
    assert str(caught.value).startswith("rollout engine 'fast' of posttrain-fast 1.0")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=r"^train engine 'fast' of posttrain-fast 1.0"):
        learner("fast")
