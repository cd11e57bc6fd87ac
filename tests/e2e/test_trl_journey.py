"""A TRL user's journey over a team's server: two scripts become two releases that a second person approves, are
compared, and one is rolled back. At most ten commands; every setting of the scripts is carried or reported by name.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_from_trl import make_what_the_reader_has
from workbench import Workbench

from serving import Served

pytestmark = pytest.mark.slow
MOST = 10  # commands

SFT = """
from datasets import load_dataset
from transformers import AutoModelForCausalLM, EarlyStoppingCallback
from trl import SFTConfig, SFTTrainer

COMMON = {"learning_rate": 4e-3, "logging_steps": 10, "seed": 3}


def main() -> None:
    rows = load_dataset("json", data_files={"train": "train.jsonl", "test": "heldout.jsonl"})
    args = SFTConfig(
        output_dir="out-sft",
        max_steps=20,
        per_device_train_batch_size=16,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        eval_strategy="steps",
        **COMMON,
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained("./base"),
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
GRPO = """
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def last_digit(completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer)]


if __name__ == "__main__":
    trainer = GRPOTrainer(
        model="./base",
        reward_funcs=last_digit,
        args=GRPOConfig(
            output_dir="out-grpo",
            max_steps=60,
            **{
                "learning_rate": 1e-3,
                "num_generations": 8,
                "per_device_train_batch_size": 256,
                "max_completion_length": 4,
                "report_to": "tensorboard",
            },
            push_to_hub=False,
        ),
        train_dataset=load_dataset("json", data_files="train.jsonl", split="train"),
    )
    trainer.train()
"""
REWARD = """
def last_digit(completions, answer, **kwargs):
    return [float(completion == right) for completion, right in zip(completions, answer)]
"""
WRITTEN = {  # what each script sets → where its report must name it: carried, reported, or ignored
    "sft": {
        "carried": ["max_steps", "per_device_train_batch_size", "learning_rate", "seed", "model", "data_files.train"],
        "reported": ["load_best_model_at_end", "metric_for_best_model", "eval_strategy", "eval_dataset", "callbacks"],
        "meaningless": ["output_dir", "logging_steps"],
    },
    "grpo": {
        "carried": [
            "max_steps",
            "learning_rate",
            "num_generations",
            "per_device_train_batch_size",
            "max_completion_length",
            "model",
        ],
        "reported": ["devices"],
        "meaningless": ["output_dir", "push_to_hub"],
    },
}
POLICY = {
    "gates": [{"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.05}],
    "suites": {"heldout": {"data": "dataset:digits@1", "evaluators": "any"}},
    "approvers": ["user:ben"],
}
SUITE = {"suites": {"heldout": {"data": "heldout", "max_new_tokens": 4}}}


class Journey:
    """Two people and the commands that they type."""

    def __init__(self, host: Workbench, folder: Path) -> None:
        self.served = Served(host)
        self.ann = self.served.client(folder / "ann", "ann", "submitter")
        self.ben = self.served.client(folder / "ben", "ben", "approver")
        self.typed: list[tuple[str, ...]] = []

    def types(self, who: Workbench, *words: str, **options: Any) -> str:
        self.typed.append(words)
        return who.run(*words, **options).out

    def starts(self, who: Workbench, *words: str) -> subprocess.Popen[str]:
        self.typed.append(words)
        return who.start(*words)

    def waiting(self, name: str, running: subprocess.Popen[str]) -> bool:
        assert running.poll() is None, running.communicate()
        runs = [one for one in self.ben.run("ls", "-o", "json").json["runs"] if one["name"] == name]
        return bool(runs) and runs[0]["standing"] == "waits for approval"


@pytest.fixture
def journey(empty: Workbench, tmp_path: Path) -> Iterator[Journey]:
    """The team's server. Its admin gave the channel a policy, and protected it."""
    made = Journey(empty, tmp_path)
    make_what_the_reader_has(made.ann)
    empty.run("asset", "add", "dataset:digits", str(made.ann.folder / "heldout.jsonl"))
    empty.run("channel", "set-policy", "prod", str(empty.write("policy.yaml", POLICY)))
    empty.run("channel", "protect", "prod")
    yield made
    made.served.end()
    empty.wait("the end of the driver", lambda: made.served.driver() is None)


def sections(report: str) -> dict[str, str]:
    """The report of `init --from trl` by its headings."""
    titles = {"carried": "carried over", "reported": "set differently", "meaningless": "ignored"}
    parts = re.split(r"^(\S.*):$", report, flags=re.MULTILINE)
    found = dict(zip(parts[1::2], parts[2::2], strict=True))
    return {
        name: next(text for title, text in found.items() if title.startswith(words)) for name, words in titles.items()
    }


def edited(bench: Workbench, name: str, changes: dict[str, Any], stages: dict[str, Any], **more: Any) -> None:
    """run.yaml of the importer, completed by its user, under a name of its own."""
    path = bench.folder / "run.yaml"
    run: dict[str, Any] = yaml.safe_load(path.read_text())
    run["stages"][name] |= more
    run["stages"] |= stages
    bench.write(f"{name}.yaml", run | {"name": name} | changes)
    path.unlink()


@pytest.mark.journey
@pytest.mark.timeout(1500)
def test_audit_25_two_trl_scripts_become_compared_approved_and_rolled_back_releases(
    journey: Journey, tmp_path: Path
) -> None:
    ann, ben = journey.ann, journey.ben
    alone = {"POSTTRAIN_SERVER": "", "POSTTRAIN_TOKEN": ""}
    ann.write("reward.py", REWARD)
    data = {"data": {"train": "./train.jsonl", "heldout": "dataset:digits"}}
    release = {"release": {"channel": "prod"}}
    worse = {"name": "no-regression", "metric": "heldout/accuracy", "not_worse_than": "base", "margin": 0.02}

    for name, script in (("sft", SFT), ("grpo", GRPO)):
        ann.write(f"train_{name}.py", script)
        (ann.folder / "run.yaml").unlink(missing_ok=True)
        told = sections(journey.types(ann, "init", "--from", "trl", f"train_{name}.py", env=alone))
        for section, settings in WRITTEN[name].items():
            for setting in settings:
                assert re.search(rf"\b{re.escape(setting)}\b", told[section]), (name, section, setting, told)
        after = {"after": {"kind": "evaluate", "model": name, **SUITE}}
        if name == "sft":  # what the report asks for: the best model by a probe
            probe = {"probe": {"data": "heldout", "every": 10, "items": 64}, "keep_best": True}
            changes = {**data, "release": {**release["release"], "model": "sft"}}
            edited(ann, name, changes, after, **probe)
        else:
            changes = {**data, "gates": [worse], "rewards": {"reward": "./reward.py"}, "model": "channel:prod"}
            edited(ann, name, {**changes, "release": {**release["release"], "model": "grpo"}}, after)

    for name in ("sft", "grpo"):
        running = journey.starts(ann, "run", f"{name}.yaml")
        journey.served.host.wait(f"{name} waits for an approval", partial(journey.waiting, name, running))
        card = journey.types(ben, "approve", name, "--reason", f"{name}: the gates hold")
        assert "PASS" in card
        assert "heldout/accuracy" in card
        finished = ann.finish(running)
        assert finished.code == 0, finished
        assert f"run {name}-" in finished.out

    shown = journey.types(ann, "compare", "sft", "grpo")
    assert re.search(r"heldout/accuracy ↑", shown)
    assert "won" in shown
    assert "posttrain rollback" in ben.run("get", "prod").out
    journey.types(ben, "rollback", "prod", "--reason", "customers prefer the short answers")
    history = ben.run("get", "prod", "-o", "json").json["history"]
    assert [one["action"] for one in history] == ["promote", "promote", "rollback"]
    assert history[-1]["run_id"] == history[0]["run_id"]
    assert history[-1]["why"] == "customers prefer the short answers"
    tree = " ".join(journey.types(ann, "lineage", "grpo").split())
    assert "approved by: user:ben: grpo: the gates hold" in tree
    assert re.search(r"gate no-regression outcome: pass metric: heldout/accuracy estimate: [\d.]+", tree)
    assert len(journey.typed) <= MOST, journey.typed
    journey.served.host.check(journey.served.host.run_id())
