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

_KEY = "POSTTRAIN_KEY"


def chat(
    model: Annotated[
        str | None, typer.Argument(metavar="[MODEL]", autocompletion=lazily("models"), help="Channel, run or ref.")
    ] = None,
    messages: Annotated[
        list[str] | None, typer.Argument(metavar="[MESSAGE]...", help="Messages to send; default: ask for them.")
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
    words = [model, *(messages or ())] if compare or url else list(messages or ())
    asked = [str(word) for word in words if word is not None]
    names = compare or ([model] if model and not url else [])
    if not (names or url) or (compare and url):
        raise InputError("chat: name a model, two models with --compare A B, or an address with --url")
    from posttrain.client.chats import Talker

    given = {"temperature": temperature, "max_tokens": max_new_tokens, "seed": seed}
    with ExitStack() as stack:
        runtime = ["--device", device, "--dtype", dtype, "--threads", str(threads)]
        talkers = [_talker(stack, name, runtime) for name in names]
        if url:
            talkers.append(Talker(url.rstrip("/").removesuffix("/v1"), os.environ.get(_KEY, ""), "served"))
        talks = [Talk(one, system, given) for one in talkers]
        for text in asked or _typed(output is Output.TEXT):
            if output is Output.TEXT:
                _show(talks, text)
            else:
                emit_json([asdict(talk.ask(text)) for talk in talks])


def _talker(stack: ExitStack, name: str, runtime: list[str]) -> Talker:
    """Return the server of a channel on this machine, or one that runs until the stack closes."""
    from posttrain.app.workspace import find_workspace
    from posttrain.client.chats import Talker, started
    from posttrain.domain.records import DEFAULT_PROJECT
    from posttrain.workspace.served import model_at

    if not os.environ.get(SERVER_VARIABLE):
        project = os.environ.get(PROJECT_VARIABLE) or DEFAULT_PROJECT
        if found := model_at(find_workspace(), project, name):
            return Talker(found.url, found.key, name)
    aside(f"loading {name}")
    return stack.enter_context(started(name, runtime))


@dataclass(frozen=True, slots=True)
class Turn:
    """A message and a model's answer to it."""

    model: str
    digest: str
    message: str
    answer: str


class Talk:
    """A conversation with one model."""

    def __init__(self, talker: Talker, system: str | None, sampling: Mapping[str, Any]) -> None:
        self._talker, self._sampling = talker, sampling
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

    def ask(self, message: str) -> Turn:
        """Return the whole answer to a message."""
        answer = "".join(self.pieces(message))
        return Turn(self._talker.name, self._talker.digest, message, answer)


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
        for piece in talks[0].pieces(message):
            typer.echo(harmless(piece), nl=False)
            sys.stdout.flush()
        typer.echo()
    elif sys.stdout.isatty():
        _side_by_side(talks, message)
    else:
        for talk in talks:
            said = talk.ask(message)
            say(f"── {talk.title}", said.answer, quoted=True)


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
        live.refresh()
    if errors:
        raise errors[0]
