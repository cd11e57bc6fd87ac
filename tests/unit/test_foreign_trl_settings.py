"""Every setting of TRL's configurations and trainers: carried, reported as changing the result, or without a meaning.

`fixtures/trl_settings.json` records the names and defaults; `tests/ecosystem/test_real_imports.py` holds them against
the installed TRL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import World, make_world

from posttrain.domain.runspec import parse_run_spec
from posttrain.engine.config import stage_config
from posttrain.foreign.settings import PLACES, Draft, read_settings
from posttrain.foreign.trl import from_trl

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "fixtures" / "trl_settings.json").read_text())
TRAINERS = {
    "SFT": ("SFTConfig", "SFTTrainer"),
    "DPO": ("DPOConfig", "DPOTrainer"),
    "GRPO": ("GRPOConfig", "GRPOTrainer"),
    "KTO": ("KTOConfig", "KTOTrainer"),
}
COMMON = ("ModelConfig", "ScriptArguments")  # what scripts of all trainers parse
# a value other than the default, where its type does not lead to one that the setting takes
OTHERS: dict[str, Any] = {
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "model_init_kwargs": {"attn_implementation": "x", "device_map": "auto", "dtype": "bfloat16"},
    "generation_kwargs": {"stop": ["x"], "top_p": 0.5},
    "max_steps": 5,
    "scale_rewards": "batch",
    "bf16": True,
}
UNREAD = "the file does not define this value"
ASKED_FOR = {"model", "train_dataset", "reward_funcs"}  # of a trainer; what is computed there, a person fills in


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return make_world(tmp_path, monkeypatch)


def read(world: World, text: str) -> tuple[Draft, dict[str, Any]]:
    """The draft of a script, and its one stage as the engine takes it."""
    draft = from_trl(read_settings(Path(world.write("script.py", text))))
    spec = parse_run_spec(yaml.safe_load(draft.text()), "run.yaml")
    ((_, stage),) = spec.stages.items()
    return draft, stage_config(stage.kind, stage.params).model_dump()


def other(name: str, default: Any) -> Any:
    """A value that is not the default."""
    if name in OTHERS:
        return OTHERS[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1 if isinstance(default, int) else default / 2 or 0.25
    return 2 if default is None else "other"


def places(draft: Draft, name: str) -> list[str]:
    """Under which titles a setting is reported."""

    def named(line: str) -> bool:
        return line.startswith((f"{name}:", f"{name}.")) or line == name

    titles = ("carried", "changed", "dropped", "inert")
    return [title for title in titles if any(named(line) for line in getattr(draft, title))]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_audit_25_every_setting_is_in_exactly_one_place(world: World, trainer: str) -> None:
    config, _ = TRAINERS[trainer]
    wrong: dict[str, list[str]] = {}
    for name, default in {n: d for kind in (config, *COMMON) for n, d in RECORDED[kind].items()}.items():
        for value in (other(name, default), default):
            if value is None:
                continue
            rest = "" if name == "model_name_or_path" else "model='org/base', "
            text = f"{trainer}Trainer({rest}args={config}({name}={value!r}))\n"
            draft = from_trl(read_settings(Path(world.write("script.py", text))))
            found = places(draft, name)
            several = name in ("model_init_kwargs", "generation_kwargs")  # each of what they hold is a setting
            if "dropped" in found or (len(found) != 1 and not several) or not found:
                wrong[f"{name}={value!r}"] = found
    assert wrong == {}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_audit_25_every_argument_of_a_trainer_is_reported(world: World, trainer: str) -> None:
    _, kind = TRAINERS[trainer]
    for name in RECORDED[kind]:
        draft, _ = read(world, f"{kind}({name}=mine(), args={trainer}Config(max_steps=3))\n")
        if name in ASKED_FOR:
            assert any("model" in item or "reward" in item or "rows" in item for item in draft.fill_in)
        else:
            assert places(draft, name) == ["changed"], name
            assert not any(UNREAD in line for line in draft.changed), "the reason is of this setting"


def test_audit_25_what_changes_the_result_is_reported_by_name(world: World) -> None:
    names = "formatting_func load_best_model_at_end metric_for_best_model greater_is_better truncation_mode"
    names += " data_collator trust_remote_code"
    for name in names.split():
        draft, _ = read(world, f"SFTTrainer(model='org/base', {name}=mine, args=SFTConfig(max_steps=3))\n")
        assert places(draft, name) == ["changed"], name
        assert not any(UNREAD in line for line in draft.changed), "the reason is of this setting"
    for text in (
        "SFTTrainer(callbacks=[EarlyStoppingCallback(3)], args=SFTConfig(max_steps=3))\n",
        "t = SFTTrainer(args=SFTConfig(max_steps=3))\nt.add_callback(EarlyStoppingCallback(3))\n",
    ):
        draft, _ = read(world, text)
        (line,) = (line for line in draft.changed if line.startswith("callbacks: "))
        assert "EarlyStoppingCallback(3)" in line
        assert "early_stopping" in line


@pytest.mark.parametrize("trainer", PLACES)
def test_audit_25_arguments_without_a_keyword_are_read_as_their_class_names_them(world: World, trainer: str) -> None:
    Path("base").mkdir()
    kind = trainer.removesuffix("Trainer")
    names = {
        **{"model": "'./base'", "ref_model": "None", "reward_funcs": "good", "data_collator": "None"},
        **{"args": f"{kind}Config('out', max_steps=3)", "train_dataset": "load_dataset('json', data_files='a.jsonl')"},
    }
    order = PLACES[trainer].split()
    first = order[: order.index("train_dataset") + 1]
    by_place = f"{trainer}({', '.join(names[name] for name in first)})\n"
    by_name = f"{trainer}({', '.join(f'{name}={names[name]}' for name in first)})\n"
    (placed, _), (named, _) = (read(world, f"def good(completions):\n    pass\n{text}") for text in (by_place, by_name))
    assert placed == named
    assert placed.run["model"] == "./base"
    assert placed.run["data"] == {"train": "./a.jsonl"}


def test_audit_25_arguments_of_unknown_names_are_told(world: World) -> None:
    text = "MyTrainer('./base', 3, args=SFTConfig('out', 0.1, max_steps=3))\nSFTTrainer(*parts)\n"
    draft, _ = read(world, text)
    told = [line for line in draft.changed if "write them as keywords" in line]
    assert [line.partition(" (line")[0] for line in told] == [
        "MyTrainer(… './base', 3 …)", "SFTConfig(… 0.1 …)", "SFTTrainer(… *parts …)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "kwargs",
    [
        "SFTConfig(**{'learning_rate': RATE, **MORE})",
        "SFTConfig(**KNOWN)",
        "SFTConfig(**dict(learning_rate=RATE, max_steps=7))",
    ],
)
def test_audit_25_what_stands_behind_two_stars_is_read(world: World, kwargs: str) -> None:
    names = "RATE = 3e-4\nMORE = {'max_steps': 7}\nKNOWN = {'learning_rate': RATE, 'max_steps': 7}\n"
    draft, stage = read(world, f"{names}SFTTrainer(model='org/base', args={kwargs})\n")
    assert (stage["optimizer"]["learning_rate"], stage["steps"]) == (3e-4, 7)
    assert "max_steps: 7 → steps: 7" in draft.carried
    assert not any("**" in line for line in draft.changed)


@pytest.mark.parametrize(
    "before",
    [
        "kwargs = json.load(open('settings.json'))",
        "kwargs = {'max_steps': 7}\nkwargs['max_steps'] = 9",
        "kwargs = {'max_steps': 7}\nkwargs.update(found)",
        "kwargs = {'max_steps': 7}\nif big:\n    kwargs = {'max_steps': 9}",
        "kwargs = {'max_steps': 7}\nother = kwargs\nother['max_steps'] = 9",
        "kwargs = {'max_steps': 7}\nothers = [kwargs]\nothers[0]['max_steps'] = 9",
        "kwargs = dict(max_steps=7)\ntweak(kwargs)",
        "other = {'max_steps': 7}\nkwargs = other\nother['max_steps'] = 9",
        "def tweak():\n    found = kwargs\n    found['max_steps'] = 9\nkwargs = {'max_steps': 7}",
        "def train(**kwargs): pass",
    ],
)
def test_audit_25_what_cannot_be_read_behind_two_stars_is_reported_and_no_default_as_carried(
    world: World, before: str
) -> None:
    draft, _ = read(world, f"{before}\nSFTTrainer(model='org/base', args=SFTConfig(output_dir='o', **kwargs))\n")
    assert any(line.startswith("**kwargs (line ") and "cannot be read" in line for line in draft.changed)
    assert draft.carried == ["model: org/base → model: hf:org/base@main"]


def test_audit_25_a_list_that_has_another_name_is_computed(world: World) -> None:
    text = "weights = [1.0]\nother = weights\nother[0] = 9.0\nRATE = 3e-4\nprint(RATE)\n"
    config = "GRPOConfig(max_steps=3, learning_rate=RATE, reward_weights=weights)"
    draft, stage = read(world, f"{text}GRPOTrainer(model='org/base', reward_funcs=mine, args={config})\n")
    assert any(line.startswith("reward_weights: weights: the file does not define") for line in draft.changed)
    assert not any(line.startswith("reward_weights") for line in draft.carried)
    assert stage["optimizer"]["learning_rate"] == 3e-4, "a number is nothing that another name changes"


def test_audit_25_the_report_lists_every_carried_setting_and_no_default(world: World) -> None:
    given = {
        "learning_rate": 1e-3, "num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 32,
        "max_steps": 9, "warmup_steps": 3, "lr_scheduler_type": "cosine", "adam_beta2": 0.99, "weight_decay": 0.1,
        "max_grad_norm": 0.5, "seed": 7, "temperature": 0.7, "beta": 0.04, "epsilon": 0.1, "epsilon_high": 0.3,
        "loss_type": "dr_grpo", "scale_rewards": "none", "bf16": True, "gradient_checkpointing": False,
        "save_steps": 5, "reward_weights": [1.0],
    }  # fmt: skip
    draft, stage = read(world, f"GRPOTrainer(model='org/base', reward_funcs=mine, args=GRPOConfig(**{given!r}))\n")
    assert {line.partition(":")[0] for line in draft.carried} == {*given, "model", "reward_funcs"}
    assert "adam_beta2: 0.99 → optimizer.betas: [0.9, 0.99]" in draft.carried
    assert stage["kl"] == {"coefficient": 0.04, "estimator": "k3-corrected"}  # use_bias_correction_kl, TRL's default
    assert stage["runtime"]["activation_checkpointing"] is False
    draft, _ = read(world, "GRPOTrainer(reward_funcs=mine(), args=GRPOConfig(max_steps=3))\n")
    assert draft.carried == ["max_steps: 3 → steps: 3"]


def test_audit_25_a_local_folder_is_a_local_model(world: World) -> None:
    Path("base").mkdir()
    Path("there").mkdir()
    Path("there/mine").mkdir()
    assert read(world, "SFTTrainer(model='base', args=SFTConfig(max_steps=3))\n")[0].run["model"] == "./base"
    text = "m = AutoModelForCausalLM.from_pretrained('base', dtype=torch.bfloat16, device_map='auto')\n"
    draft, stage = read(world, text + "SFTTrainer(model=m, args=SFTConfig(max_steps=3))\n")
    assert (draft.run["model"], stage["runtime"]["dtype"]) == ("./base", "bfloat16")
    assert any(line.startswith("model_init_kwargs.device_map: auto") for line in draft.changed)
    world.write("there/sft.py", "SFTTrainer(model='mine', args=SFTConfig(max_steps=3))\n")
    assert from_trl(read_settings(Path("there/sft.py"))).run["model"] == "./there/mine"
    world.ok("init", "there", "--from", "trl", world.write("one.py", "SFTTrainer(model='base', max_steps=3)\n"))
    assert yaml.safe_load(Path("there/run.yaml").read_text())["model"] == "../base"
    draft, _ = read(world, "SFTTrainer(model='nowhere', args=SFTConfig(max_steps=3))\n")
    assert draft.run["model"] == "hf:nowhere@main"


@pytest.mark.parametrize(
    ("loading", "wanted"),
    [
        ("load_dataset('json', data_files='rows.jsonl', split='train')", "./rows.jsonl"),
        ("load_dataset('csv', data_files=['rows.csv'])['train']", "./rows.csv"),
        ("load_dataset('parquet', data_files={'train': 'a/rows', 'test': ['b', 'c']}, split='train')", "./a/rows"),
        ("load_dataset('json', data_files={'train': 'a', 'dev': ['/data/d.json']})['dev'].shuffle(3)", "/data/d.json"),
    ],
)
def test_audit_25_files_that_load_dataset_reads_are_the_data(world: World, loading: str, wanted: str) -> None:
    text = f"held = load_dataset('json', data_files='other.jsonl')\nrows = {loading}\n"
    draft, _ = read(world, f"{text}SFTTrainer(model='org/base', train_dataset=rows, args=SFTConfig(max_steps=3))\n")
    assert draft.run["data"] == {"train": wanted}
    assert any(line.startswith("data_files") and wanted in line for line in draft.carried)


def test_audit_25_several_files_and_parts_of_them_are_told(world: World) -> None:
    text = "SFTTrainer(train_dataset=load_dataset('json', data_files=['a.jsonl', 'b.jsonl'], split='train[:10%]',\n"
    draft, _ = read(world, text + "    field='rows'), args=SFTConfig(max_steps=3))\n")
    assert any("posttrain asset add dataset:train a.jsonl b.jsonl" in item for item in draft.fill_in)
    assert any(line.startswith("dataset_train_split: train[:10%]") for line in draft.changed)
    assert any(line.startswith("load_dataset.field: rows: this argument is not read") for line in draft.changed)


def test_audit_25_a_guarded_script_is_not_said_to_train_when_it_is_imported(world: World) -> None:
    train = "GRPOTrainer(reward_funcs=mine, args=GRPOConfig(max_steps=3)).train()"
    guarded = (
        f"def main():\n    {train}\n\nif __name__ == '__main__':\n    main()\n",
        f"if __name__ == '__main__':\n    {train}\n",
    )
    for text in guarded:
        draft, _ = read(world, text)
        assert any("copy mine into reward.py: a reward is a separate file" in item for item in draft.fill_in)
    for text in (f"{train}\n", f"def main():\n    {train}\n\nmain()\n"):
        draft, _ = read(world, text)
        assert any("importing script.py would start the training" in item for item in draft.fill_in)


def test_audit_25_dpo_is_read(world: World) -> None:
    text = (
        "DPOTrainer(model='org/base', args=DPOConfig(beta=0.3, label_smoothing=0.1, max_steps=3, loss_type=['hinge']))"
    )
    draft, stage = read(world, text)
    assert (draft.run["stages"]["dpo"]["kind"], stage["beta"], stage["label_smoothing"]) == ("dpo", 0.3, 0.1)
    assert stage["optimizer"]["learning_rate"] == 1e-6
    assert any(line.startswith("loss_type: ['hinge']: is not supported") for line in draft.changed)
    _, stage = read(world, text.replace("'hinge'", "'robust'"))
    assert (stage["loss"], stage["label_smoothing"]) == ("robust", 0.1)
    _, stage = read(world, text.replace("'hinge'", "'ipo'"))
    assert (stage["loss"], stage["label_smoothing"]) == ("ipo", 0.0), "TRL does not read the smoothing there"


def test_kto_is_read(world: World) -> None:
    asked = "beta=0.2, undesirable_weight=1.33, per_device_train_batch_size=4, max_steps=3, loss_type='kto'"
    text = f"KTOTrainer(model='org/base', args=KTOConfig({asked}))"
    draft, stage = read(world, text)
    assert draft.run["stages"]["kto"]["kind"] == "kto"
    assert {name: stage[name] for name in ("beta", "desirable_weight", "undesirable_weight", "batch_size")} == {
        "beta": 0.2, "desirable_weight": 1.0, "undesirable_weight": 1.33, "batch_size": 4,
    }  # fmt: skip
    assert stage["optimizer"]["learning_rate"] == 1e-6
    assert "loss_type: kto → kind: kto" in draft.carried
    assert "undesirable_weight: 1.33 → undesirable_weight: 1.33" in draft.carried
    assert any(line.startswith("kto: every pass has its own order of rows") for line in draft.changed)
    _, stage = read(world, "KTOTrainer(model='org/base', args=KTOConfig(max_steps=3))")
    assert (stage["beta"], stage["desirable_weight"], stage["undesirable_weight"]) == (0.1, 1.0, 1.0)
    draft, _ = read(world, text.replace("'kto'", "'apo_zero_unpaired'"))
    assert any(line.startswith("loss_type: apo_zero_unpaired: is not supported") for line in draft.changed)


def test_the_ratios_of_sequences_and_clipped_weights_are_kinds(world: World) -> None:
    text = "GRPOTrainer(reward_funcs=f, args=GRPOConfig(max_steps=3, epsilon=3e-4, epsilon_high=EPS, KIND))"
    gspo = text.replace("EPS", "4e-4").replace("KIND", "importance_sampling_level='sequence', loss_type='grpo'")
    draft, stage = read(world, gspo)
    assert draft.run["stages"]["grpo"]["kind"] == "gspo"
    assert (stage["clip_low"], stage["clip_high"]) == (3e-4, 4e-4)
    assert "importance_sampling_level: sequence → kind: gspo" in draft.carried
    draft, stage = read(world, text.replace("EPS", "5.0").replace("KIND", "loss_type='cispo'"))
    assert draft.run["stages"]["grpo"]["kind"] == "cispo"
    assert (stage["clip_low"], stage["clip_high"]) == (1.0, 4.0)
    draft, stage = read(world, text.replace("EPS", "0.28").replace("KIND", "loss_type='cispo'"))
    assert stage["clip_high"] == 4.0
    assert any("the limit of a weight must exceed 1" in line for line in draft.changed)


def test_audit_25_what_a_parser_decides_is_no_name(world: World) -> None:
    text = (
        "GRPOTrainer(model=args.model_name, reward_funcs=mine, args=GRPOConfig(learning_rate=args.rate, max_steps=3))\n"
    )
    draft, _ = read(world, text)
    assert draft.run["model"] == "model:base"
    assert any(line.startswith("learning_rate: args.rate: the file does not define") for line in draft.changed)
