"""One-line explanations of pydantic errors, with file, field, constraint, value and the most similar known name.

A hint also names the intended field for names that other trainers use.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from posttrain.domain.errors import InputError, nearest

M = TypeVar("M", bound=BaseModel)
# name in TRL, verl, OpenRLHF or transformers → names in Posttrain; the first name that exists at the place counts
FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning-rate", "actor_lr", "critic_lr"), ("learning_rate",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler", "scheduler"), ("schedule",)),
    **dict.fromkeys(("warmup", "warmup_ratio", "lr_warmup_steps", "lr_warmup_steps_ratio"), ("warmup_steps",)),
    **dict.fromkeys(("min_lr_ratio", "min_lr"), ("final_ratio",)),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_betas"), ("betas",)),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "clip_grad_norm", "max_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("max_steps", "num_steps", "total_training_steps"), ("steps",)),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "total_epochs", "max_epochs"), ("epochs",)),
    **dict.fromkeys(
        ("per_device_train_batch_size", "train_batch_size", "rollout_batch_size"),
        ("batch_size", "prompts_per_step"),
    ),
    **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches"), ("mini_batches",)),
    **dict.fromkeys(("ppo_epochs", "num_ppo_epochs", "num_iterations"), ("ppo_epochs", "mini_batches")),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size", "ppo_max_token_len_per_gpu"),
        ("micro_batch_tokens",),
    ),
    **dict.fromkeys(
        ("num_generations", "n", "num_samples", "n_samples_per_prompt", "num_return_sequences", "rollout_n"),
        ("group_size", "samples"),
    ),
    **dict.fromkeys(
        ("max_completion_length", "max_response_length", "response_length", "max_tokens", "max_gen_toks"),
        ("max_new_tokens",),
    ),
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words", "stop_sequence", "until"), ("stop",)),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "cutoff_len", "max_prompt_length"), ("max_length",)),
    **dict.fromkeys(("beta", "kl_coef", "kl_loss_coef", "init_kl_coef", "kl_beta"), ("coefficient", "kl")),
    **dict.fromkeys(("kl_estimator", "kl_loss_type", "kl_penalty"), ("estimator", "kl")),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), ("kl",)),
    **dict.fromkeys(("epsilon", "clip_ratio", "clip_ratio_low", "cliprange", "eps_clip"), ("clip_low",)),
    **dict.fromkeys(("epsilon_high", "clip_ratio_high"), ("clip_high",)),
    **dict.fromkeys(("cliprange_value", "value_clip"), ("clip", "critic")),
    **dict.fromkeys(
        ("staleness", "max_staleness", "staleness_threshold", "off_policy_steps", "async", "asynchronous"), ("lag",)
    ),
    **dict.fromkeys(("bypass_mode", "rollout_is", "importance_sampling"), ("correction", "lag")),
    **dict.fromkeys(("rollout_is_threshold", "tis_cap", "importance_sampling_cap"), ("cap", "lag")),
    **dict.fromkeys(("loss_type", "loss_agg_mode"), ("aggregation",)),
    **dict.fromkeys(("adv_estimator", "advantage_estimator", "scale_rewards"), ("advantage",)),
    **dict.fromkeys(("peft", "peft_config", "lora_config", "use_peft"), ("adapter",)),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), ("rank", "lora", "adapter")),
    **dict.fromkeys(("lora_alpha",), ("alpha", "lora", "adapter")),
    **dict.fromkeys(("lora_dropout",), ("dropout", "lora", "adapter")),
    **dict.fromkeys(("target_modules", "lora_target_modules", "modules"), ("targets", "lora", "adapter")),
    **dict.fromkeys(("use_rslora",), ("rslora", "lora", "adapter")),
    **dict.fromkeys(("qlora", "load_in_4bit", "quantization_config", "bnb_4bit_quant_type"), ("quantize", "adapter")),
    **dict.fromkeys(("lambd", "lambda", "gae_lambda", "lam"), ("lam", "critic_lam")),
    **dict.fromkeys(
        ("reward_funcs", "reward_func", "reward_fn", "reward_function", "reward_weights"), ("reward", "rewards")
    ),
    **dict.fromkeys(("reward_model_path", "reward_pretrain", "rm"), ("reward_model",)),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path", "teacher_path"), ("teacher",)),
    **dict.fromkeys(
        ("dataset", "datasets", "train_dataset", "dataset_name", "train_files", "prompt_data", "data_files"),
        ("data",),
    ),
    **dict.fromkeys(("eval_dataset", "val_files", "validation"), ("probe", "data")),
    **dict.fromkeys(("model_name_or_path", "model_name", "base_model", "pretrain", "path"), ("model",)),
    **dict.fromkeys(("gradient_checkpointing", "enable_gradient_checkpointing"), ("activation_checkpointing",)),
    **dict.fromkeys(("ulysses_sequence_parallel_size", "sp_size", "ring_attn_size"), ("sequence_parallel",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "precision", "mixed_precision"), ("dtype",)),
    **dict.fromkeys(("save_steps", "save_freq", "checkpoint_interval"), ("checkpoint_every",)),
    **dict.fromkeys(("eval_steps", "test_freq"), ("every", "probe")),
    **dict.fromkeys(("min", "threshold", "minimum"), ("at_least",)),
    **dict.fromkeys(("max", "maximum"), ("at_most",)),
    **dict.fromkeys(("early_stopping_patience",), ("patience", "early_stopping")),
    **dict.fromkeys(("early_stopping_threshold",), ("min_delta", "early_stopping")),
    **dict.fromkeys(("load_best_model_at_end", "save_best", "best"), ("keep_best",)),
    **dict.fromkeys(("gate", "checks"), ("gates",)),
    **dict.fromkeys(("report_to", "logger", "loggers", "tracker", "log_with", "use_wandb"), ("trackers",)),
    **dict.fromkeys(("uri", "tracking-uri"), ("tracking_uri",)),
    **dict.fromkeys(("experiment_name", "run_name"), ("experiment",)),
    **dict.fromkeys(("project_name", "wandb_project"), ("project",)),
    **dict.fromkeys(("log_dir", "logging_dir", "tensorboard_dir"), ("logdir",)),
    **dict.fromkeys(("max_tokens_total", "token_budget"), ("tokens", "budget")),
    **dict.fromkeys(("timeout", "time_limit", "max_time"), ("wall_clock", "reward_timeout", "budget")),
}
# names whose unit differs from the unit of Posttrain's field → that unit; fields that have a counterpart → it
UNITS: Mapping[str, str] = {
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio"), "a number of steps, not a share"),
    **dict.fromkeys(("ppo_mini_batch_size",), "a number of optimiser steps, not a size"),
    **dict.fromkeys(("gradient_accumulation_steps", "micro_batch_size", "ppo_micro_batch_size"), "in tokens"),
    "critic_lam": "or 'alpha' for the λ of the policy",
}
_WHOLE = "only suites with samples have it; training samples the full distribution, as its log-probabilities require"
# names of run.yaml or of other trainers that are unknown at the place → the reason
NOT_HERE: Mapping[str, str] = {
    **dict.fromkeys(("top_p", "top_k", "min_p"), _WHOLE),
    "load_in_8bit": "weights of 8 bits are not supported; adapter: {quantize: nf4} keeps a frozen base in 4 bits",
    **dict.fromkeys(
        ("use_vllm", "vllm", "vllm_mode", "sglang"),
        "vLLM and SGLang are not supported yet: a stage samples with Posttrain's own engine",
    ),
    **dict.fromkeys(
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        "responses are sampled without penalties, because the log-probabilities must be those of the sampling "
        "distribution",
    ),
    "lag": "only policy gradients have it, since only they correct for samples of an older policy",
    "stop": "only suites and stages that sample have it; a stage's `stop` also applies to its probe",
    "stop_token_ids": "a response ends at the tokens that the model's generation_config.json names, and at stop",
}
# kinds of other trainers → the alternative in Posttrain
KINDS: Mapping[str, str] = {
    "cpo": "is not supported yet; the nearest are kind: simpo and kind: orpo, which need no reference",
    "ipo": "is kind: dpo with loss: ipo",
    "reinforce": "is kind: rloo with a group's baseline, or kind: reinforce_plus_plus without groups",
    **dict.fromkeys(("reinforce++", "reinforce-plus-plus"), "is kind: reinforce_plus_plus"),
    "dr-grpo": "is kind: dr_grpo",
    **dict.fromkeys(("rl", "rlvr", "online"), "is kind: grpo, or kind: ppo with a critic"),
    **dict.fromkeys(("rm", "reward", "reward-model"), "is kind: reward_model"),
    **dict.fromkeys(("eval", "test", "benchmark"), "is kind: evaluate"),
    **dict.fromkeys(("finetune", "fine-tune", "finetuning", "train", "supervised"), "is kind: sft"),
    **dict.fromkeys(("custom", "user", "best_of_n", "rejection_sampling"), "is kind: dataflow, your own algorithm"),
    **dict.fromkeys(("gkd", "distillation", "on_policy_distillation"), "is kind: distill"),
}
_SHOWN = 120  # characters of a value
_TARGET = re.compile(r"=|://")  # marks the beginning of a target inside a key
_TAG = re.compile(r"function-|constrained-|literal\[|lax-or-strict")
_CREDENTIALS = re.compile(r"://\S*@")


def validated(model: type[M], raw: Any, source: str) -> M:
    """Return the validated model of raw data; `source` names the data in errors.

    Raises:
        InputError: the data are invalid; the message is that of `explain`.
    """
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise explain(error, source, model) from error


def explain(error: ValidationError, source: str, model: type[BaseModel]) -> InputError:
    """Return the first error of a validation as one line; an unknown key comes first, since it explains a missing key.

    Args:
        source: the file (and dotted path in it) of the value.
        model: the validated class, from whose fields the suggestion for a misspelt key is taken.
    """
    every = error.errors(include_url=False)
    first = min(every, key=lambda found: found["type"] != "extra_forbidden")
    location = _place(first)
    where = f"{source}: " + ".".join(map(bare, location)) + (": " if location else "")
    reason = NOT_HERE.get(str(location[-1])) if location else None
    if first["type"] == "extra_forbidden" and reason:
        return InputError(f"{where}unknown key here: {reason}; remove it")
    if first["type"] == "extra_forbidden":
        return InputError(f"{where}unknown key{_meant(str(location[-1]), model, location[:-1])}; remove or rename it")
    if first["type"] == "missing":
        return InputError(f"{where}is required; add it")
    message = _words(first["type"], first.get("ctx", {})) or first["msg"].removeprefix("Value error, ")
    message += "".join(
        f", or {one['ctx']['expected']}"
        for one in every
        if one is not first and one["type"] == "literal_error" and _place(one) == location
    )
    given = first.get("input")
    shown = "" if isinstance(given, dict | list) or " got " in message else f", got {_shortened(given)}"
    return InputError(f"{where}{message}{shown}")


def bare(key: object) -> str:
    """Return a key as an error may show it: the text after `=` or `://` may be a password.

    `mlflow=http://me:secret@host` becomes `mlflow=…`.
    """
    text = str(key)
    found = _TARGET.search(text)
    return f"{text[: found.end()]}…" if found else text


_PLAIN = {
    **dict.fromkeys(
        ("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "must be a whole number in digits"
    ),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type", "mapping_type"), "must be a map"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "invalid_key": "must have words as keys",
}
_SIDES = {  # kind of bound → its wording, and pydantic's key for its number
    "greater_than_equal": ("at least", "ge"),
    "less_than_equal": ("at most", "le"),
    "greater_than": ("more than", "gt"),
    "less_than": ("less than", "lt"),
}


def _words(kind: str, about: Mapping[str, Any]) -> str | None:
    """Return Posttrain's message for a pydantic error; None: use pydantic's message."""
    if kind in _SIDES:
        side, key = _SIDES[kind]
        return f"must be {side} {_plainly(about[key])}"
    if kind == "string_pattern_mismatch":
        return f"must match {about['pattern']}"
    if kind == "literal_error":
        return f"must be one of {str(about['expected']).replace(' or ', ', ')}"
    return _PLAIN.get(kind)


def _plainly(bound: float) -> str:
    """Format a bound: `1000000`, `0.5`, `1e12`."""
    whole = float(bound).is_integer()
    return f"{int(bound)}" if whole and abs(bound) < 1e10 else f"{bound:.17g}" if whole else f"{bound:g}"


def masked(text: str) -> str:
    """Return a text without the credentials of its URLs."""
    return _CREDENTIALS.sub("://…@", text)


def _shortened(given: Any) -> str:
    shown = masked(repr(given))
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN // 2]}…"


def _takes(annotation: Any, kinds: tuple[Any, ...]) -> bool:
    if get_origin(annotation) is dict:  # the value is in a map, and is not the field's own value
        return False
    return annotation in kinds or any(_takes(part, kinds) for part in get_args(annotation))


def _place(found: Mapping[str, Any]) -> Sequence[int | str]:
    """Return the location in the file, without pydantic's names of union members."""
    place = [part for part in found["loc"] if not (isinstance(part, str) and _TAG.match(part))]
    return place[:-1] if len(place) > 1 and place[-1] in ("int", "float", "str", "bool") else place


def unknown_kind(kind: str, known: Iterable[str]) -> str:
    """Return the message for an unknown stage kind, with a hint at the alternative or the most similar kind."""
    names = list(known)
    told = KINDS.get(kind.lower())
    if told is None:
        return f"unknown stage kind {kind!r}{nearest(kind, names)}"
    return f"unknown stage kind {kind!r}: it {told} (kinds: {', '.join(names)})"


def _meant(word: str, model: type[BaseModel], place: Sequence[int | str]) -> str:
    """Return a hint such as ` (did you mean 'learning_rate' under 'optimizer'?)`.

    The field is found by Posttrain's or another trainer's name, otherwise by similarity.
    """
    known = _fields_at(model, place)
    below = {name: _fields_at(model, [*place, name]) for name in known}
    for wanted in (word, *FIELDS.get(word.lower(), ())):
        told = UNITS.get(word.lower()) or UNITS.get(wanted)
        unit = f", {told}" if told else ""
        if wanted in known:
            return f" (did you mean {wanted!r}{unit}?)"
        parent = next((name for name, fields in below.items() if wanted in fields), None)
        if parent:
            return f" (did you mean {wanted!r} under {parent!r}{unit}?)"
    return nearest(word, known)


def _fields_at(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    current: Any = model
    for part in location:
        found = _model_of(current)
        current = (
            found.model_fields[str(part)].annotation if found and str(part) in found.model_fields else _inner(current)
        )
    found = _model_of(current)
    return [field.alias or name for name, field in found.model_fields.items()] if found else []


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, UnionType) or get_origin(annotation) in (Union, Annotated):
        return next(filter(None, map(_model_of, get_args(annotation))), None)
    return None


def _inner(annotation: Any) -> Any:
    arguments = get_args(annotation)
    return arguments[-1] if arguments and arguments[-1] is not Ellipsis else arguments[0] if arguments else None


class Frozen(BaseModel):
    """An immutable model that rejects unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _numbers_are_numbers(cls, value: Any) -> Any:
        """Return `value`; reject true or false in place of a number, which pydantic would read as 1 or 0."""
        for name, field in cls.model_fields.items() if isinstance(value, dict) else ():
            given = value.get(field.alias or name)
            parts = given if isinstance(given, list) else [given]
            found = next((part for part in parts if isinstance(part, bool)), None)
            if (
                found is not None
                and not _takes(field.annotation, (bool, Any))
                and _takes(field.annotation, (int, float))
            ):
                raise ValueError(f"{name} must be a number, got {str(found).lower()}; write the number")
        return value
