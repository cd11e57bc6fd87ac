"""Models and data: registration, marks, base models, models by name, evaluation and sampling without a run file.

A base model is the output of a run like any other, with a manifest, a job and a ledger entry. A person names a model by
a channel, a run, a run's stage, or a ref as in run.yaml. An evaluation without a run file is a run with one stage; the
ledger, the cache and reports treat it like any other run.

Sampling from a model records nothing. Data sets, models, rewards and imported run histories are registered here, and
people mark their versions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from posttrain.api.control import Control
from posttrain.api.values import Answer, Asked, Marked, Submitted
from posttrain.api.verbs import answers
from posttrain.app.driver import drive
from posttrain.app.runs import plan_spec, submit_planned
from posttrain.app.workspace import Workspace
from posttrain.control import channels as recalls
from posttrain.control.lineage import MadeModel, made_model, of_bytes
from posttrain.data import imports
from posttrain.data.fit import context_length
from posttrain.data.refs import NAME, AssetRef, Source, is_confined, local_path, parse_ref
from posttrain.decision.releases import moves
from posttrain.domain.errors import InputError, NotFoundError, PosttrainError, nearest
from posttrain.domain.jobs import FIXED_LOGPROBS
from posttrain.domain.kinds import METRICS
from posttrain.domain.lifecycle import RunState, is_final
from posttrain.domain.manifest import InputRef
from posttrain.domain.records import Asset, ReleaseEntry, RunRecord, outcome_error, stage_of
from posttrain.domain.rendering import stop_fault
from posttrain.domain.runspec import parse_run_spec, read_yaml
from posttrain.domain.validation import validated
from posttrain.engine.settings import MOST_ROWS, MOST_TOKENS, InferenceRuntimeConfig
from posttrain.execution import foreground
from posttrain.foreign.outside import OutsideRun, carried
from posttrain.foreign.trl_output import read_trl_output
from posttrain.preflight.data import first_row, model_files
from posttrain.store.trees import materialise, scratch

STAGE = "init"
_HEADS = ("model", "channel", "run", "hf")
_STAGE = "evaluate"
_REWARD = "reward"  # the reward's name in the generated run
_USUAL_TOKENS = 256  # the default maximum length of a response
_SOURCE = Path("posttrain eval")  # the name of the generated run file in errors; relative paths start here
_NOT_IN_NAMES = re.compile(r"[^a-z0-9_-]+")
_PROGRAM = "posttrain.jobs.sample"
LONGEST_WAIT = 3600.0  # seconds, the default timeout
Form = Literal["chat", "text"]


@answers(Control.create_model)
def create_model(workspace: Workspace, name: str, config: Path, seed: int) -> tuple[Asset, str]:
    """Run a one-stage `init_model` run and register its model as `model:NAME`.

    A repeated call with the same configuration and seed returns the existing run's model, and registers nothing new. If
    that run did not succeed, the call tries again.

    Args:
        config: YAML with the parameters of the `init_model` stage.

    Raises:
        InputError: a parameter is unknown or ill-typed, or the name is invalid.
        PosttrainError: the run did not succeed; the exception's class depends on the run's outcome.
    """
    params = read_yaml(config)
    for key in ("kind", "trainer"):
        if key in params:
            raise InputError(
                f"{config}: {key}: must be left out, got {params[key]!r}; a model file contains only parameters"
            )
    raw = {
        "name": "model-" + re.sub(r"[^a-z0-9_-]", "-", name),
        "owner": workspace.actor.removeprefix("user:"),
        "seed": seed,
        "stages": {STAGE: {"kind": "init_model", **params}},
    }
    try:
        planned = plan_spec(parse_run_spec(raw, str(config)), workspace, config)
    except InputError as wrong:  # the file contains the parameters only, not the stage
        raise InputError(re.sub(rf"stages\.{STAGE}(: init_model)?(: |\.)", "", str(wrong))) from wrong
    submitted = submit_planned(planned, workspace)
    if submitted.attached and is_final("run", submitted.run.state) and submitted.run.state != RunState.SUCCEEDED:
        submitted = submit_planned(planned, workspace, again=True)
    run_id = submitted.run.id
    record = drive(workspace, run_id)
    rows = tuple(workspace.ledger.stages(run_id))
    error = outcome_error(record, rows)
    if error:
        raise error
    digest = next(row.outputs["model"]["digest"] for row in rows if row.name == STAGE)
    folder = materialise(workspace.blobs, digest, workspace.root / "cache")
    return workspace.catalog.add_model(folder, name, origin={"run": run_id}), run_id


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that a user named, pinned to its bytes."""

    word: str  # the model's ref in run.yaml: channel:prod, run:sort/sft, model:base, hf:org/name@revision or a path
    ref: AssetRef
    pinned: InputRef
    made: MadeModel | None  # None: no run of this workspace made it

    @property
    def digest(self) -> str:
        """The digest of the model's tree of files."""
        return str(self.pinned.digest)

    def folder(self, workspace: Workspace) -> Path:
        """Return the folder with the model's files, in Hugging Face format; the folder must not be written to.

        Raises:
            NotFoundError: bytes are missing.
            IntegrityError: bytes are corrupt.
        """
        if self.ref.on_disk:
            return local_path(self.ref, Path.cwd())
        return materialise(workspace.blobs, self.digest, workspace.root / "cache")


def named_model(workspace: Workspace, text: str) -> NamedModel:
    """Return the model that `prod`, `prod@3`, `sort-b0ed9b49`, `sort/sft` or a ref such as `model:base` names.

    A channel takes precedence over a run with the same name, and a run over a folder. Relative paths start at the
    current folder.

    Raises:
        NotFoundError: there is no such model.
        InputError: the name is ill-formed, or names a folder without a model.
    """
    word = model_word(workspace, text)
    ref = parse_ref(word, "model")
    if not ref.made:
        return NamedModel(word, ref, workspace.catalog.resolver(Path.cwd())("model", word), None)
    try:
        made = made_model(workspace.stores, ref)
    except NotFoundError as error:
        if word == text or ref.source is Source.CHANNEL:  # the channel exists, and the error lists its releases
            raise
        hint = nearest(text, workspace.ledger.channels()) or " (there are no channels yet)"
        raise NotFoundError(f"model {text!r}: no channel{hint}, and {error}") from error
    return NamedModel(word, ref, made.pinned(word), made)


def recorded_logprobs(workspace: Workspace, digest: str) -> dict[str, Any] | None:
    """Return the log-probabilities of fixed texts that the newest evaluation of a model recorded.

    Returns:
        `texts` (token ids), `logprobs` (of each text without its first token) and `dtype`; None: no evaluation of this
        workspace recorded them.
    """
    import pyarrow.parquet  # only a server of models reads them

    with workspace.ledger.snapshot() as now:
        used = {stage_of(edge.consumer) for edge in now.uses_of_bytes(digest) if edge.slot == "model"}
        rows = now.stages(*{place[0] for place in used if place})
    found = [
        row for row in rows if (row.run_id, row.name) in used and "items" in row.outputs and METRICS in row.outputs
    ]
    for row in sorted(found, key=lambda row: (row.finished_at or 0.0, row.run_id), reverse=True):
        data = workspace.blobs.get(row.outputs["items"]["digest"])
        about = pyarrow.parquet.read_schema(pyarrow.BufferReader(data)).metadata or {}
        if written := about.get(FIXED_LOGPROBS.encode()):
            recorded: dict[str, Any] = json.loads(written)
            if recorded["texts"]:
                return recorded
    return None


def model_word(workspace: Workspace, text: str) -> str:
    """Return the run.yaml ref for a model that a user named."""
    if text.partition(":")[0] in _HEADS or text.startswith((".", "~", "/")):
        return text
    head = "channel" if text.partition("@")[0] in workspace.ledger.channels() else "run"
    if head == "run" and not is_confined() and Path(text).is_dir() and not _is_run(workspace, text.partition("/")[0]):
        return f"./{text}"
    return f"{head}:{text}"


def measured_word(workspace: Workspace, word: str) -> str:
    """Return the digest of a model folder, by which `compare` finds its evaluations; return other words unchanged."""
    path = model_word(workspace, word)
    return named_model(workspace, path).digest if path.startswith((".", "~", "/")) else word


def _is_run(workspace: Workspace, word: str) -> bool:
    try:
        return bool(workspace.ledger.find_run(word))
    except PosttrainError:  # no run, or several runs, with that prefix
        return False


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
    """Record a run that measures `model` on each of `suites`; an equal request attaches to the existing run.

    Args:
        model: a channel, RUN, RUN/STAGE, or a ref as in run.yaml.
        suites: data sets: `heldout`, `dataset:heldout@1`, a path or a hub ref.
        settings: for every suite: `max_new_tokens` (None: 256, or half the context), `samples`, `temperature`,
            `top_k`, `top_p`, `min_p`, `stop`, `pass_at`, `extract`, and with a reward `reward_range` and
            `reward_timeout`.
        runtime: `device`, `dtype`, `threads`.
        reward: the reward that scores every response: `ref` (`right`, `reward:right@1`, a path, `MODULE:FUNCTION`), and
            the fields `entry`, `dialect`, `secrets` and `network` of a reward in run.yaml.
        again: whether to submit a new run even if an equal run exists.

    Raises:
        InputError: a model, suite, setting or reward is invalid; the message contains its name, constraint and value.
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
    run = {  # the generated run file
        "name": f"eval-{'-'.join(names)}"[:63].rstrip("-_"),
        **source,
        "model": model_word(workspace, model),
        "data": names,
        "stages": {_STAGE: {"kind": "evaluate", "model": "base", **stage}},
    }
    spec = parse_run_spec(run, str(_SOURCE))
    return submit_planned(plan_spec(spec, workspace, _SOURCE), workspace, again=again, exact=True)


def _room(workspace: Workspace, model: str) -> int:
    """Return 256 tokens, or half of the context if that is less."""
    named = named_model(workspace, model)
    read = model_files(workspace, named.pinned, named.word if named.ref.on_disk else None, Path.cwd()).read
    context = context_length(read)
    return _USUAL_TOKENS if context is None else max(1, min(_USUAL_TOKENS, context // 2))


def _suite_names(suites: Sequence[str]) -> dict[str, str]:
    """Return suite name → ref; a suite's name is the name of its data set or file."""
    found: dict[str, str] = {}
    for suite in suites:
        ref = f"dataset:{suite}" if NAME.fullmatch(suite) and not Path(suite).suffix else suite
        word = ref.rpartition("/")[2] if "/" in ref or ref.startswith(".") else ref.partition(":")[2].partition("@")[0]
        name = _NOT_IN_NAMES.sub("-", (word or ref).partition(".")[0].lower()).strip("-_") or "suite"
        if name in found:
            raise InputError(f"posttrain eval: suites must have different names, got {name!r} twice; leave one out")
        found[name] = ref
    return found


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
        "max_new_tokens": max_new_tokens,  # None: 256, or the rest of the context
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
    """Reject sampling settings that are out of range or contradict each other."""
    if not 0 <= temperature <= 1000:
        raise InputError(f"temperature must be from 0 (the most likely tokens) to 1000, got {temperature:g}")
    if samples > 1 and temperature == 0:
        raise InputError(f"temperature must be above 0 for {samples} different responses, got 0; use 1")
    if fault := stop_fault(stop):
        raise InputError(f"stop {fault}")
    if top_k < 0 or not 0 < top_p <= 1 or not 0 <= min_p < 1:
        raise InputError(
            "top-k must be 0 (all) or more, top-p above 0 to 1 and min-p from 0 to below 1, "
            f"got {top_k}, {top_p:g} and {min_p:g}"
        )
    if temperature == 0 and (top_k, top_p, min_p) != (0, 1.0, 0.0):
        raise InputError("top-k, top-p and min-p need a temperature above 0, got 0 (the most likely tokens); use 1")


def _answers(
    workspace: Workspace, model: NamedModel, request: Mapping[str, Any], timeout: float
) -> Iterator[Answer | str]:
    """Yield responses as they arrive, prompt by prompt; a string among the responses is a warning."""
    folder = str(model.folder(workspace).resolve())
    yield from filter(None, [workspace.catalog.not_taken.get(model.digest)])
    said = foreground.answers(_PROGRAM, {**request, "folder": folder}, timeout=timeout)
    yield from (str(reason) for reason in next(said, {}).get("fallbacks", {}).values())
    yield from (Answer(**answer) for answer in said)


def prompt_row(text: str, form: Form, system: str | None = None) -> dict[str, Any]:
    """Return a prompt as a row of a data set.

    Raises:
        InputError: a system prompt was given for plain text.
    """
    if form == "text":
        if system is not None:
            raise InputError("--system needs a chat, got a prompt that is plain text; add --chat")
        return {"prompt": text}
    before = [] if system is None else [{"role": "system", "content": system}]
    return {"prompt": [*before, {"role": "user", "content": text}]}


def usual_form(workspace: Workspace, model: NamedModel) -> tuple[Form, str]:
    """Return the default form of a prompt, with the reason.

    The form is that of the model's training rows; otherwise it is `chat` if the model has a chat template.
    """
    trained = _training_data(workspace, model)
    if trained is not None:
        try:
            row = first_row(workspace, trained)
        except NotFoundError:  # the bytes of the training rows were deleted, but the model's bytes were not
            row = {}
        form: Form = "text" if isinstance(row.get("prompt", ""), str) and "messages" not in row else "chat"
        if row:
            return form, f"like the rows of {trained.name}"
    read = model_files(workspace, model.pinned, model.word if model.ref.on_disk else None, Path.cwd()).read
    templated = read("chat_template.jinja") or b'"chat_template"' in (read("tokenizer_config.json") or b"")
    return ("chat", "by the model's chat template") if templated else ("text", "the model has no chat template")


def _training_data(workspace: Workspace, model: NamedModel) -> InputRef | None:
    if model.made is None or model.made.run_id is None or model.made.stage is None:
        return None
    manifest = workspace.stores.manifest(workspace.ledger.run(model.made.run_id))
    return manifest.stage(model.made.stage).inputs.get("data")


@answers(Control.add_external)
def add_external(workspace: Workspace, uri: str, name: str, *, checksum: str, version: str) -> Asset:
    from posttrain.store.external import external

    place = external(uri, version)
    with scratch(workspace.root / "cache" / "scratch", "posttrain-external-") as scratched:
        return workspace.catalog.add_external(place, checksum, name, scratched)


@answers(Control.mark)
def mark(workspace: Workspace, ref: str, status: str, reason: str) -> tuple[Asset, Marked]:
    asset, ledger = workspace.catalog.find(ref), workspace.ledger
    said = recalls.set_status(workspace.stores, asset, status, reason)
    if status != recalls.RECALLED:
        return asset, Marked(said, still=recalls.recalled(ledger, [asset.digest]).get(asset.digest))
    found = {run.id: run for run in _that_may_use(workspace, asset)}
    used = {
        one: {str(ref.digest) for stage in workspace.stores.manifest(run).stages for ref in stage.inputs.values()}
        for one, run in found.items()
    }
    histories = {one: history for one in ledger.channels() if (history := ledger.history(one))}
    served = {entry.model_digest for history in histories.values() for entry in history}
    barred = recalls.recalled(ledger, served.union(*used.values())).keys()
    runs = tuple(one for one, digests in used.items() if digests & barred)
    return asset, Marked(
        said,
        runs,
        tuple(one for one in runs if not is_final("run", found[one].state)),
        tuple(
            (one, _before(history, barred))
            for one, history in histories.items()
            if (live := ledger.channel(one)) and live.model_digest in barred
        ),
    )


def _that_may_use(workspace: Workspace, asset: Asset) -> Iterator[RunRecord]:
    """Yield the runs that used the asset's bytes, and every unfinished run.

    The inputs that an unfinished run has not used yet are recorded only in its manifest.
    """
    yield from (workspace.ledger.run(one) for one in of_bytes(workspace.ledger, asset.digest).runs)
    for state in RunState:
        if not is_final("run", state):
            yield from workspace.ledger.runs(state=state)


def _before(history: list[ReleaseEntry], barred: Collection[str]) -> int | None:
    """Return the number of the newest release to which a channel may be rolled back."""
    return next((entry.sequence for entry in reversed(moves(history)) if entry.model_digest not in barred), None)


@answers(Control.import_trl_output)
def import_trl_output(workspace: Workspace, folder: Path, name: str | None) -> imports.Imported:
    """Register the output of a TRL or transformers trainer in its `output_dir`.

    Raises:
        InputError: there is no such run, or the folder contains nothing usable.
        WorkspaceError: the workspace cannot be written.
    """
    return _imported(workspace, read_trl_output(folder), name)


@answers(Control.import_mlflow)
def import_mlflow(workspace: Workspace, where: str, run: str | None, name: str | None) -> imports.Imported:
    """Register a run from an MLflow store, or a client's copy of such a run.

    Raises:
        InputError: there is no such run, the run contains nothing usable, or mlflow is not installed.
        WorkspaceError: the workspace cannot be written.
    """
    if is_confined():  # the client has read the store and sent a copy
        return _imported(workspace, carried(Path(where)), name)
    from posttrain.foreign.mlflow_run import read_mlflow

    return _imported(workspace, read_mlflow(where, run), name)


def what_was_read(control: Control, folder: Path, name: str | None) -> dict[str, Any]:
    """Return the arguments of `import_mlflow` for a client's copy of an MLflow run."""
    return {"where": str(folder), "run": None, "name": name}


@answers(Control.import_wandb_export)
def import_wandb_export(workspace: Workspace, folder: Path, name: str | None) -> imports.Imported:
    """Register the files of a W&B run.

    Raises:
        InputError: there is no such run, the files contain nothing usable, or wandb is needed and not installed.
        WorkspaceError: the workspace cannot be written.
    """
    from posttrain.foreign.wandb_export import read_wandb_export

    return _imported(workspace, read_wandb_export(folder), name)


@answers(Control.curves)
def curves(workspace: Workspace, ref: str) -> list[imports.Curve]:
    """Return the metrics of an imported run.

    Raises:
        InputError: the ref is not a history.
        NotFoundError: the history's bytes are missing.
        IntegrityError: the history's bytes are corrupt.
    """
    history = workspace.catalog.find(ref)
    if history.kind != "history":
        raise InputError(
            f"{history.ref}: must be a history, got a {history.kind}; posttrain asset ls history lists the histories"
        )
    return list(imports.curves(workspace.blobs.get(history.digest)))


def _imported(workspace: Workspace, found: OutsideRun, name: str | None) -> imports.Imported:
    return imports.import_run(workspace.catalog, workspace.blobs, workspace.root / "cache", found, name)
