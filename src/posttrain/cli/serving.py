"""Commands that serve a model and talk to it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from posttrain.cli.console import say
from posttrain.cli.models import DeviceOption, DtypeOption, ModelArgument, ThreadsOption
from posttrain.domain.errors import InputError
from posttrain.domain.ids import SERVER_VARIABLE


def serve_model(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free one.")] = 8470,
    name: Annotated[str, typer.Option(help="Name of the model in requests; default: the channel or the ref.")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option("--adapter", metavar="NAME=MODEL", help="Further adapter of the model's base; repeatable."),
    ] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Callers need a key: see posttrain token issue.")] = False,
    concurrency: Annotated[int, typer.Option(min=1, help="Responses that are computed at a time.")] = 256,
    queue: Annotated[int, typer.Option(min=0, help="Requests that may wait; others get status 429.")] = 1024,
    context: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of a prompt with its response; default: the model's.")
    ] = None,
    kv_cache: Annotated[
        float | None,
        typer.Option(min=0.001, help="Maximum GiB of keys and values of each model; default: half of the free memory."),
    ] = None,
    drain: Annotated[int, typer.Option(min=0, help="Seconds for requests in progress after SIGTERM.")] = 60,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    threads: ThreadsOption = 1,
    tls_certificate: Annotated[Path | None, typer.Option(help="TLS certificate: PEM file.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Private key of the certificate: PEM file.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="A proxy in front of the server terminates TLS.")
    ] = False,
    log_format: Annotated[str, typer.Option(help="json or text; default: text on a terminal, else json.")] = "",
    log_level: Annotated[str, typer.Option(help="Lowest level: debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over an OpenAI-compatible API.

    The server of a channel follows it: it loads each new release beside the old one, and answers with it from the next
    request on.
    """
    from posttrain.app.control import open_here

    try:
        from posttrain.server.logs import Logging
        from posttrain.server.service import Bind
        from posttrain.serving.app import Limits
        from posttrain.serving.service import Serving, serve_model
    except ModuleNotFoundError as error:
        raise InputError(
            f"serve-model needs the extra `server` ({error.name} is missing): pip install -e '.[server]' -c "
            "constraints.txt"
        ) from error
    if os.environ.get(SERVER_VARIABLE):
        raise InputError("serve-model: reads the workspace's folder, got a server; run it on a host of the workspace")
    limits = Limits(concurrency, queue, context or Limits().context)
    runtime = {"device": device, "dtype": dtype, "threads": threads}
    bind = Bind(host, port, tls_certificate, tls_key, behind_proxy)
    named, form = _adapters(adapter or ()), Logging(log_format, log_level)
    cache = None if kv_cache is None else int(kv_cache * 2**30)
    how = Serving(bind, limits, runtime, cache, name=name, adapters=named, keys=keys, drain=drain, log=form)
    with closing(open_here()) as workspace:
        serve_model(workspace, model, how, _say_now)


def _adapters(words: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for word in words:
        name, mark, model = word.partition("=")
        if not (name and mark and model) or name in found:
            raise InputError(f"serve-model: --adapter must be NAME=MODEL with a new name, got {word!r}; change it")
        found[name] = model
    return found


def _say_now(line: str) -> None:
    """Print a line and flush it, so that a reader of a pipe gets it immediately."""
    say(line)
    sys.stdout.flush()
