"""Training on real Ray processes: equal to one process, resumed at another rank count; PPO with every role apart."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import RUN
from torch import Tensor
from workbench import Workbench

from posttrain.domain.canonical import digest_json
from posttrain.domain.jobs import Metric, Span
from posttrain.domain.manifest import job_identity
from posttrain.domain.placement import Placement, Resources
from posttrain.engine.batch import Document
from posttrain.engine.config import InitModelConfig, SFTConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.worker_group import ResourcePool, WorkerGroup
from posttrain.engine.loop.controller import Controller, FromRows, Order, open_learner
from posttrain.engine.models.files import ModelSource, character_tokenizer, initial_model
from posttrain.engine.models.sharding import Shard, put
from posttrain.engine.recipes.sft import SFT
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import LoraConfig, OptimizerConfig, RuntimeConfig
from posttrain.store.attempts import AttemptFolder
from posttrain.store.trees import materialise

pytestmark = [pytest.mark.ray, pytest.mark.timeout(3000)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "03-reward-model"
DOCUMENTS = [Document((1, 5, 8 + i), tuple(7 + (i * j) % 9 for j in range(1, 3 + i % 4))) for i in range(17)]
CONFIG = SFTConfig(
    data="d",
    steps=4,
    batch_size=8,
    optimizer=OptimizerConfig(learning_rate=2e-4, warmup_steps=0, weight_decay=0.1, max_grad_norm=0.5),
    runtime=RuntimeConfig(micro_batch_tokens=20),
)


@pytest.fixture(scope="module", params=[None, LoraConfig(rank=4, alpha=8.0)], ids=["whole", "adapter"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    size = InitModelConfig()
    folder = tmp_path_factory.mktemp("model")
    initial_model(size, character_tokenizer(size.characters), 0).save_pretrained(folder)
    return ModelSource(folder, adapter=request.param, seed=7)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[ResourcePool]:
    from posttrain.engine.groups.cluster import open_cluster

    with open_cluster(cpus=1) as cluster, ResourcePool(cluster.backend("two", 2, cpus=0)) as pool:
        yield pool


def train(
    pool: ResourcePool, source: ModelSource, folder: Path, *, stop_after: int | None = None, resume: Path | None = None
) -> dict[str, Tensor]:
    """The weights after four steps, or after a stop."""
    roles = open_learner(CONFIG, source, 1, lambda role: pool)
    asked = iter([Order.GO_ON] * (99 if stop_after is None else stop_after))
    controller = Controller(
        FromRows(CONFIG, SFT(CONFIG), roles, DOCUMENTS, 1),
        folder,
        fingerprint(len(pool.processes)),
        100,
        lambda fact: None,
        orders=lambda: next(asked, Order.STOP),
    )
    if resume:
        controller.resume(resume)
    controller.run()
    return whole_weights(roles.made)


def whole_weights(policy: WorkerGroup[TrainWorker]) -> dict[str, Tensor]:
    """Put together from what every rank holds."""
    shards = [shard for held in policy.each(exported) for shard in held]
    found = {shard.name: torch.zeros(shard.shape) for shard in shards}
    for shard in shards:
        put(found, shard)
    return found


def exported(worker: TrainWorker) -> list[Shard]:
    """What a rank holds, on its way to another process."""
    return list(worker.engine.export())


def fingerprint(ranks: int) -> str:
    """What a user's run of this stage has there: its placement is written in its parameters and decides nothing."""
    placed = CONFIG.model_copy(update={"placement": Placement(collocated=Resources(ranks=ranks))})
    return digest_json(job_identity("sft", placed.model_dump(mode="json"), 1, {}))


def close(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(right[name], value, atol=1e-5, rtol=0)


def test_two_ranks_equal_one_process_and_resume_each_others_checkpoints(
    two_ranks: ResourcePool, source: ModelSource, tmp_path: Path
) -> None:
    here: Callable[[], ResourcePool] = lambda: ResourcePool(InlineBackend())  # noqa: E731
    pids = {process.pid for process in two_ranks.processes}
    assert len(pids) == 2
    assert os.getpid() not in pids
    whole = train(here(), source, tmp_path / "one")
    close(whole, train(two_ranks, source, tmp_path / "two"))
    train(two_ranks, source, tmp_path / "begun by two", stop_after=2)
    step = tmp_path / "begun by two" / "step-00000002"
    assert len(list(step.glob("policy-model-*-of-00002.safetensors"))) == 2
    close(whole, train(here(), source, tmp_path / "ended by one", resume=step))
    train(here(), source, tmp_path / "begun by one", stop_after=2)
    step = tmp_path / "begun by one" / "step-00000002"
    close(whole, train(two_ranks, source, tmp_path / "ended by two", resume=step))


class Played:
    """Example 03 in a workspace of its own, by one of its run files."""

    def __init__(self, folder: Path, file: str) -> None:
        self.folder = folder
        folder.mkdir()
        self.call(sys.executable, str(EXAMPLE / "make_data.py"), "--seed", "71", "--out", "data")
        self.posttrain("init")
        model = EXAMPLE.parent / "01-sort" / "model.yaml"
        self.posttrain("asset", "create", "model:tiny-sort", str(model), "--seed", "71")
        for name in ("train", "pairs", "heldout"):
            self.posttrain("asset", "add", f"dataset:sort-{name}", f"data/{name}.jsonl")
        text = (EXAMPLE / file).read_text()
        assert text.count("steps: 80") == 1
        (folder / "run.yaml").write_text(text.replace("steps: 80", "steps: 40"))  # of PPO
        self.posttrain("run", "run.yaml")
        self.run = json.loads(self.posttrain("ls", "--limit", "1", "-o", "json"))["runs"][0]["id"]

    def posttrain(self, *words: str) -> str:
        return self.call(sys.executable, "-m", "posttrain", *words)

    def call(self, *words: str) -> str:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("POSTTRAIN")}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=2500, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    def outputs(self) -> dict[str, str]:
        """Stage → digest of what it made."""
        stages = json.loads(self.posttrain("get", self.run, "-o", "json"))["stages"]
        return {stage["name"]: stage["outputs"]["model"]["digest"] for stage in stages if "model" in stage["outputs"]}


def test_ppo_with_every_role_in_a_process_of_its_own_learns_the_task(tmp_path: Path) -> None:
    """A reward model from preferences, then PPO against it: held-out accuracy rises. In one process it ends with the
    same weights, bit for bit. By how much it rises is another number on another processor, and goes up and down.
    """
    apart = Played(tmp_path / "apart", "run-ray.yaml")
    (folder,) = (apart.folder / ".posttrain" / "runs" / apart.run / "ppo").glob("*")
    facts, _ = AttemptFolder(folder).facts()
    probes = [f.values["probe/accuracy"] for f in facts if isinstance(f, Metric) and "probe/accuracy" in f.values]
    assert sum(probes[1:]) / len(probes[1:]) >= probes[0] + 0.2, probes
    calls = [f for f in facts if isinstance(f, Span) and f.attributes.get("kind") == "call"]
    assert {call.attributes["pool"] for call in calls} == {"policy", "rollout", "critic", "reference", "reward_model"}
    assert all(call.attributes["bytes_out"] > 0 for call in calls)
    together = Played(tmp_path / "together", "run.yaml")
    assert together.outputs() == apart.outputs()


def one_stage(bench: Workbench, placement: dict[str, Any] | None, tokens: int | None) -> None:
    """Supervised fine-tuning alone, placed somewhere, with a budget or without."""
    stage = {**RUN["stages"]["sft"], **({"placement": placement} if placement else {})}
    raw = {key: value for key, value in RUN.items() if key not in ("gates", "release", "budget", "rewards")}
    budget = {"budget": {"tokens": tokens}} if tokens else {}
    bench.write("run.yaml", {**raw, "stages": {"sft": stage}, **budget})


def weights(bench: Workbench, run_id: str) -> dict[str, Tensor]:
    with bench.open() as workspace:
        folder = materialise(workspace.blobs, bench.outputs(run_id)["sft"], bench.folder / "looked-at")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("first", [2, 1])
def test_a_budget_that_ended_a_run_is_raised_on_another_number_of_ranks(
    template: Workbench, tmp_path: Path, first: int
) -> None:
    """What a user does: run.yaml with another placement and a larger budget, and the same command again."""
    two = {"collocated": {"ranks": 2}}
    undisturbed = template.copy(tmp_path / "undisturbed")
    one_stage(undisturbed, None, None)
    undisturbed.run("run", "run.yaml")
    whole = undisturbed.run_id()
    (attempt,) = undisturbed.attempts(whole)
    bench = template.copy(tmp_path / "bench")
    one_stage(bench, two if first == 2 else None, round(0.6 * attempt.tokens))
    bench.run("run", "run.yaml", code=7)
    (stopped,) = bench.attempts(bench.run_id())
    done = bench.steps(stopped)[-1]
    assert 0 < done < RUN["stages"]["sft"]["steps"]
    shards = list((bench.root / stopped.folder / "checkpoints" / f"step-{done:08d}").glob("policy-model-*"))
    assert len(shards) == first
    one_stage(bench, None if first == 2 else two, 2 * attempt.tokens)
    bench.run("run", "run.yaml")
    (resumed,) = bench.attempts(bench.run_id())
    assert bench.resumed_at(resumed) == done
    assert bench.steps(resumed)[0] == done + 1
    close(weights(undisturbed, whole), weights(bench, bench.run_id()))


def ahead(bench: Workbench, adapter: dict[str, Any] | None) -> None:
    """GRPO alone, whose rollout works in a pool of its own and one batch ahead."""
    raw = {key: value for key, value in RUN.items() if key not in ("gates", "release")}
    stage = {**RUN["stages"]["grpo"], "model": "base", "steps": 5, "lag": {"steps": 1}}
    stage["placement"] = {"policy": {"cpus": 1}, "rollout": {"cpus": 1}}
    bench.write("run.yaml", {**raw, "stages": {"grpo": {**stage, **({"adapter": adapter} if adapter else {})}}})


@pytest.mark.parametrize("adapter", [None, {"lora": {"rank": 4, "alpha": 8}}], ids=["whole", "adapter"])
def test_sampling_ahead_runs_beside_training_and_survives_a_kill(
    adapter: dict[str, Any] | None, template: Workbench, tmp_path: Path
) -> None:
    whole = template.copy(tmp_path / "whole")
    ahead(whole, adapter)
    whole.run("run", "run.yaml")
    (attempt,) = whole.attempts(whole.run_id())
    spans = [fact for fact in whole.facts(attempt) if isinstance(fact, Span)]
    for step in range(4):
        (update,) = [span for span in spans if (span.name, span.step) == ("update", step)]
        calls = [span for span in spans if (span.name, span.step) == ("rollout.feed", step)]
        assert calls[-1].started <= update.started <= calls[-1].started + calls[-1].seconds, "begun before, ended after"
        assert {call.attributes["pool"] for call in calls} == {"rollout"}
        got = [span.attributes["batch"] for span in spans if (span.name, span.step) == ("rollout", step)]
        assert got == ([0, 1] if step == 0 else [step + 1])
    metrics = [fact.values for fact in whole.facts(attempt) if isinstance(fact, Metric) and "lag/ess" in fact.values]
    assert len(metrics) == 5
    assert all(0 < values["lag/ess"] <= 1 + 1e-9 for values in metrics)
    killed = template.copy(tmp_path / "killed")
    ahead(killed, adapter)
    mark = tmp_path / "died"
    killed.run("run", "run.yaml", env={"POSTTRAIN_CRASHPOINT": "train.step@5", "POSTTRAIN_CRASHPOINT_ONCE": str(mark)})
    assert mark.exists()
    first, second = killed.attempts(killed.run_id())
    assert (first.state, second.state, killed.resumed_at(second)) == ("lost", "succeeded", 3)
    assert killed.outputs(killed.run_id()) == whole.outputs(whole.run_id())
