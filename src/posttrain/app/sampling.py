"""Asking a model: some prompts, its responses, and nothing recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from posttrain.api.control import Control
from posttrain.api.values import Answer, Asked
from posttrain.api.verbs import answers
from posttrain.app.models import NamedModel, named_model
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.manifest import InputRef
from posttrain.domain.rendering import stop_fault
from posttrain.domain.validation import explain
from posttrain.engine.settings import MOST_ROWS, MOST_TOKENS, InferenceRuntimeConfig
from posttrain.execution import foreground
from posttrain.preflight.fitting import first_row, model_files

_PROGRAM = "posttrain.jobs.sample"
LONGEST_WAIT = 3600.0  # seconds, where nobody says another
Form = Literal["chat", "text"]


@dataclass(frozen=True, slots=True)
class Ask:
    """How to ask, e.g. `Ask(samples=4, temperature=0.7)`."""

    samples: int = 1  # responses to each prompt
    max_new_tokens: int | None = None  # of a response at most; None: 256, or as many as the context leaves
    temperature: float = 0.0  # 0: the most likely tokens
    seed: int = 0
    runtime: InferenceRuntimeConfig = field(default_factory=InferenceRuntimeConfig)
    timeout: float = LONGEST_WAIT  # seconds, for all of it
    stop: Sequence[str] = ()  # a response ends with the token that completes one of these in its text
    top_k: int = 0  # draw among the k most likely tokens; 0: all
    top_p: float = 1.0  # among the most likely ones that together have this probability
    min_p: float = 0.0  # among those at least this times as likely as the likeliest

    def __post_init__(self) -> None:
        for name, most in (("samples", MOST_ROWS), ("max_new_tokens", MOST_TOKENS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise InputError(f"{name.replace('_', '-')} must be from 1 to {most}, got {value}")
        if not 0 <= self.temperature <= 1000:
            raise InputError(f"temperature must be from 0 (the most likely tokens) to 1000, got {self.temperature:g}")
        if self.samples > 1 and self.temperature == 0:
            raise InputError(f"temperature must be above 0 for {self.samples} different responses, got 0; say 1")
        if fault := stop_fault(self.stop):
            raise InputError(f"stop {fault}")
        if self.top_k < 0 or not 0 < self.top_p <= 1 or not 0 <= self.min_p < 1:
            raise InputError(
                "top-k must be 0 (all) or more, top-p above 0 to 1 and min-p from 0 to below 1, "
                f"got {self.top_k}, {self.top_p:g} and {self.min_p:g}"
            )
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise InputError("top-k, top-p and min-p need a temperature above 0, got 0 (the most likely tokens); say 1")


@answers(Control.ask)
def ask(
    workspace: Workspace,
    model: str,
    prompts: Sequence[str],
    *,
    samples: int,
    max_new_tokens: int | None,
    temperature: float,
    seed: int,
    runtime: Mapping[str, Any],
    timeout: float | None,
    chat: bool | None,
    system: str | None,
    stop: Sequence[str] = (),
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Asked:
    where, wait = inference_runtime(**runtime), timeout or LONGEST_WAIT
    how = Ask(samples, max_new_tokens, temperature, seed, where, wait, stop, top_k, top_p, min_p)
    named = named_model(workspace, model)
    form, why = usual_form(workspace, named)
    if chat is not None:
        form, why = ("chat", "--chat") if chat else ("text", "--text")
    rows = [prompt_row(text, form, system) for text in prompts]
    return Asked(named.pinned.name, named.digest, form, why, ask_model(workspace, named, rows, how))


def ask_model(
    workspace: Workspace, model: NamedModel, prompts: Sequence[Mapping[str, Any]], ask: Ask
) -> Iterator[Answer | str]:
    """Responses as they come, prompt by prompt; a text among them is a warning.

    The same model, prompts and `ask` give the same responses on the same device.

    Args:
        prompts: rows with `prompt` or `messages`, see `prompt_row`.

    Raises:
        InputError: a prompt that cannot be rendered or does not fit the model's context; a model that writes nothing.
        DeadlineError: it took longer than `ask.timeout`.
    """
    request = {
        "folder": str(model.folder(workspace).resolve()),
        "name": "prompt",
        "rows": [dict(row) for row in prompts],
        "samples": ask.samples,
        "max_new_tokens": ask.max_new_tokens,
        "temperature": ask.temperature,
        "seed": ask.seed,
        "stop": list(ask.stop),
        "top_k": ask.top_k,
        "top_p": ask.top_p,
        "min_p": ask.min_p,
        "runtime": ask.runtime.model_dump(),
        "threads": ask.runtime.threads,
    }
    yield from filter(None, [workspace.catalog.not_taken.get(model.digest)])
    said = foreground.answers(_PROGRAM, request, timeout=ask.timeout)
    yield from (str(reason) for reason in next(said, {}).get("fallbacks", {}).values())
    yield from (Answer(**answer) for answer in said)


def inference_runtime(**chosen: Any) -> InferenceRuntimeConfig:
    """Where and how to compute, from what was typed.

    Raises:
        InputError: an unknown device or dtype, or too many threads.
    """
    try:
        return InferenceRuntimeConfig.model_validate(chosen)
    except ValidationError as error:
        raise explain(error, "posttrain sample", InferenceRuntimeConfig) from error


def prompt_row(text: str, form: Form, system: str | None = None) -> dict[str, Any]:
    """A prompt as a row of a data set would hold it.

    Raises:
        InputError: a system prompt for plain text.
    """
    if form == "text":
        if system is not None:
            raise InputError("--system needs a chat, got a prompt that is plain text; add --chat")
        return {"prompt": text}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"prompt": [*before, {"role": "user", "content": text}]}


def usual_form(workspace: Workspace, model: NamedModel) -> tuple[Form, str]:
    """How the model is used to be asked, and why: as the rows it was trained on ask, else as its chat template does."""
    trained = _training_data(workspace, model)
    if trained is not None:
        try:
            row = first_row(workspace, trained)
        except NotFoundError:  # its bytes are gone; the model's are not
            row = {}
        form: Form = "text" if isinstance(row.get("prompt", ""), str) and "messages" not in row else "chat"
        if row:
            return form, f"as {trained.name} asks"
    read = model_files(workspace, model.pinned, model.word if model.ref.on_disk else None, Path.cwd()).read
    templated = read("chat_template.jinja") or b'"chat_template"' in (read("tokenizer_config.json") or b"")
    return ("chat", "by the model's chat template") if templated else ("text", "the model has no chat template")


def _training_data(workspace: Workspace, model: NamedModel) -> InputRef | None:
    if model.made is None or model.made.run_id is None or model.made.stage is None:
        return None
    manifest = workspace.stores.manifest(workspace.ledger.run(model.made.run_id))
    return manifest.stage(model.made.stage).inputs.get("data")
