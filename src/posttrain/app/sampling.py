"""Asking a model: some prompts, its responses, and nothing recorded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from posttrain.api.control import Control
from posttrain.api.values import Answer, Asked
from posttrain.api.verbs import answers
from posttrain.app.models import NamedModel, named_model
from posttrain.app.workspace import Workspace
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.manifest import InputRef
from posttrain.domain.rendering import stop_fault
from posttrain.domain.validation import validated
from posttrain.engine.settings import MOST_ROWS, MOST_TOKENS, InferenceRuntimeConfig
from posttrain.execution import foreground
from posttrain.preflight.fitting import first_row, model_files

_PROGRAM = "posttrain.jobs.sample"
LONGEST_WAIT = 3600.0  # seconds, where nobody says another
Form = Literal["chat", "text"]


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
    where = validated(InferenceRuntimeConfig, dict(runtime), "posttrain sample")
    for name, given, most in (("samples", samples, MOST_ROWS), ("max-new-tokens", max_new_tokens, MOST_TOKENS)):
        if given is not None and not 1 <= given <= most:
            raise InputError(f"{name} must be from 1 to {most}, got {given}")
    _refuse_unusable(samples, temperature, stop, top_k, top_p, min_p)
    named = named_model(workspace, model)
    form, why = usual_form(workspace, named)
    if chat is not None:
        form, why = ("chat", "--chat") if chat else ("text", "--text")
    request = {
        "name": "prompt",
        "rows": [prompt_row(text, form, system) for text in prompts],
        "samples": samples,
        "max_new_tokens": max_new_tokens,  # None: 256, or as many as the context leaves
        "temperature": temperature,
        "seed": seed,
        "stop": list(stop),
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "runtime": where.model_dump(),
        "threads": where.threads,
    }
    found = _answers(workspace, named, request, timeout or LONGEST_WAIT)
    return Asked(named.pinned.name, named.digest, form, why, found)


def _refuse_unusable(
    samples: int, temperature: float, stop: Sequence[str], top_k: int, top_p: float, min_p: float
) -> None:
    """Refuse ways of drawing that there are not, or that contradict each other."""
    if not 0 <= temperature <= 1000:
        raise InputError(f"temperature must be from 0 (the most likely tokens) to 1000, got {temperature:g}")
    if samples > 1 and temperature == 0:
        raise InputError(f"temperature must be above 0 for {samples} different responses, got 0; say 1")
    if fault := stop_fault(stop):
        raise InputError(f"stop {fault}")
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p < 1:
        raise InputError(
            "top-k must be 0 (all) or more, top-p above 0 to 1 and min-p from 0 to below 1, "
            f"got {top_k}, {top_p:g} and {min_p:g}"
        )
    if temperature == 0 and (top_k, top_p, min_p) != (0, 1.0, 0.0):
        raise InputError("top-k, top-p and min-p need a temperature above 0, got 0 (the most likely tokens); say 1")


def _answers(
    workspace: Workspace, model: NamedModel, request: Mapping[str, Any], timeout: float
) -> Iterator[Answer | str]:
    """Responses as they come, prompt by prompt; a text among them is a warning."""
    folder = str(model.folder(workspace).resolve())
    yield from filter(None, [workspace.catalog.not_taken.get(model.digest)])
    said = foreground.answers(_PROGRAM, {**request, "folder": folder}, timeout=timeout)
    yield from (str(reason) for reason in next(said, {}).get("fallbacks", {}).values())
    yield from (Answer(**answer) for answer in said)


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
