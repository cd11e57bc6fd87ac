"""Command `trace`: how a run spent its time, and the history of its recorded samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from posttrain.cli.console import (
    Output,
    OutputOption,
    answer_json,
    aside,
    console,
    count,
    excerpt,
    number,
    open_control,
    plain_table,
    say,
    tinted,
)
from posttrain.cli.drive import RunArgument
from posttrain.domain.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from posttrain.api.values import RecordedSample, StageTimeline, WrittenTrace

_EXCERPT = 60  # maximum characters of a response in a list
_TOLD = 0.0005  # the smallest share of a step at which a hand-off is listed


def trace(
    run: RunArgument,
    sample: Annotated[str | None, typer.Option(metavar="ID", help="Show one recorded sample, token by token.")] = None,
    samples: Annotated[bool, typer.Option("--samples", help="List the recorded samples.")] = False,
    step: Annotated[int | None, typer.Option(min=0, help="With --samples: only this step, counted from 0.")] = None,
    stage: Annotated[str | None, typer.Option(help="Only this stage.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of the files; default: here.")] = None,
    output: OutputOption = Output.TEXT,
) -> None:
    """Write the timeline of a run, or show its recorded samples.

    The timeline shows how each role spent its time. `--samples` and `--sample` show the history of recorded samples.
    """
    _check(sample, samples, step, out)
    control = open_control()
    run_id = control.run(run).id
    if sample is not None:
        _show_sample(control.sample(run_id, sample, stage), output)
    elif samples:
        _show_samples(run_id, control.samples(run_id, stage, step, lambda line: aside(f"left out: {line}")), output)
    else:
        _show_written(control.write_trace(run_id, stage, out or Path()), output)


def _check(sample: str | None, samples: bool, step: int | None, out: Path | None) -> None:
    if sample is not None and samples:
        raise InputError(
            f"trace: --sample {sample} shows one sample and --samples lists all samples; leave one of the options out"
        )
    if step is not None and not samples:
        raise InputError(f"trace: --step {step} needs --samples; add --samples")
    if out is not None and (sample is not None or samples):
        raise InputError(
            f"trace: --out {out} writes files and cannot be combined with an option that prints; leave one of them out"
        )


def _show_written(written: WrittenTrace, output: Output) -> None:
    answer_json(output, written.to_json)
    screen = console()
    for stage in written.stages:
        again = f" ({stage.redone} more were repeated because an attempt was lost)" if stage.redone else ""
        say(f"{stage.stage}: {len(stage.steps) - stage.redone} steps in {_time(stage.seconds)}{again}")
        screen.print(role_table(stage))
        say(*_step_lines(stage))
        say("")
    say(*(f"note:   {line}" for line in written.begun))
    say(*(f"left out: {note}" for note in written.notes))
    say(f"page:   {written.page}", f"trace:  {written.trace} (open it in ui.perfetto.dev or chrome://tracing)")
    if written.samples:
        say(f"next:   posttrain trace {written.run_id} --samples lists {written.samples} recorded samples")


def role_table(stage: StageTimeline) -> Table:
    """Return how long each role was busy and how long it waited."""
    numbers = ("ranks", "busy", "idle", "idle share", "calls", "sent", "returned", "imbalance")
    table = plain_table("role", "pool", *numbers, right=numbers)
    for role in stage.roles:
        table.add_row(
            role.role,
            role.pool or "-",
            str(len(role.ranks)),
            _time(role.busy),
            _time(role.idle),
            f"{role.idle_share:.1%}",
            str(role.calls),
            f"{count(role.bytes_out)}B",
            f"{count(role.bytes_in)}B",
            f"{role.imbalance_mean:.2f} (max {role.imbalance_max:.2f})",
        )
    return table


def _step_lines(stage: StageTimeline) -> Iterator[str]:
    told = sorted(((name, share) for name, share in stage.phases.items() if share >= _TOLD), key=lambda it: -it[1])
    shares = ", ".join(f"{name} {share:.1%}" for name, share in told)
    yield f"a step's time: {shares} (medians)"
    slow = ", ".join(f"step {step.step} {_time(step.seconds)}" for step in stage.slowest(3))
    typical = stage.typical()
    if typical is not None:
        yield f"slowest: {slow}; median {_time(typical.seconds)}"


def _show_samples(run_id: str, samples: Sequence[RecordedSample], output: Output) -> None:
    answer_json(
        output,
        lambda: {
            "run": run_id,
            "samples": [
                {
                    "stage": one.stage,
                    "attempt": one.attempt,
                    "id": one.sample.id,
                    "step": one.sample.step,
                    "reward": one.sample.reward,
                    "status": one.sample.status,
                    "fate": one.sample.fate,
                    "tokens": len(one.sample.tokens),
                    "response": one.sample.response,
                }
                for one in samples
            ],
        },
    )
    if not samples:
        say("no sample was recorded; `trace: {groups: 1}` in a stage that samples records the first group of each step")
        return
    table = plain_table("stage", "sample", "reward", "status", "tokens", "fate", right=("reward", "tokens"))
    table.add_column("response")
    for one in samples:
        it = one.sample
        words = (
            one.stage,
            it.id,
            number(it.reward),
            it.status,
            str(len(it.tokens)),
            it.fate,
            excerpt(it.response, _EXCERPT),
        )
        table.add_row(*(tinted(word) for word in words))
    console().print(table)
    say(f"next:   posttrain trace {run_id} --sample {samples[0].sample.id}")


def _show_sample(one: RecordedSample, output: Output) -> None:
    answer_json(output, one.to_json)
    it = one.sample
    components = ", ".join(f"{name} {number(value)}" for name, value in it.components.items())
    reward = f"{number(it.reward)} ({it.status})" + (f": {components}" if components else "")
    cut = ", cut at the token limit" if it.truncated else ""
    warmth = "" if it.temperature is None else f", at temperature {it.temperature:g}"
    say(
        f"sample:   {it.id} of stage {one.stage}, attempt {one.attempt}, step {it.step}",
        f"prompt:   {it.prompt!r} ({len(it.prompt_tokens)} tokens)",
        f"response: {it.response!r} ({len(it.tokens)} tokens{cut})",
        f"version:  {', '.join(it.versions)} sampled it (incarnation.step){warmth}",
        f"reward:   {reward}",
        f"fate:     {it.fate}",
        quoted=True,
    )
    console().print(token_table(one))


def token_table(one: RecordedSample) -> Table:
    """Return one row per response token, with a column for each recorded value."""
    it = one.sample
    columns: list[tuple[str, Sequence[str]]] = [("id", [str(token) for token in it.tokens])]
    if one.pieces:
        columns.insert(0, ("token", [repr(piece) for piece in one.pieces]))
    numbers = [
        ("logp sampled", it.behaviour_logprobs),
        ("logp at update", it.logprobs),
        ("ratio", it.ratios),
        ("advantage", it.advantages),
        ("logp reference", it.reference_logprobs),
        ("value", it.values),
        ("earned", it.earned),
        ("return", it.returns),
    ]
    seen = it.observed or [False] * len(it.tokens)
    columns += [
        (title, ["" if place < len(seen) and seen[place] else number(value) for place, value in enumerate(values)])
        for title, values in numbers
        if len(values)
    ]
    if any(seen):
        columns.append(("policy", ["observed" if one else "" for one in seen]))
    if len(it.clipped):
        columns.append(("clipped", ["yes" if clipped else "" for clipped in it.clipped]))
    table = plain_table()
    table.add_column("", justify="right", style="dim")
    for title, _ in columns:
        table.add_column(title, justify="left" if title in ("token", "clipped", "policy") else "right", no_wrap=True)
    for place in range(len(it.tokens)):
        cells = [tinted(values[place]) if place < len(values) else tinted("-") for _, values in columns]
        table.add_row(str(place), *cells)
    return table


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g}ms"
    return f"{seconds:.3g}s" if seconds < 100 else f"{seconds / 60:.3g}min"
