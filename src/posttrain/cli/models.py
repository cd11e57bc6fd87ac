"""Commands `sample`, `eval` and `export`, which sample from, measure and export a model of the workspace."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from posttrain.cli import drive
from posttrain.cli.console import Output, OutputOption, answer_json, aside, digest, emit_json, lazily, open_control, say
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from posttrain.api.control import Control
    from posttrain.api.values import Answer, Submitted

ModelArgument = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=lazily("models"),
        help="Channel (prod, prod@3), run or its stage (sort, sort/sft), or ref: model:NAME, hf:ORG/NAME@COMMIT.",
    ),
]
DeviceOption = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device.")]
DtypeOption = Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Type of the weights.")]
ThreadsOption = Annotated[int, typer.Option(min=1, help="Number of CPU threads.")]
MaxNewTokens = Annotated[
    int | None, typer.Option(min=1, help="Maximum tokens of a response; default: 256, or the context's limit.")
]
SuitesArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="SUITE...",
        help="dataset:NAME or a file; its rows need answers unless --reward scores.",
        autocompletion=lazily("datasets"),
    ),
]
PassAt = Annotated[list[int] | None, typer.Option("--pass-at", help="k of pass@k, at most --samples; repeatable.")]
Extract = Annotated[str | None, typer.Option(help="Regular expression; group 1 of its last match is the answer.")]
TopKOption = Annotated[int | None, typer.Option(help="Sampling draws among the k most likely tokens.")]
TopPOption = Annotated[
    float | None, typer.Option(help="Sampling draws among the most likely tokens with this total probability.")
]
MinPOption = Annotated[
    float | None, typer.Option(help="Sampling draws among tokens with at least this share of the highest probability.")
]
StopOption = Annotated[list[str] | None, typer.Option("--stop", help="Text that ends a response; repeatable.")]
RewardOption = Annotated[
    str | None,
    typer.Option(
        help="Reward that scores every response: reward:NAME, a Python file or MODULE:FUNCTION. Rows need no answer."
    ),
]
Entry = Annotated[str | None, typer.Option(help="Reward: name of the function, or FILE.py:FUNCTION.")]
Dialect = Annotated[str | None, typer.Option(help="Reward: calling convention; default: detected from its parameters.")]
RewardSecret = Annotated[
    list[str] | None,
    typer.Option("--secret", metavar="NAME", help="Reward: environment variable that the reward gets; repeatable."),
]
RewardNetwork = Annotated[
    list[str] | None,
    typer.Option("--network", metavar="HOST:PORT", help="Reward: host that it may connect to; repeatable."),
]
RewardRange = Annotated[
    tuple[float, float] | None,
    typer.Option(metavar="LOW HIGH", help="Lowest and highest valid score; default: 0 1. Another score is an error."),
]
RewardTimeout = Annotated[float | None, typer.Option(help="Reward: seconds for one batch of responses; default: 10.")]
SampleTemperature = Annotated[
    float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 0 for one response, 1 for several.")
]
_STDIN = "-"


def sample(
    model: ModelArgument,
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Prompts; - reads a prompt from stdin.")],
    samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Responses per prompt.")] = 1,
    temperature: SampleTemperature = None,
    max_new_tokens: MaxNewTokens = None,
    stop: StopOption = None,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--text", help="Send the prompt as a user's message or as plain text; default: as in training."
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the prompt.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = 1,
    timeout: drive.TimeoutOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Sample responses from a model.

    The command records nothing. Equal calls return equal responses on the same device.
    """
    warmth = temperature if temperature is not None else float(samples > 1)
    if _STDIN in prompts and sys.stdin is None:
        raise InputError("sample: - reads standard input, which is closed; give the prompt")
    texts = [sys.stdin.read().rstrip("\n") if text == _STDIN else text for text in prompts]
    asked = open_control().ask(
        model,
        texts,
        samples=samples,
        max_new_tokens=max_new_tokens,
        temperature=warmth,
        seed=seed,
        runtime={"device": device, "dtype": dtype, "threads": threads},
        timeout=timeout,
        chat=chat,
        system=system,
        stop=stop or (),
        **_given(top_k=top_k, top_p=top_p, min_p=min_p),
    )
    aside(f"{asked.name} {digest(asked.digest)}, prompted as {asked.form} ({asked.why}); loading the model")
    answers: list[Answer] = []
    for found in asked.answers:
        if isinstance(found, str):
            aside(f"warning: {found}")
            continue
        answers.append(found)
        if output is Output.TEXT:
            _show(texts, found, many=samples > 1 or len(texts) > 1)
    if output is Output.JSON:
        said = [{**asdict(answer), "prompt": texts[answer.prompt], "prompt_index": answer.prompt} for answer in answers]
        emit_json({"model": asked.name, "digest": asked.digest, "form": asked.form, "answers": said})


def _progress(model: str, folder: Path) -> Callable[[str], None]:
    """Return a function that announces the copy at the first file, after all checks, and on a terminal every file."""
    begins = [f"copying {model} to {folder} and verifying the hash of every file"]

    def tell(file: str) -> None:
        if begins:
            aside(begins.pop())
        if sys.stderr.isatty():
            aside(f"  {file}")

    return tell


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM raise SystemExit in the block, so that the block removes incomplete files as after an error."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _show(texts: list[str], answer: Answer, *, many: bool) -> None:
    if many and answer.sample == 0:
        say(f"── {' '.join(texts[answer.prompt].split())[:100]}", quoted=True)
    say(answer.text + (f" … (cut at {answer.tokens} tokens)" if answer.truncated else ""), quoted=True)


def evaluate(
    model: ModelArgument,
    suites: SuitesArgument,
    max_new_tokens: MaxNewTokens = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=0, help="Sampled responses in addition to the greedy one.")
    ] = 0,
    temperature: Annotated[float, typer.Option(help="Temperature of the sampled responses.")] = 1.0,
    top_k: TopKOption = None,
    top_p: TopPOption = None,
    min_p: MinPOption = None,
    stop: StopOption = None,
    pass_at: PassAt = None,
    extract: Extract = None,
    reward: RewardOption = None,
    entry: Entry = None,
    dialect: Dialect = None,
    secret: RewardSecret = None,
    network: RewardNetwork = None,
    reward_range: RewardRange = None,
    reward_timeout: RewardTimeout = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling.")] = 0,
    again: Annotated[bool, typer.Option("--again", help="Repeat a measurement that was made before.")] = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = 1,
    timeout: drive.TimeoutOption = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Measure a model on data sets, without a run file.

    The measurement is a run with one stage, which `get`, `why` and `compare` show.
    """
    settings = {"max_new_tokens": max_new_tokens, "samples": samples, "temperature": temperature} | _given(
        pass_at=pass_at or None,
        reward_range=list(reward_range) if reward_range is not None else None,
        extract=extract,
        reward_timeout=reward_timeout,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=stop,
    )
    judge = _judge(reward, _given(entry=entry, dialect=dialect, secret=secret, network=network))
    runtime = {"device": device, "dtype": dtype, "threads": threads}
    control = open_control()
    aside(f"planning to measure {model} on {', '.join(suites)}")
    found = control.evaluate(model, suites, settings=settings, runtime=runtime, reward=judge, seed=seed, again=again)
    if output is Output.JSON:
        _measured_json(control, found, timeout)
        return
    drive.greet(found, again=" (--again repeats it)")
    if max_new_tokens is None:
        suite = next(iter(control.manifest(found.run.id).stages[0].params["suites"].values()))
        say(f"responses of at most {suite['max_new_tokens']} tokens; --max-new-tokens sets another limit")
    drive.drive(control, found.run.id, timeout, f"posttrain attach {found.run.id}", output)


def _given(**options: Any) -> dict[str, Any]:
    """Return the options that the caller gave."""
    return {name: value for name, value in options.items() if value is not None}


def _judge(reward: str | None, called: dict[str, Any]) -> dict[str, Any] | None:
    """Return the reward that scores the responses, with the options for calling it."""
    if reward is None and called:
        raise InputError(f"eval: --{min(called)} needs a reward, got none; name one with --reward")
    given = {"secrets" if name == "secret" else name: value for name, value in called.items()}
    return {"ref": reward, **given} if reward is not None else None


def _measured_json(control: Control, found: Submitted, timeout: float | None) -> None:
    aside(*(f"warning: {warning}" for warning in found.warnings))
    aside(f"run {found.run.id}; posttrain get {found.run.id} --watch shows its progress")
    record = control.drive(found.run.id, timeout=timeout)
    status = control.status(record.id)
    if status.outcome:
        raise status.outcome
    measured = control.manifest(record.id).stages[0].inputs["model"]
    emit_json(
        {
            "run": record.id,
            "state": record.state,
            "attached": found.attached,
            "model": measured.name,
            "digest": measured.digest,
            "scores": status.metrics,
            "intervals": control.scores(status.run.id).to_json(),
        }
    )


def export(
    model: ModelArgument,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty folder.")],
    dtype: Annotated[
        str | None, typer.Option(help="Convert the weights to float32, bfloat16 or float16; default: no conversion.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the model's adapter alone, for peft.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Add the model's adapter to its base.")] = False,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write a model as a Hugging Face folder.

    The folder contains the weights, the tokenizer, the generation config, and a model card with the model's lineage.
    """
    if adapter and merged:
        raise InputError("export: --adapter and --merged exclude each other, got both; choose one")
    form = "adapter" if adapter else "merged" if merged else None
    if str(folder) in ("", "."):
        raise InputError(f"export: DIR must be the path of a new folder, got {str(folder)!r}; name a new folder")
    control = open_control()
    with _ended_by_sigterm():
        done = control.export(model, folder, dtype=dtype, form=form, progress=_progress(model, folder))
    recall = control.recalled(done.digest).get(done.digest)
    if recall:
        aside(f"warning: the model comes from {recall.kind}:{recall.name}@{recall.version}, {recall.words}")
    answer_json(output, lambda: asdict(done))
    how = "merged, " if merged else ""
    how += f"converted to {done.dtype}" if done.cast else done.dtype if merged else f"{done.dtype}, byte for byte"
    say(f"{done.name} {digest(done.digest)}: {len(done.files)} files, {done.bytes / 2**20:.1f} MiB, {how}")
    say(f"  {done.folder}", *(["  README.md describes its training and evaluation"] if done.card else []))
    if adapter:
        say(f"  an adapter of {done.base}: posttrain export {done.base} BASE writes its base")
    say(f"next:   {done.opened_by}.from_pretrained({'base, ' if adapter else ''}{str(folder)!r})")
