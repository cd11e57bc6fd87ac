"""Whole runs on what others made: rows of reasoning-gym in folders of `datasets`, rewards of TRL and verifiers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.ecosystem
PATIENCE = 1500.0  # seconds; it ends what hangs
GYM = """
import reasoning_gym

def score(completion, row):
    found = reasoning_gym.get_score_answer_fn(row["metadata"]["source_dataset"])
    return found(answer=completion, entry=row)
"""
TASK = """
import verifiers.v1 as vf

class Sum(vf.TaskData):
    answer: str

class SumTask(vf.Task[Sum]):
    @vf.reward
    async def correct(self, trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def brief(self, trace) -> float:
        return 1 / (1 + len(trace.last_reply))
"""


def posttrain(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "posttrain", *arguments]
    done = subprocess.run(command, check=False, cwd=folder, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def rows(size: int, seed: int) -> list[dict[str, Any]]:
    """Sums as reasoning-gym writes them, demonstrated."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", size=size, seed=seed, min_terms=2, max_terms=2)
    return [{**json.loads(json.dumps(entry)), "completion": str(entry["answer"])} for entry in made]


def test_a_run_on_saved_rows_with_rewards_of_three_packages(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    train, heldout = rows(24, 1), rows(8, 10**6)  # its item i is made from seed + i
    DatasetDict(train=Dataset.from_list(train), test=Dataset.from_list(heldout)).save_to_disk(
        tmp_path / "saved", num_shards={"train": 2, "test": 1}
    )
    chats = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"], "solution": row["answer"]}
        for row in train
    ]
    (tmp_path / "shards").mkdir()
    for at in range(2):
        part = Dataset.from_list(chats).shard(2, at, contiguous=True)
        part.to_parquet(tmp_path / "shards" / f"train-0000{at}-of-00002.parquet")
    table = Dataset.from_list([{"prompt": row["question"], "answer": row["answer"]} for row in heldout])
    table.to_csv(tmp_path / "heldout.csv")
    (tmp_path / "gym.py").write_text(GYM)
    (tmp_path / "sums.py").write_text(TASK)
    (tmp_path / "model.yaml").write_text(
        "architecture: qwen3\nhidden_size: 32\nintermediate_size: 64\nlayers: 1\ncontext_length: 256\n"
    )
    policy = {"kind": "grpo", "steps": 1, "prompts_per_step": 2, "group_size": 2, "max_new_tokens": 8}
    run = {
        "name": "sums",
        "owner": "ada",
        "seed": 1,
        "model": "model:tiny",
        "data": {"saved": "./saved/train", "chats": "./shards/train-*.parquet", "heldout": "heldout.csv"},
        "rewards": {"gym": "gym.py", "trl": "trl.rewards:accuracy_reward", "task": "reward:sums"},
        "stages": {
            "sft": {"kind": "sft", "data": "saved", "steps": 2, "batch_size": 4},
            "gym": {**policy, "model": "sft", "data": "saved", "reward": "gym"},
            "trl": {**policy, "model": "sft", "data": "chats", "reward": "trl"},
            "task": {**policy, "model": "sft", "data": "chats", "reward": "task"},
            "evaluate": {
                "kind": "evaluate",
                "model": "gym",
                "suites": {"heldout": {"data": "heldout", "max_new_tokens": 8}},
            },
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    posttrain(tmp_path, "init", "--rewards", "trusted")
    posttrain(tmp_path, "asset", "create", "model:tiny", "model.yaml")
    posttrain(tmp_path, "asset", "add", "reward:sums", "sums.py", "--entry", "SumTask")
    plan = json.loads(posttrain(tmp_path, "plan", "run.yaml", "-o", "json"))
    assert not [warning for warning in plan["warnings"] if "rewards." in warning]
    posttrain(tmp_path, "run", "run.yaml")
    assert "succeeded" in posttrain(tmp_path, "get", "sums")
