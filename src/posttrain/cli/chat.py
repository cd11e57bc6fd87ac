"""The command `chat`: a conversation with one served model, or with two side by side."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain.cli.console import Output, OutputOption, aside, console, digest, emit_json, harmless, lazily, say
from posttrain.cli.models import DeviceOption, DtypeOption, MaxNewTokens, ThreadsOption
from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.ids import PROJECT_VARIABLE, SERVER_VARIABLE

if TYPE_CHECKING:
    from posttrain.client.chats import Message, Talker

_EMPTY = "(empty answer)"


def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]",
            autocompletion=lazily("models"),
            help="Channel, run or ref; with --url, its name in requests.",
        ),
    ] = None,
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Messages; default: ask for them.")
    ] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="Ask two models, and show both answers side by side.")
    ] = None,
    url: Annotated[str | None, typer.Option(help="Talk to the served model at this address.")] = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = None,
    max_new_tokens: MaxNewTokens = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the sampling; default: a new one.")] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = 1,
    output: OutputOption = Output.TEXT,
) -> None:
    """Talk to a model, or to two side by side.

    The command talks to the server of the channel if one runs on this machine, and otherwise starts one for the
    conversation. The key of a server at another address is read from POSTTRAIN_KEY.
    """
    if sum(map(bool, (compare, url, model and not compare and not url))) != 1:
        raise InputError(
            "chat: name a model, two models with --compare A B, or an address with --url; got several or none"
        )
    words = [*([model] if compare and model else []), *(messages or ())]
    if any(not word.strip() for word in words):
        raise InputError("chat: a message must have text, got an empty one; write it, or leave it out")
    from posttrain.client.chats import KEY, Talker

    given = {"temperature": temperature, "max_tokens": max_new_tokens, "seed": seed}
    turns: list[Turn] = []
    with ExitStack() as stack:
        runtime = ["--device", device, "--dtype", dtype, "--threads", str(threads)]
        names: Sequence[str] = () if url else compare or [str(model)]
        talkers = [_talker(stack, name, runtime) for name in names]
        if url:
            talkers = [Talker(url.rstrip("/").removesuffix("/v1"), os.environ.get(KEY, ""), model or "")]
        talks = [Talk(one, system, given) for one in talkers]
        for text in words or _typed(output is Output.TEXT):
            if output is Output.TEXT:
                _show(talks, text)
            else:
                turns += [talk.ask(text) for talk in talks]
            silent = [name for name, talk in zip(names, talks, strict=False) if talk.silent]
            names = () if silent else names  # said once
            for name in silent:
                aside(f"note: if {name} was trained on plain text, not on messages: posttrain sample {name} PROMPT")
    if output is Output.JSON:
        emit_json([asdict(one) for one in turns])


def _talker(stack: ExitStack, name: str, runtime: list[str]) -> Talker:
    """Return the server of a channel on this machine, or one that runs until the stack closes."""
    from posttrain.app.workspace import find_workspace
    from posttrain.client.chats import running, started
    from posttrain.domain.records import DEFAULT_PROJECT

    if not os.environ.get(SERVER_VARIABLE):
        project = os.environ.get(PROJECT_VARIABLE) or DEFAULT_PROJECT
        if found := running(find_workspace(), project, name):
            aside(f"{name} is served at {found.url}")
            return found
    aside(f"loading {name}")
    talker = stack.enter_context(started(name, runtime))
    aside(f"{name} is {talker.release} {digest(talker.digest)}")
    return talker


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and a model's answer to it."""

    model: str
    digest: str
    message: str
    answer: str
    finish_reason: str  # stop, or length if a limit cut it off
    tokens: int  # of the answer


class Talk:
    """A conversation with one model."""

    def __init__(self, talker: Talker, system: str | None, sampling: Mapping[str, Any]) -> None:
        self._talker, self._sampling = talker, sampling
        self.silent = False  # whether the last answer was empty
        self._messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def title(self) -> str:
        """The model's name, and what answered last."""
        return f"{self._talker.name} {digest(self._talker.digest)}".strip()

    def pieces(self, message: str) -> Iterator[str]:
        """Yield the answer to a message as it arrives; afterwards, both belong to the conversation."""
        asked: Message = {"role": "user", "content": message}
        said = ""
        for piece in self._talker.answer([*self._messages, asked], **self._sampling):
            said += piece
            yield piece
        self._messages += [asked, {"role": "assistant", "content": said}]
        self.silent = not said

    def ask(self, message: str) -> Turn:
        """Return the whole answer to a message."""
        answer = "".join(self.pieces(message))
        talker = self._talker
        return Turn(talker.name, talker.digest, message, answer, talker.finish_reason, talker.tokens)


def _typed(prompts: bool) -> Iterator[str]:
    """Yield the lines of standard input, until its end."""
    if sys.stdin is None:
        raise InputError("chat: standard input is closed; give the message as an argument")
    asks = prompts and sys.stdin.isatty()
    if asks:
        aside("one message a line; Ctrl-D ends the conversation")
    while True:
        if asks:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def _show(talks: Sequence[Talk], message: str) -> None:
    """Print the answers to a message: one as it arrives, two in columns as they arrive on a terminal."""
    if len(talks) == 1:
        empty = True
        for piece in talks[0].pieces(message):
            typer.echo(harmless(piece), nl=False)
            sys.stdout.flush()
            empty = empty and not piece
        typer.echo(_EMPTY if empty else "")
    elif sys.stdout.isatty():
        _side_by_side(talks, message)
    else:
        for talk in talks:
            said = talk.ask(message)
            say(f"── {talk.title}", said.answer or _EMPTY, quoted=True)


def _side_by_side(talks: Sequence[Talk], message: str) -> None:
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    said, errors = [""] * len(talks), list[PosttrainError]()

    def listen(place: int) -> None:
        try:
            for piece in talks[place].pieces(message):
                said[place] += piece
        except PosttrainError as error:
            errors.append(error)

    def table() -> Table:
        drawn = Table(box=None, expand=True, header_style="dim", padding=(0, 1))
        for talk in talks:
            drawn.add_column(talk.title, ratio=1)
        drawn.add_row(*(Text(harmless(one)) for one in said))
        return drawn

    threads = [threading.Thread(target=listen, args=(place,)) for place in range(len(talks))]
    with Live(get_renderable=table, console=console(), refresh_per_second=8) as live:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        said = [one or _EMPTY for one in said] if not errors else said
        live.refresh()
    if errors:
        raise errors[0]
