"""docs/howto/plugin.md promises that a package adds a kind of stage, an algorithm, engines, a trainer and an executor:
its files become a wheel, pip installs it into an environment, and its run file is run there by real processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_run import RUN
from workbench import PATIENCE, Workbench

import posttrain
from posttrain.domain.jobs import Metric
from posttrain.store.attempts import AttemptFolder

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit"))
from installed import package_in, package_of, run_of, wheel

pytestmark = pytest.mark.slow
PAGE = "docs/howto/plugin.md"
FIELD = Path(__file__).resolve().parents[1] / "field_algorithms"
ASKS = """
import sys; from pathlib import Path
from posttrain.store.attempts import AttemptFolder
AttemptFolder(Path(sys.argv[1]), "").request_stop()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """An interpreter whose own site-packages the test may write to; everything else it takes from this one."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    source = Path(posttrain.__file__).parents[1]
    (packages / "those_of_the_tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n{source}\n")
    return folder / "bin" / "python"


def pip(python: Path, *words: str) -> None:
    words_of_pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", *words]
    subprocess.run(words_of_pip, check=True, capture_output=True, timeout=PATIENCE)


def command(python: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`posttrain` of that interpreter."""
    return subprocess.run(
        [str(python), "-P", "-m", "posttrain", *words],
        cwd=folder,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def test_a_wheel_adds_one_of_each(empty: Workbench, python: Path, tmp_path: Path) -> None:
    run = partial(command, python, empty.folder)
    text = (
        run_of(PAGE)
        .replace("dataset:sort-train", "dataset:train")
        .replace("model:tiny-sort", "model:tiny")
        .replace("reward:sort", "reward:length")
        .replace("accept: 0.1", "accept: -0.9")
    )
    empty.write("run.yaml", text)
    before = run("plan", "run.yaml")
    assert before.returncode == 2
    assert "stages.words: kind: unknown stage kind 'words'" in before.stderr

    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, *package_of(PAGE))))
    planned = run("plan", "run.yaml")
    assert planned.returncode == 0, planned.stderr
    assert "words (posttrain-words 1.0)" in planned.stdout
    told = run("doctor", "-o", "json").stdout
    assert "kind 'words' of posttrain-words 1.0" in told
    assert "kind 'raft' of posttrain-words 1.0" in told
    assert "rollout engine 'telling' of posttrain-words 1.0" in told
    assert "train engine 'telling' of posttrain-words 1.0" in told
    assert "trainer 'copying' of posttrain-words 1.0" in told
    assert "executor 'plain' of posttrain-words 1.0" in told
    nearly = run("init", "--executor", "plian")
    assert (nearly.returncode, "did you mean 'plain'?" in nearly.stderr) == (2, True)
    chosen = run("init", "--executor", "plain")
    assert "executor plain" in chosen.stdout, chosen.stderr
    done = run("run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr

    run_id = empty.run_id()
    with empty.open() as workspace:
        stages = {stage.name: stage for stage in workspace.ledger.stages(run_id)}
        [base] = workspace.ledger.assets("model", "tiny")
        attempts = workspace.ledger.attempts(run_id)
        count = json.loads(workspace.blobs.get(stages["words"].outputs["count"]["digest"]))
    assert {a.stage: (a.executor, a.state) for a in attempts} == dict.fromkeys(stages, ("plain", "succeeded"))
    assert stages["copy"].outputs["model"]["digest"] == base.digest, "the model that it began with"
    assert stages["raft"].outputs["model"]["digest"] != base.digest, "it learnt"
    [raft] = [one for one in json.loads(run("get", run_id, "-o", "json").stdout)["stages"] if one["name"] == "raft"]
    assert {"loss", "reward/mean"} <= raft["metrics"].keys()
    rows = [json.loads(line) for line in (empty.folder / "train.jsonl").read_text().splitlines()]
    assert count["rows"] == len(rows)
    assert count["words"] >= 2 * len(rows)
    empty.check(run_id)
    (empty.folder / "asked").mkdir()
    subprocess.run([str(python), "-P", "-c", ASKS, str(empty.folder / "asked")], check=True, timeout=PATIENCE)
    assert AttemptFolder(empty.folder / "asked").stop_requested()

    pip(python, "uninstall", "--yes", "--quiet", "posttrain-words")
    assert run("get", run_id).returncode == 0
    gone = run("run", "run.yaml")
    assert gone.returncode == 2
    assert "executor 'plain' must be installed" in gone.stderr
    run("init", "--executor", "local")
    assert "unknown stage kind 'words'" in run("run", "run.yaml").stderr


TALK = {
    "talk/config.py": """
        from posttrain.domain.kinds import algorithm_kind
        from posttrain.engine.config import PPOConfig, TurnsConfig

        class TalkConfig(TurnsConfig, PPOConfig):
            pass

        TALK = algorithm_kind("talk", "talk.config:TalkConfig", "talk.algorithm:Talk")
    """,
    "talk/algorithm.py": """
        from posttrain.engine.recipes.ppo import PPO

        class Talk(PPO):
            def observe(self, row, responses):
                return f"={len(responses[-1]) % 10}" if len(responses[-1]) % 3 else None
    """,
}
POINT = "[posttrain.kinds]\ntalk = talk.config:TALK\n"


def test_a_packages_algorithm_has_turns_a_critic_and_a_penalty(empty: Workbench, python: Path, tmp_path: Path) -> None:
    """Through plan, run and trace: an observation is seen by the policy, and neither trained, valued nor punished."""
    run = partial(command, python, empty.folder)
    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, "talk", "1.0", POINT, TALK)))
    options = {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 30, "turns": 2, "observation_tokens": 2}
    ppo = {"kl": {"coefficient": 0.1, "place": "reward"}, "gae": {"lam": 0.9}, "trace": {"groups": "all"}}
    talk = {"kind": "talk", "data": "train", "reward": "length", "steps": 3, "reward_timeout": 60.0, **options, **ppo}
    made = {key: value for key, value in RUN.items() if key in {"owner", "seed", "model", "rewards", "budget"}}
    stages = {"stages": {"talk": talk}, "data": {"train": "dataset:train"}}
    empty.write("run.yaml", json.dumps({"name": "talk", **made, **stages}))
    planned = run("plan", "run.yaml")
    assert planned.returncode == 0, planned.stderr
    done = run("run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr

    [attempt] = empty.attempts(empty.run_id(), "talk")
    facts = empty.facts(attempt)
    steps = [fact.values for fact in facts if isinstance(fact, Metric) and "reward/mean" in fact.values]
    assert len(steps) == 3
    assert all(1 < values["turns/mean"] < 2 for values in steps)
    assert {"critic/loss", "kl"} <= steps[-1].keys()
    samples = AttemptFolder(empty.root / attempt.folder).recorded_samples()
    seen = [sample for sample in samples if any(sample.observed)]
    assert seen
    for sample in seen:
        holes = [at for at, observed in enumerate(sample.observed) if observed]
        assert len(holes) == 2
        for column in (sample.advantages, sample.values, sample.returns, sample.logprobs, sample.reference_logprobs):
            assert [column[at] for at in holes] == [0, 0]
        assert all(sample.logprobs[at] < 0 for at in range(len(sample.tokens)) if at not in holes)
    told = run("trace", empty.run_id(), "--sample", seen[0].id)
    assert "observed" in told.stdout, told.stdout + told.stderr
    empty.check(empty.run_id())


def test_a_run_trains_through_a_packages_engines(empty: Workbench, python: Path, tmp_path: Path) -> None:
    """They are Posttrain's own and also print, so the model is that of Posttrain's own."""
    run = partial(command, python, empty.folder)
    name, version, points, sources = package_of(PAGE)
    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, name, version, points, sources)))
    made = {key: value for key, value in RUN.items() if key in {"owner", "seed", "model", "rewards", "budget"}}
    grpo = {**RUN["stages"]["grpo"], "model": "base", "steps": 3}
    engines = {"rollout": {"engine": "telling"}, "train": {"engine": "telling"}}
    test = {"kind": "evaluate", "suites": {"heldout": {"data": "heldout", "max_new_tokens": 24, "stop": ["0"]}}}
    stages = {
        "own": {**grpo, "rollout": {"engine": "module"}},
        "theirs": {**grpo, **engines},
        "measured": {**test, "model": "theirs", "rollout": {"engine": "telling"}},
        "again": {**test, "model": "own", "rollout": {"engine": "module"}},
    }
    empty.write("run.yaml", json.dumps({"name": "told", **made, "data": RUN["data"], "stages": stages}))
    planned = json.loads(run("plan", "run.yaml", "-o", "json").stdout)
    assert planned["manifest"]["code"].keys() == {"native", "engine:rollout/telling", "engine:train/telling"}
    done = run("run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr

    run_id = empty.run_id()
    with empty.open() as workspace:
        outputs = {stage.name: stage.outputs for stage in workspace.ledger.stages(run_id)}
    assert outputs["theirs"]["model"]["digest"] == outputs["own"]["model"]["digest"]
    assert outputs["measured"]["items"]["digest"] == outputs["again"]["items"]["digest"]
    log = run("logs", run_id, "theirs").stdout
    assert [f"telling: loss at step {step}" for step in range(3)] == [
        " ".join((*line.split()[:2], *line.split()[3:])) for line in log.splitlines() if "telling: loss" in line
    ]
    assert "telling: 16 responses" in log
    assert "responses" in run("logs", run_id, "measured").stdout
    assert "telling" not in run("logs", run_id, "own").stdout
    empty.check(run_id)

    pip(python, "uninstall", "--yes", "--quiet", name)
    lacking = {path: text.replace('provides=("stop", "attest")', "provides=()") for path, text in sources.items()}
    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, name, version, points, lacking)))
    refused = run("plan", "run.yaml")
    assert refused.returncode == 2
    assert "stages.measured: rollout.engine: rollout engine 'telling' of posttrain-words 1.0 does not" in refused.stderr


SAME: dict[str, dict[str, Any]] = {
    "vapo": {
        "group_size": 4,
        "critic": {"warmup": 2},
        "gae": {"alpha": 0.2},
        "positive": {"weight": 0.3, "above": -0.5},
        "kl": {"coefficient": 0.1},
    },
    "pf_ppo": {"filter": "best_random", "kl": {"coefficient": 0.1, "estimator": "k3", "place": "loss"}},
    "gspo": {"group_size": 4, "kl": {"coefficient": 0.1}},
}


def _twins() -> dict[str, Any]:
    """A run with each kind of tests/field_algorithms next to Posttrain's own."""
    made = {key: value for key, value in RUN.items() if key in {"owner", "seed", "model", "rewards", "budget", "data"}}
    size = {"steps": 4, "prompts_per_step": 4, "max_new_tokens": 24, "mini_batches": 2, "reward_timeout": 60.0}
    given = {"data": "train", "reward": "length", "optimizer": {"learning_rate": 1e-2, "warmup_steps": 0}, **size}
    stages = {
        f"{mine}{kind}": {"kind": f"{mine}{kind}", **given, **params}
        for kind, params in SAME.items()
        for mine in ("", "my_")
    }
    return {"name": "field", **made, "stages": stages}


def test_an_outside_packages_algorithms_train_the_models_of_posttrains_own(
    empty: Workbench, python: Path, tmp_path: Path
) -> None:
    """VAPO, PF-PPO and GSPO of tests/field_algorithms, and Posttrain's own, from one seed: equal bytes and metrics."""
    run = partial(command, python, empty.folder)
    name, version, points, sources = package_in(FIELD)
    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(wheel(tmp_path, name, version, points, sources)))
    twins = _twins()
    empty.write("run.yaml", json.dumps(twins))
    assert "my_vapo (field-algorithms 1.0)" in run("plan", "run.yaml").stdout
    planned = {stage["name"]: stage for stage in json.loads(run("plan", "run.yaml", "-o", "json").stdout)["stages"]}
    for kind in SAME:
        assert planned[f"my_{kind}"]["residency"] == planned[kind]["residency"]
    held = {one["phase"]: one["role"] for one in planned["my_vapo"]["residency"]["held"]}
    assert list(held) == ["rollout", "reward", "reference", "values", "update critic", "update policy"]
    done = run("run", "run.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    run_id = empty.run_id()
    with empty.open() as workspace:
        digests = {stage.name: stage.outputs["model"]["digest"] for stage in workspace.ledger.stages(run_id)}
        [base] = workspace.ledger.assets("model", "tiny")
    told = {one["name"]: one["metrics"] for one in json.loads(run("get", run_id, "-o", "json").stdout)["stages"]}
    for kind in SAME:
        assert digests[f"my_{kind}"] == digests[kind]
        assert told[f"my_{kind}"] == told[kind]
    assert len({base.digest, *digests.values()}) == 1 + len(SAME), "each algorithm trains a different model"
    assert told["my_vapo"]["positive_nll"] > 0
    assert told["my_gspo"]["clip_fraction"] > 0
    empty.check(run_id)

    pip(python, "uninstall", "--yes", "--quiet", name)
    config = "field_algorithms/vapo.py"
    lacking = sources[config].replace(
        "(ActorCriticConfig):\n", "(ActorCriticConfig):\n    roles = OnPolicyConfig.roles\n"
    )
    lacking = lacking.replace("import ActorCriticConfig", "import OnPolicyConfig, ActorCriticConfig")
    without = wheel(tmp_path, name, version, points, {**sources, config: lacking})
    pip(python, "install", "--no-index", "--no-deps", "--quiet", str(without))
    empty.write("run.yaml", json.dumps({**twins, "stages": {"my_vapo": twins["stages"]["my_vapo"]}}))
    refused = run("run", "run.yaml")
    assert refused.returncode != 0
    line = "VAPO needs the role critic for values, but the open roles are policy, reference"
    assert line in refused.stderr, refused.stderr
