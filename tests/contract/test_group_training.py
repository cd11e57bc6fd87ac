"""Whole training jobs over Ray: the same recipe, wherever its roles live."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.jobs import InputBlob, JobOrder, Span
from posttrain.engine.config import InitModelConfig
from posttrain.jobs import entry
from posttrain.jobs.bodies import training
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

TINY = InitModelConfig(
    hidden_size=16, intermediate_size=16, layers=1, characters="0123456789Q:sort A", context_length=64
)
ROWS = [{"prompt": f"Q:{i}", "answer": str(i % 3)} for i in range(8)]
REWARD = "def score(completion, answer):\n    return float(len(set(completion)))\n"


class Jobs:
    """GRPO jobs of one model, differing in where their roles live; each in a process of its own, as ever."""

    def __init__(self, root: Path) -> None:
        self.root, self.blobs = root, open_blobs(root / "blobs")
        base = AttemptFolder(root / "base")
        base.write_order(JobOrder("base", "init_model", 5, TINY.model_dump(mode="json"), {}, self.blobs.url, "cache"))
        assert entry.run(str(base.path), training.init_model) == 0
        rows = "".join(json.dumps(row) + "\n" for row in ROWS)
        self.inputs = {
            "model": InputBlob(put_tree(self.blobs, base.outputs / "model"), "tree", "model:tiny@1"),
            "data": InputBlob(self.blobs.put(rows.encode()), "file", "asset:data@1"),
            "reward": InputBlob(
                self.blobs.put(REWARD.encode()), "file", "asset:reward@1", {"entry": "score", "source": "reward.py"}
            ),
        }

    def run(self, name: str, placement: Any, **more: Any) -> AttemptFolder:
        folder = AttemptFolder(self.root / name)
        options = {
            "model": "model", "data": "data", "reward": "reward", "steps": 2, "prompts_per_step": 2, "group_size": 2,
            "max_new_tokens": 6, "placement": placement, **more,
        }  # fmt: skip
        cache = str(self.root / "cache")
        folder.write_order(JobOrder(name, "grpo", 5, options, self.inputs, self.blobs.url, cache))
        command = [sys.executable, "-m", "posttrain.jobs.stage", str(folder.path)]
        environment = {**os.environ, "HOME": str(self.root), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
        result = folder.read_result()
        assert result is not None, ended.stderr
        assert (result.status, result.failure) == ("succeeded", None), ended.stderr
        return folder


def model_digest(folder: AttemptFolder) -> str:
    return digest_bytes((folder.outputs / "model" / "model.safetensors").read_bytes())


def pools_of_calls(folder: AttemptFolder) -> dict[str, set[str]]:
    """Role → the pools that its calls went to."""
    found: dict[str, set[str]] = {}
    for fact in folder.facts()[0]:
        if isinstance(fact, Span) and fact.attributes.get("kind") == "call":
            found.setdefault(str(fact.attributes["role"]), set()).add(str(fact.attributes["pool"]))
    return found


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    return Jobs(tmp_path_factory.mktemp("jobs"))


@pytest.mark.ray
def test_one_rank_each_gives_the_model_of_one_process(jobs: Jobs) -> None:
    inline = jobs.run("inline", "collocated")
    apart = jobs.run("apart", {"policy": {"ranks": 1}, "rollout": {"ranks": 1}})
    assert pools_of_calls(inline) == {"policy": {"main"}, "rollout": {"main"}}
    assert pools_of_calls(apart) == {"policy": {"policy"}, "rollout": {"rollout"}}
    assert model_digest(apart) == model_digest(inline)


@pytest.mark.ray
def test_two_ranks_of_one_pool_and_a_second_pool(jobs: Jobs) -> None:
    sharded = jobs.run("sharded", {"policy": {"ranks": 2}, "rollout": {"ranks": 1}})
    updates = [f for f in sharded.facts()[0] if isinstance(f, Span) and f.name == "policy.update"]
    assert updates
    for span in updates:
        ranks = span.attributes["ranks"]
        assert isinstance(ranks, list)
        assert [rank for rank, _, _ in ranks] == [0, 1]
    published = [f for f in sharded.facts()[0] if isinstance(f, Span) and f.name == "policy.bucket"]
    assert len(published) == 3
    assert all(int(str(span.attributes["bytes_in"])) < 1000 for span in published), "weights pass the controller by"


@pytest.mark.ray
def test_a_rollout_beside_the_shards_of_the_policy_gets_them_from_rank_to_rank(jobs: Jobs) -> None:
    folder = jobs.run("beside", {"collocated": {"ranks": 2}})
    calls = [f for f in folder.facts()[0] if isinstance(f, Span) and f.attributes.get("kind") == "call"]
    assert len([f for f in calls if f.name == "rollout.exchange"]) == 3
    assert len([f for f in calls if f.name == "rollout.attest"]) == 3
    assert not [f for f in calls if f.name == "policy.bucket"], "nothing goes through the object store"


@pytest.mark.ray
@pytest.mark.parametrize("pool", ["reference", "main"])
def test_a_reference_that_is_sharded_teaches_the_same(jobs: Jobs, pool: str) -> None:
    """In its own pool, where no role learns, so only the reference needs a process group; and beside the others."""
    apart = {"policy": {"ranks": 1}, "reference": {"ranks": 2}}
    placement = apart if pool == "reference" else {"collocated": {"ranks": 2}, "sleep": True}
    whole, parted = (
        jobs.run(f"{name}-{pool}", placement, kl={"coefficient": 0.1}, runtime={"shard_frozen": shard})
        for name, shard in (("whole", False), ("parted", True))
    )
    for folder, shard in ((whole, 0.0), (parted, 1.0)):
        result = folder.read_result()
        assert result is not None
        assert result.metrics["sizes/shard_frozen"] == shard
        assert pools_of_calls(folder)["reference"] == {pool}
    assert model_digest(parted) == model_digest(whole)
