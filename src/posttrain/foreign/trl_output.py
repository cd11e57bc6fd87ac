"""Reader of the `output_dir` of TRL's and transformers' trainers: checkpoints, `trainer_state.json`, model card."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from posttrain.domain.errors import InputError
from posttrain.foreign.outside import (
    FoundModel,
    Named,
    OutsideRun,
    Points,
    inside,
    model_files,
    number_of,
    public_params,
    read_bytes,
    read_json,
    run_folder,
    step_of,
    why_left_out,
)

STATE, ARGUMENTS, CARD = "trainer_state.json", "training_args.bin", "README.md"
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,15})")
_MOST_STATE, _MOST_CARD = 2**31, 2**20  # maximum bytes of the files
_STATE_PARAMS = (  # fields of trainer_state.json that are recorded as parameters
    *("epoch", "eval_steps", "global_step", "logging_steps", "max_steps", "num_input_tokens_seen"),
    *("num_train_epochs", "save_steps", "total_flos", "train_batch_size", "best_metric", "best_global_step"),
)
_VERSION = re.compile(r"^- (TRL|PEFT|Transformers|Pytorch|Datasets|Tokenizers):? (\S{1,40})$", re.MULTILINE)
_SETTING = re.compile(r"^- (\w{1,60}): (.{1,500})$", re.MULTILINE)
_SETTINGS_HEAD, _VERSIONS_HEAD = "### Training hyperparameters", "### Framework versions"
_STAGES = {"sft": "sft", "grpo": "grpo", "dpo": "dpo", "rloo": "rloo", "kto": "kto", "reward-trainer": "reward_model"}


def read_trl_output(path: Path) -> OutsideRun:
    """Return the run whose output is in an `output_dir`.

    The model is the one at the root of the folder, or else that of the best checkpoint, or else that of the newest
    checkpoint. Metrics are those in the newest `trainer_state.json`, which includes all earlier metrics.

    Raises:
        NotFoundError: there is no such folder.
        InputError: the folder has no such run, the model is an adapter, a file is unreadable, or a link leads out of
            the folder.
    """
    folder = run_folder(path, "a TRL or transformers run (its output_dir)")
    checkpoints = _checkpoints(folder)
    state_file = _state_file(folder, checkpoints)
    state = read_json(state_file, folder, _MOST_STATE) if state_file else {}
    place, why = _model_place(folder, checkpoints, state)
    card_file = next((p / CARD for p in (folder, place) if p and (p / CARD).is_file()), None)
    card = _Card(read_bytes(card_file, folder, _MOST_CARD).decode("utf-8", "replace") if card_file else "")
    if state_file is None and not (place and (card.of_a_trainer or (place / ARGUMENTS).is_file())):
        hint = "register a model alone with posttrain asset add model:NAME DIR" if place else "check the path"
        raise InputError(f"{folder}: is not an output_dir: it has no {STATE} and no checkpoint-N with one; {hint}")
    notes = [] if state_file else [f"no {STATE}: the metrics of this run are unknown"]
    points = _points(state, state_file.name if state_file else "", folder, notes)
    settings = {**card.settings, **{key: state[key] for key in _STATE_PARAMS if state.get(key) is not None}}
    params, withheld = public_params(settings)
    files = model_files(place, folder) if place else {}
    if not place:
        notes.append("no model in safetensors: only its metrics are registered")
    read = {p.relative_to(folder).as_posix(): p for p in (state_file, card_file) if p}
    return OutsideRun(
        format="trl-output",
        source=folder.name,
        points=points,
        stage=card.stage,
        tools=card.tools or _config_tools(files, folder),
        params=params,
        withheld=withheld,
        model=FoundModel(files, why) if place else None,
        read=read,
        named=card.named,
        left_out=dict(_left_out(folder, place, files, state_file)),
        notes=tuple(notes),
    )


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders in the order of their steps."""
    found = [(int(m[1]), p) for p in folder.iterdir() if (m := _CHECKPOINT.fullmatch(p.name)) and p.is_dir()]
    if odd := next((path for _, path in found if not path.resolve().is_relative_to(folder)), None):
        raise InputError(f"{odd.name} of {folder}: must not be a link out of the folder; replace it with a copy")
    return [path for _, path in sorted(found)]


def _state_file(folder: Path, checkpoints: list[Path]) -> Path | None:
    places = (folder, *reversed(checkpoints))
    found = next((p / STATE for p in places if (p / STATE).is_symlink() or (p / STATE).exists()), None)
    return inside(found, folder) if found else None


def _model_place(folder: Path, checkpoints: list[Path], state: Mapping[str, Any]) -> tuple[Path | None, str]:
    """Return the model's folder, and a description that contains the reason for the choice."""
    if model_files(folder, folder):
        return folder, "the model at the root of the folder"
    held = [path for path in checkpoints if model_files(path, folder)]
    if not held:
        return None, ""
    best = str(state.get("best_model_checkpoint") or "").replace("\\", "/").rstrip("/").rpartition("/")[2]
    among = f"of {len(held)} checkpoints" if len(held) > 1 else "and only checkpoint"
    for path in held:
        if path.name == best:
            measured = number_of(state.get("best_metric"), STATE)
            value = "" if measured is None else f", its metric {measured:.6g}"
            return path, f"{path.name}, the best {among} by {STATE}{value}"
    return held[-1], f"{held[-1].name}, the newest {among} ({STATE} names no best)"


def _points(state: Mapping[str, Any], name: str, folder: Path, notes: list[str]) -> Points:
    points, others = Points(), 0
    rows = state.get("log_history", [])
    if not isinstance(rows, list):
        raise InputError(f"{name} of {folder}: log_history must be a list, got {type(rows).__name__}; copy it again")
    for number, row in enumerate(rows):
        place = f"{name} of {folder}: log_history[{number}]"
        if not isinstance(row, dict):
            raise InputError(f"{place} must be a map, got {type(row).__name__}; copy the folder again")
        metrics = {metric: value for metric, value in row.items() if metric != "step"}
        others += points.add_row(metrics, step_of(row.get("step"), place), place)
    if others:
        notes.append(f"{others} entries of log_history are not numbers and were left out")
    return points


def _config_tools(files: Mapping[str, Path], folder: Path) -> dict[str, str]:
    version = read_json(files["config.json"], folder, _MOST_CARD).get("transformers_version") if files else None
    return {"transformers": version} if isinstance(version, str) else {}


def _left_out(
    folder: Path, place: Path | None, files: Mapping[str, Path], state: Path | None
) -> Iterator[tuple[str, str]]:
    """Yield (file, reason) for files next to the model that are omitted."""
    for where in dict.fromkeys(filter(None, (folder, place))):
        for path in sorted(where.iterdir()):
            if path.name == CARD or path in (state, place, files.get(path.name)):
                continue
            name = path.relative_to(folder).as_posix()
            if path.is_dir():
                yield f"{name}/", "another checkpoint" if _CHECKPOINT.fullmatch(path.name) else why_left_out("")
            else:
                yield name, "the newest one contains all of it" if path.name == STATE else why_left_out(name)


class _Card:
    """The contents of a model card written by a trainer."""

    def __init__(self, text: str) -> None:
        head = _front_matter(text)
        tags = _texts(head.get("tags"))
        self.of_a_trainer = bool({"trl", "generated_from_trainer"} & set(tags)) or _VERSIONS_HEAD in text
        self.stage = next((_STAGES[tag] for tag in tags if tag in _STAGES), "train")
        self.tools = {name.lower(): version for name, version in _VERSION.findall(_below(text, _VERSIONS_HEAD))}
        self.settings = dict(_SETTING.findall(_below(text, _SETTINGS_HEAD)))
        self.named = (
            *(Named("base model", name) for name in _texts(head.get("base_model"))),
            *(Named("data set", name) for name in _texts(head.get("datasets"))),
        )


def _front_matter(text: str) -> Mapping[str, Any]:
    if not text.startswith("---\n"):
        return {}
    try:
        head = yaml.safe_load(text[4:].partition("\n---")[0])
    except (yaml.YAMLError, RecursionError, ValueError):
        return {}  # a malformed card contains no information
    return head if isinstance(head, dict) else {}


def _below(text: str, head: str) -> str:
    """Return the text below a heading, up to the next heading."""
    return text.partition(head)[2].partition("\n#")[0]


def _texts(value: Any) -> list[str]:
    """Return the texts in a list, or a single text as a list; other values and the text `None` are left out."""
    found = value if isinstance(value, list) else [value]
    return [name for name in found if isinstance(name, str) and name.strip() and name != "None" and len(name) <= 300]
