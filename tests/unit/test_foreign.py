"""Files of TRL and verl as run files: what is carried over, and that nothing is lost in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import World, make_world

from posttrain.domain.errors import InputError
from posttrain.domain.runspec import parse_run_spec
from posttrain.engine.config import stage_config
from posttrain.foreign.settings import Draft, read_settings
from posttrain.foreign.trl import from_trl
from posttrain.foreign.verl import from_verl

GRPO_SH = """\
#!/bin/bash
set -x
MODEL=Qwen/Qwen2.5-0.5B-Instruct
export RATE=${RATE:-1e-5}
accelerate launch --num_processes 4 train_grpo.py \\
  --model_name_or_path $MODEL --dataset_name trl-lib/DeepMath-103K --learning_rate $RATE \\
  --num_generations=8 --max-completion-length 1024 \\
  --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --steps_per_generation 16 \\
  --use_vllm --beta 0.04 --use_peft --bf16 --loss_type dr_grpo --scale_rewards none \\
  --reward_funcs accuracy_reward think_format_reward --max_steps 400 --seed $SEED --frobnicate 3   # what is it
"""
SFT_PY = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

RATE = 3e-5
raise SystemExit("nothing here is executed")
trainer = SFTTrainer(
    model="./base",
    train_dataset=load_dataset("json", data_files="train.jsonl"),
    args=SFTConfig(output_dir="out", learning_rate=RATE, num_train_epochs=2, per_device_train_batch_size=4,
                   gradient_accumulation_steps=4, warmup_ratio=0.1, lr_scheduler_type="cosine", max_length=2048,
                   packing=True, neftune_noise_alpha=5),
)
"""
VERL = {
    "algorithm": {"adv_estimator": "gae", "gamma": 0.99, "lam": 0.95, "use_kl_in_reward": True,
                  "kl_ctrl": {"kl_coef": 0.02}},
    "data": {"train_files": "train.jsonl", "train_batch_size": 16, "max_response_length": 256, "val_files": "x"},
    "actor_rollout_ref": {
        "model": {"path": "./base", "enable_gradient_checkpointing": True},
        "actor": {"ppo_mini_batch_size": 4, "ppo_epochs": 2, "clip_ratio": 0.1, "entropy_coeff": 0.01,
                  "ulysses_sequence_parallel_size": 2, "optim": {"lr": 2e-6, "lr_warmup_steps_ratio": 0.5}},
        "rollout": {"n": 2, "temperature": 0.7, "prompt_length": "${oc.select:data.max_prompt_length,512}"},
    },
    "critic": {"optim": {"lr": 3e-5}, "cliprange_value": 0.4},
    "trainer": {"total_epochs": 3, "critic_warmup": 1, "nnodes": 1},
    "custom_reward_function": {"path": "score.py", "name": "judge"},
}  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def valid(draft: Draft) -> dict[str, Any]:
    """The draft as a person reads it back: a run file whose stages the engine takes; its one stage."""
    raw = yaml.safe_load(draft.text())
    spec = parse_run_spec(raw, "run.yaml")
    ((_, stage),) = spec.stages.items()
    return stage_config(stage.kind, stage.params).model_dump()


def trl(world: World, name: str, text: str, rows: int | None = None) -> tuple[Draft, dict[str, Any]]:
    draft = from_trl(read_settings(Path(world.write(name, text))), rows)
    return draft, valid(draft)


def test_a_trl_command_trains_here_as_it_does_there(world: World) -> None:
    draft, stage = trl(world, "grpo.sh", GRPO_SH)
    assert draft.run["model"] == "hf:Qwen/Qwen2.5-0.5B-Instruct@main"
    # 400 optimiser steps, two of which are a step here
    assert (stage["group_size"], stage["max_new_tokens"], stage["steps"]) == (8, 1024, 200)
    # 4 devices x 4 x 8 = 128 completions an optimiser step, two of them to a generation: 256 completions of 8
    assert (stage["prompts_per_step"], stage["mini_batches"]) == (32, 2)
    assert (stage["kl"]["coefficient"], stage["clip_low"], stage["clip_high"]) == (0.04, 0.2, 0.2)
    assert (stage["aggregation"], stage["advantage"]) == ("seq-mean-token-sum-norm", "dr_grpo")
    optimizer = stage["optimizer"]
    assert (optimizer["learning_rate"], optimizer["schedule"], optimizer["final_ratio"]) == (1e-5, "linear", 0.0)
    assert (list(optimizer["betas"]), optimizer["warmup_steps"]) == ([0.9, 0.999], 0)
    assert stage["runtime"]["dtype"] == "bfloat16"


def test_optimiser_steps_become_steps(world: World) -> None:
    """Of a stage that learns several times from what it sampled; a part of a step is a step."""
    text = "trl grpo --reward_funcs f --max_steps 7 --warmup_steps 4 --steps_per_generation 2"
    _, stage = trl(world, "parts.sh", text)
    assert (stage["mini_batches"], stage["steps"], stage["optimizer"]["warmup_steps"]) == (2, 4, 2)
    _, stage = trl(world, "whole.sh", text.replace("--steps_per_generation 2", ""))
    assert (stage["mini_batches"], stage["steps"], stage["optimizer"]["warmup_steps"]) == (1, 7, 4)


def test_checkpoints_and_warm_up_count_the_same_steps(world: World) -> None:
    text = "trl grpo --reward_funcs f --max_steps 100 --save_steps 50 --warmup_steps 3 --steps_per_generation 8"
    draft, stage = trl(world, "saves.sh", text)
    assert (stage["steps"], stage["runtime"]["checkpoint_every"], stage["optimizer"]["warmup_steps"]) == (13, 6, 1)
    assert "warmup_steps: 3 → optimizer.warmup_steps: 1" in draft.carried


def test_what_a_script_computes_is_told(world: World) -> None:
    text = (
        "STOP = '</answer>'\n"
        "GRPOTrainer(model='Qwen/Qwen3-0.6B', reward_funcs=mine, train_dataset=data, peft_config=LoraConfig(r=8),\n"
        "            args=GRPOConfig(max_steps=3, beta=weight(), run_name=name(),\n"
        "                            generation_kwargs={'stop': [STOP]}))\n"
    )
    draft, stage = trl(world, "computed.py", text)
    assert list(stage["stop"]) == ["</answer>"]
    told = {line.partition(": ")[0]: line for line in draft.changed}
    assert stage["adapter"] == {
        "lora": {"rank": 8, "targets": ("q_proj", "v_proj"), "alpha": 8.0, "dropout": 0.0, "rslora": False}
    }
    assert "the file does not define this value" in told["beta"]
    assert "run_name" in draft.inert
    assert "train_dataset" not in told


def test_switches_of_verl_are_told_by_their_whole_names(world: World) -> None:
    text = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.rollout.multi_turn.enable=True "
        "algorithm.filter_groups.enable=True actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 "
        "actor_rollout_ref.rollout.val_kwargs.top_p=0.7\n"
    )
    draft = from_verl(read_settings(Path(world.write("verl.sh", text))))
    changed = " ".join(draft.changed)
    for words in (
        "kind: dataflow has several turns",
        "kind: dapo replaces groups",
        "a suite of an evaluate stage has samples",
    ):
        assert words in changed
    assert "enable" not in draft.inert
    assert "whole distribution" not in changed


def test_a_generation_that_fills_no_optimiser_steps_is_told(world: World) -> None:
    text = "trl grpo --reward_funcs f --max_steps 10 --gradient_accumulation_steps 4 --steps_per_generation 6"
    draft, _ = trl(world, "uneven.sh", text)
    assert any("48 completions per generation: not a multiple of the 32" in line for line in draft.changed)


def test_a_stop_that_is_no_text_is_told(world: World) -> None:
    draft, stage = trl(world, "null.yaml", "reward_funcs: [f]\nmax_steps: 3\ngeneration_kwargs: {stop: ['a', null]}\n")
    assert "stop" not in stage
    assert any("must be text, got None" in line for line in draft.changed)


def test_what_makes_a_rollout_run_ahead_is_told_by_its_name_here(world: World) -> None:
    draft, _ = trl(world, "ahead.sh", "trl grpo --reward_funcs f --max_steps 3 --max_staleness 2")
    assert any("max_staleness: 2: lag: {steps: N}" in line for line in draft.changed)
    assert not draft.dropped


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "c.yaml",
            "num_generations: 4\ngeneration_kwargs: {stop: [</answer>, 'Q:'], top_p: 0.9, stop_token_ids: [7]}\n",
        ),
        (
            "c.py",
            "GRPOConfig(generation_kwargs={'stop_strings': ['</answer>', 'Q:'], 'top_p': 0.9, 'stop_token_ids': [7]})",
        ),
        (
            "c.sh",
            'trl grpo --generation_kwargs \'{"stop": ["</answer>", "Q:"], "top_p": 0.9, "stop_token_ids": [7]}\'\n',
        ),
    ],
)
def test_trl_s_stop_strings_end_responses_here(world: World, name: str, text: str) -> None:
    draft, stage = trl(world, name, text)
    assert stage["stop"] == ("</answer>", "Q:")
    changed = " ".join(draft.changed)
    assert "generation_kwargs.top_p: 0.9: training samples from the whole distribution" in changed
    assert "generation_kwargs.stop_token_ids: [7]: a response ends at the tokens" in changed
    assert not draft.dropped


def test_verl_s_stop_strings_end_responses_here(world: World) -> None:
    rollout = {**VERL["actor_rollout_ref"]["rollout"], "stop": "</answer>"}
    given = {**VERL, "actor_rollout_ref": {**VERL["actor_rollout_ref"], "rollout": rollout}}
    draft = from_verl(read_settings(Path(world.write("verl.yaml", yaml.dump(given)))))
    assert valid(draft)["stop"] == ("</answer>",)
    assert any("rollout.stop: ['</answer>'] → stop" in line for line in draft.carried)


def test_stop_strings_that_cannot_be_are_told(world: World) -> None:
    for bad, why in (("['']", "must contain strings of 1 to 256 characters"), ("[3]", "must be text, got 3")):
        draft, stage = trl(world, "c.yaml", f"num_generations: 4\ngeneration_kwargs: {{stop: {bad}}}\n")
        assert "stop" not in stage
        assert any("generation_kwargs.stop" in line and why in line for line in draft.changed)


def test_what_is_not_carried_over_is_told(world: World) -> None:
    draft, _ = trl(world, "grpo.sh", GRPO_SH)
    assert draft.dropped == ["frobnicate: 3"]
    changed = " ".join(draft.changed)
    for word in ("lora_dropout: 0.05: is 0 in grpo", "seed: $SEED"):
        assert word in changed
    assert "use_vllm" not in changed  # where responses are computed decides no result
    text = draft.text()
    assert all(item[:60] in text for item in (*draft.changed, *draft.dropped, *draft.fill_in))


def test_adapters_of_trl_are_carried_over(world: World) -> None:
    text = (
        "conf = LoraConfig(r=4, lora_alpha=12, lora_dropout=0.1, target_modules='all-linear', use_rslora=True, "
        "modules_to_save=['lm_head'])\n"
        "SFTTrainer(model='./base', train_dataset=data, peft_config=conf, args=SFTConfig(max_steps=3))\n"
    )
    draft, stage = trl(world, "lora.py", text)
    assert stage["adapter"]["lora"] == {"rank": 4, "alpha": 12.0, "dropout": 0.1, "targets": "auto", "rslora": True}
    assert any("modules_to_save" in line and "plain LoRA on linear layers" in line for line in draft.changed)
    line = "trl dpo --use_peft --load_in_4bit --lora_target_modules q_proj k_proj --max_steps 3"
    _, stage = trl(world, "lora.sh", line)
    assert stage["adapter"]["quantize"] == "nf4"
    assert stage["adapter"]["lora"] == {
        "rank": 16, "alpha": 32.0, "dropout": 0.0, "targets": ("k_proj", "q_proj"), "rslora": False,
    }  # fmt: skip


def test_an_adapter_of_verl_is_carried_over(world: World) -> None:
    model = {"path": "./base", "lora_rank": 32, "lora_alpha": 64, "target_modules": "all-linear"}
    settings = {**VERL, "actor_rollout_ref": {**VERL["actor_rollout_ref"], "model": model}}
    stage = valid(from_verl(read_settings(Path(world.write("lora.yaml", yaml.safe_dump(settings)))), rows=40))
    assert stage["adapter"]["lora"] == {"rank": 32, "alpha": 64.0, "dropout": 0.0, "targets": "auto", "rslora": False}


def test_a_python_script_is_read_and_not_run(world: World) -> None:
    draft, stage = trl(world, "sft.py", SFT_PY, rows=160)
    assert draft.run["model"] == "./base"
    assert (draft.run["stages"]["sft"]["kind"], stage["batch_size"], stage["epochs"]) == ("sft", 16, 2)
    optimizer = stage["optimizer"]
    assert (optimizer["learning_rate"], optimizer["schedule"], optimizer["warmup_steps"]) == (3e-5, "cosine", 2)
    assert stage["max_length"] == 2048
    assert "neftune_noise_alpha: 5: there is no noise on embeddings" in draft.changed
    assert any("devices: one device is assumed" in item for item in draft.changed)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("num_generations: 4\n", {"epochs": 3, "group_size": 4, "clip_high": 0.2, "kl": None}),
        ("reward_funcs: [f]\nepsilon_high: 0.28\n", {"clip_low": 0.2, "clip_high": 0.28, "aggregation": "token-mean"}),
        ("max_steps: 7\nlearning_rate: 2e-6\n", {"steps": 7, "batch_size": 8}),
    ],
)
def test_a_configuration_alone(world: World, text: str, wanted: dict[str, Any]) -> None:
    _, stage = trl(world, "config.yaml", text)
    assert {key: stage[key] for key in wanted} == wanted


def test_rloo_and_reward_models(world: World) -> None:
    _, rloo = trl(world, "a.sh", "trl rloo --num_generations 4 --max_steps 3 --learning_rate 1e-6")
    assert (rloo["advantage"], rloo["kl"]["coefficient"]) == ("rloo", 0.05)
    draft, _ = trl(world, "b.sh", "trl reward --max_steps 3 --per_device_train_batch_size 2")
    assert draft.run["stages"]["reward"]["kind"] == "reward_model"
    assert draft.run["stages"]["reward"]["optimizer"]["learning_rate"] == 1e-4


def test_verls_settings_train_here_as_they_do_there(world: World) -> None:
    draft = from_verl(read_settings(Path(world.write("ppo.yaml", yaml.safe_dump(VERL)))), rows=40)
    stage = valid(draft)
    assert (stage["prompts_per_step"], stage["group_size"], stage["mini_batches"], stage["ppo_epochs"]) == (16, 2, 4, 2)
    assert (stage["gae"]["gamma"], stage["gae"]["lam"]) == (0.99, 0.95)
    assert stage["kl"] == {"coefficient": 0.02, "estimator": "k1", "place": "reward"}
    assert (stage["critic"]["clip"], stage["critic"]["warmup"]) == (0.4, 1)
    assert stage["critic"]["optimizer"]["learning_rate"] == 3e-5
    assert stage["epochs"] == 3
    assert any("verl drops the last rows of an epoch that do not fill a step" in item for item in draft.changed), (
        "40 rows, 16 a step"
    )
    assert (stage["optimizer"]["warmup_steps"], stage["optimizer"]["schedule"]) == (4, "constant")  # half of 8 steps
    assert (stage["runtime"]["sequence_parallel"], stage["runtime"]["activation_checkpointing"]) == (2, True)
    assert any("score.py --entry judge" in item for item in draft.fill_in)
    assert any(item.startswith("actor_rollout_ref.actor.entropy_coeff") for item in draft.changed)
    assert draft.dropped == []


def test_verls_overrides_in_a_script(world: World) -> None:
    text = (
        "N=${N:-5}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/t.parquet \\\n"
        " actor_rollout_ref.rollout.n=$N actor_rollout_ref.actor.use_kl_loss=True +data.odd=1 \\\n"
        " actor_rollout_ref.model.path='org/model' trainer.total_training_steps=9 $@\n"
    )
    draft = from_verl(read_settings(Path(world.write("run.sh", text))))
    stage = valid(draft)
    assert (stage["group_size"], stage["steps"], stage["prompts_per_step"], stage["mini_batches"]) == (5, 9, 1024, 4)
    assert (stage["kl"]["coefficient"], stage["kl"]["estimator"]) == (0.001, "k3")
    assert draft.run["data"]["train"] == "~/t.parquet"
    assert draft.dropped == ["data.odd: 1"]


def test_a_run_file_is_written_whose_epochs_are_steps(world: World) -> None:
    rows = [{"prompt": f"Q{i}", "completion": "A"} for i in range(50)]
    world.write("train.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    world.write("sft.yaml", "model_name_or_path: ./base\ndataset_name: train.jsonl\nnum_train_epochs: 3\n")
    told = world.ok("init", "--from", "trl", "sft.yaml")
    raw = yaml.safe_load(Path("run.yaml").read_text())
    assert raw["data"] == {"train": "./train.jsonl"}
    assert (raw["stages"]["sft"]["epochs"], "steps" in raw["stages"]["sft"]) == (3, False)
    assert "num_train_epochs: 3 → epochs: 3" in told
    assert "posttrain plan run.yaml" in told
    again = world("init", "--from", "trl", "sft.yaml")
    assert (again.exit_code, "exists already" in again.stderr) == (2, True)


def test_a_share_of_steps_that_nobody_knows_is_told(world: World) -> None:
    draft, stage = trl(world, "a.yaml", "num_train_epochs: 2\nwarmup_ratio: 0.1\n")
    assert (stage["epochs"], stage["optimizer"]["warmup_steps"]) == (2, 10)
    assert any(
        item.startswith("warmup_steps: warmup is 0.1 of the steps, which posttrain plan") for item in draft.fill_in
    )
    draft, stage = trl(world, "a.yaml", "num_train_epochs: 2\nwarmup_ratio: 0.1\n", rows=400)
    assert stage["optimizer"]["warmup_steps"] == 10  # of 100 steps
    assert not any(item.startswith("warmup_steps") for item in draft.fill_in)


def test_a_command_as_people_write_it(world: World) -> None:
    """Its own environment before it, a module in place of a script, lower-case variables, a pipe behind it."""
    _, sft = trl(
        world, "m.sh", "X=1 accelerate launch --num_processes 8 -m trl.scripts.sft --max_steps 3 | tee log.txt"
    )
    assert sft["batch_size"] == 64
    text = (
        "train=$HOME/t.parquet\nfiles=\"['$train', 'u.parquet']\"\n"
        'PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo data.train_files=$train data.val_files="$files" \\\n'
        " algorithm.adv_estimator=gae critic.optim.lr=3e-5 trainer.total_training_steps=20 \\\n"
        " trainer.logger=console 2>&1 | tee verl.log\n"
    )
    draft = from_verl(read_settings(Path(world.write("ppo.sh", text))))
    stage = valid(draft)
    assert draft.run["data"]["train"] == "~/t.parquet"
    assert stage["critic"]["optimizer"] | {"betas": None} == stage["optimizer"] | {"learning_rate": 3e-5, "betas": None}
    assert any(item.startswith("data.val_files: ") for item in draft.changed)
    assert (draft.inert, draft.dropped) == (["logger"], [])
    assert "Ignored (no effect on the result):\n#   - logger" in draft.text()


def test_rows_that_a_script_changes_and_rewards_in_it_are_told(world: World) -> None:
    script = (
        "from datasets import load_dataset\nfrom trl import GRPOConfig, GRPOTrainer\n\n"
        "def mine(completions):\n    return [0.0]\n\n"
        "data = load_dataset('openai/gsm8k', 'main')\ndata = data.map(lambda row: {'prompt': row['question']})\n"
        "GRPOTrainer(model='Qwen/Qwen3-0.6B', reward_funcs=mine, args=GRPOConfig(max_steps=3), train_dataset=data)\n"
    )
    draft, _ = trl(world, "grpo.py", script)
    assert any("data.map (line 8): this code changes the rows" in item for item in draft.changed)
    assert any("copy mine into reward.py: importing grpo.py would start the training" in i for i in draft.fill_in)
    draft, _ = trl(world, "grpo.yaml", "reward_funcs: [accuracy_reward]\nmax_steps: 3\n")
    assert draft.run["rewards"] == {"reward": "trl.rewards:accuracy_reward"}


def test_several_rewards_with_weights_are_one_map(world: World) -> None:
    functions = "accuracy_reward my_lib.rules.Brief_Score mine"
    text = f"trl grpo --reward_funcs {functions} --reward_weights 1.0 0.2 -1 --max_steps 3"
    draft, stage = trl(world, "grpo.sh", text)
    assert stage["reward"] == {"accuracy_reward": 1.0, "brief_score": 0.2, "mine": -1.0}
    assert draft.run["rewards"] == {
        "accuracy_reward": "trl.rewards:accuracy_reward",
        "brief_score": "my_lib.rules:Brief_Score",
        "mine": {"ref": "reward.py", "entry": "mine"},
    }
    assert draft.dropped == []
    assert any("pip install my_lib" in item for item in draft.fill_in)
    assert any("put mine into reward.py" in item for item in draft.fill_in)
    assert not any("reward" in item for item in draft.changed)


def test_functions_of_a_script_become_entries_and_computed_ones_are_told(world: World) -> None:
    script = (
        "from trl import GRPOConfig, GRPOTrainer\nfrom trl.rewards import accuracy_reward, get_cosine\n\n"
        "GRPOTrainer(model='m', reward_funcs=[accuracy_reward, mine, get_cosine(3), 'org/judge.v1', mine],\n"
        "            args=GRPOConfig(max_steps=3))\n"
    )
    draft, stage = trl(world, "grpo.py", script)
    assert stage["reward"] == {"accuracy_reward": 1, "mine": 1, "reward-3": 1, "v1": 1, "mine-again": 1}
    assert draft.run["rewards"]["reward-3"] == {"ref": "reward.py", "entry": "reward_3"}
    told = " ".join(draft.changed)
    assert "number 3 is computed in the script" in told
    assert "org/judge.v1: is a model" in told


def test_weights_that_are_all_zero_are_told(world: World) -> None:
    draft, stage = trl(world, "c.yaml", "reward_funcs: [f, g]\nreward_weights: [0, 0]\nmax_steps: 3\n")
    assert stage["reward"] == {"f": 1.0, "g": 0.0}
    assert any("with all at 0 the model learns nothing" in item for item in draft.fill_in)


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("ppo.sh", "trl ppo --beta 0.1", "trains with PPO, which is kind: ppo here, but is not converted yet"),
        ("cpo.py", "from trl import CPOTrainer\nCPOTrainer(model='m', beta=1)", "trains with CPO"),
        ("a.yaml", "learning_rate: fast", "learning_rate must be a number, got 'fast'"),
        ("a.yaml", "- 1\n- 2\n", "must be a map of settings, got list"),
        ("a.yaml", "a: [", "is not YAML"),
        ("a.py", "def f(:", "is not Python"),
        ("a.py", "print(1)", "must contain settings, got none"),
        ("a.sh", "echo 'open", "cannot be read as shell commands"),
        ("a.sh", "", "must contain settings"),
        (
            "a.yaml",
            "reward_funcs: [f, g]\nreward_weights: [1]\n",
            "must have one number for each of the 2 reward_funcs, got 1",
        ),
        ("a.yaml", "reward_funcs: [f]\nreward_weights: [.inf]\n", "reward_weights must be finite numbers, got inf"),
    ],
)
def test_refused_in_one_line_with_nothing_written(world: World, name: str, text: str, line: str) -> None:
    result = world("init", "--from", "trl", world.write(name, text))
    assert result.exit_code == 2
    assert line in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not Path("run.yaml").exists()
    assert not Path(".posttrain").exists()


def test_other_trainers_and_files_that_are_not_there(world: World) -> None:
    for words in (("tlr", "a.sh"), ("trl", "nowhere.sh"), ("verl", ".")):
        result = world("init", "--from", *words)
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    world.write("verl.yaml", "algorithm: {adv_estimator: remax}\n")
    with pytest.raises(InputError, match=r"algorithm.adv_estimator: must be one of .*, got 'remax'"):
        from_verl(read_settings(Path("verl.yaml")))
