"""Evaluating a model without a run file: a run of one stage, like any other in ledger, cache and reports."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.api.control import Control
from posttrain.api.values import Submitted
from posttrain.api.verbs import answers
from posttrain.app.naming import model_word, named_model
from posttrain.app.runs import plan_spec, submit_planned
from posttrain.app.workspace import Workspace
from posttrain.data.fitting import context_length
from posttrain.data.refs import NAME
from posttrain.domain.errors import InputError
from posttrain.domain.runspec import RunSpec, parse_run_spec
from posttrain.preflight.fitting import model_files

STAGE = "evaluate"
_REWARD = "reward"  # what it is called in that run
_USUAL_TOKENS = 256  # of a response at most
_SOURCE = Path("posttrain eval")  # what errors call the file that nobody wrote; relative paths start here
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_-]+")


@answers(Control.evaluate)
def submit_evaluation(
    workspace: Workspace,
    model: str,
    suites: Sequence[str],
    *,
    settings: Mapping[str, Any],
    runtime: Mapping[str, Any],
    reward: Mapping[str, Any] | None = None,
    seed: int = 0,
    again: bool = False,
) -> Submitted:
    """Record a run that measures `model` on each of `suites`; the same question attaches to the run that answers it.

    Args:
        model: a channel, run, run/stage, or a ref of run.yaml.
        suites: data sets: `heldout`, `dataset:heldout@1`, a path or a hub ref.
        settings: of every suite: `max_new_tokens` (None: 256, or half the context), `samples`, `temperature`,
            `top_k`, `top_p`, `min_p`, `stop`, `pass_at`, `extract`, and with a reward `reward_range` and
            `reward_timeout`.
        runtime: `device`, `dtype`, `threads`.
        reward: scores every response: `ref` (`right`, `reward:right@1`, a path, `MODULE:FUNCTION`), and fields of a
            reward of run.yaml: `entry`, `dialect`, `secrets`, `network`.
        again: another run of the same question.

    Raises:
        InputError: as `plan`, naming what is wrong with model, suite or setting.
    """
    if settings.get("max_new_tokens") is None:
        settings = {**settings, "max_new_tokens": _room(workspace, model)}
    names = _suite_names(suites)
    settings = {**settings, **({"reward": _REWARD} if reward else {})}
    stage = {"suites": {name: {"data": name, **settings} for name in names}, "runtime": dict(runtime)}
    source: dict[str, Any] = {"owner": workspace.actor.removeprefix("user:"), "seed": seed}
    if reward:
        ref = str(reward["ref"])
        named = NAME.fullmatch(ref) and not Path(ref).suffix
        source["rewards"] = {_REWARD: {**reward, "ref": f"reward:{ref}" if named else ref}}
    spec = _spec(source, model_word(workspace, model), names, stage)
    return submit_planned(plan_spec(spec, workspace, _SOURCE), workspace, again=again, exact=True)


def _room(workspace: Workspace, model: str) -> int:
    """256 tokens, or half of a context that is shorter than two times that."""
    named = named_model(workspace, model)
    read = model_files(workspace, named.pinned, named.word if named.ref.on_disk else None, Path.cwd()).read
    context = context_length(read)
    return _USUAL_TOKENS if context is None else max(1, min(_USUAL_TOKENS, context // 2))


def _spec(source: Mapping[str, Any], model: str, names: Mapping[str, str], stage: Mapping[str, Any]) -> RunSpec:
    """The run file that nobody needs to write."""
    head = {"name": f"eval-{'-'.join(names)}"[:63].rstrip("-_"), **source, "model": model, "data": names}
    return parse_run_spec({**head, "stages": {STAGE: {"kind": "evaluate", "model": "base", **stage}}}, str(_SOURCE))


def _suite_names(suites: Sequence[str]) -> dict[str, str]:
    """Suite name → ref: the data set's own name, or its file's."""
    found: dict[str, str] = {}
    for suite in suites:
        ref = f"dataset:{suite}" if NAME.fullmatch(suite) and not Path(suite).suffix else suite
        word = ref.rpartition("/")[2] if "/" in ref or ref.startswith(".") else ref.partition(":")[2].partition("@")[0]
        stem = (word or ref).partition(".")[0].lower()
        name = _NOT_IN_NAMES.sub("-", stem).strip("-_") or "suite"
        if name in found:
            raise InputError(f"posttrain eval: suites must have names of their own, got {name!r} twice; leave one out")
        found[name] = ref
    return found
