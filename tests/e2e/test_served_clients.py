"""Clients of a served model: a thousand at a time, clients that are slow, and a conversation with its template."""

from __future__ import annotations

import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from own_models import TINY, with_models
from safetensors.torch import load_file, save_file
from served_model import ServedModel, children, serving
from transformers import AutoTokenizer
from workbench import PATIENCE, Workbench

from posttrain.server.connections import raise_files

pytestmark = pytest.mark.slow
MANY, COUNT = 1000, 1024  # requests at a time, and responses of a long one
SHORT: dict[str, Any] = {"prompt": "Q", "temperature": 0, "max_tokens": 4, "ignore_eos": True}
WHOLE: dict[str, Any] = {"prompt": "Q", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
TEMPLATE = """{% for tool in tools or [] %}({{ tool.function.name }}){% endfor %}{% for m in messages -%}
{% if m.role == 'tool' %}{{ raise_exception('no tool may\n\nspeak here') }}{% endif %}{{ m.content }}{% endfor %}"""
# `posttrain` with other seconds for a client to send a request, and to read a piece of an answer
PROGRAM = """#!{python}
import sys
import posttrain.server.connections, posttrain.serving.app
posttrain.server.connections.HEADER_SECONDS = posttrain.serving.app._PATIENCE = {seconds}
sys.argv[1:] = sys.argv[sys.argv.index("posttrain") + 1 :]
from posttrain.cli.main import main
main()
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A workspace with two models, and a third whose template names tools and rejects their messages."""
    folder = tmp_path_factory.mktemp("clients")
    bench = with_models(folder, {"first": TINY, "second": TINY})
    for name, origin in (("one", "first"), ("two", "second")):  # larger weights, so that answers follow the prompt
        shutil.copytree(folder / origin, folder / name)
        weights = {key: 20 * tensor for key, tensor in load_file(folder / origin / "model.safetensors").items()}
        save_file(weights, folder / name / "model.safetensors", metadata={"format": "pt"})
        bench.run("asset", "add", f"model:{name}", name)
    shutil.copytree(folder / "one", folder / "tools")
    tokenizer = AutoTokenizer.from_pretrained(folder / "one")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tools")
    bench.run("asset", "add", "model:tools", "tools")
    yield bench
    bench.clean()


def with_seconds(home: Workbench, seconds: int) -> Workbench:
    """The workspace; its servers wait so long for a client."""
    program = home.folder / f"posttrain-{seconds}"
    program.write_text(PROGRAM.format(python=sys.executable, seconds=seconds))
    program.chmod(0o755)
    changed = Workbench(home.folder)
    changed.python = str(program)
    changed.started = home.started
    return changed


def connected(served: ServedModel, count: int) -> list[socket.socket]:
    """Connections that the server has accepted."""
    raise_files()
    place, _, port = served.host.partition(":")
    return [socket.create_connection((place, int(port)), timeout=PATIENCE) for _ in range(count)]


def message(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: here\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data)


def answer(client: socket.socket) -> tuple[int, str | None, Any]:
    """The status of the answer, when to ask again, and the JSON."""
    found = http.client.HTTPResponse(client, method="POST")
    found.begin()
    return found.status, found.getheader("retry-after"), json.loads(found.read())


def test_a_thousand_clients_that_send_half_a_request_delay_no_other(home: Workbench) -> None:
    """Half of them stop within the headers, half within the body. Each gets its answer after the other half."""
    with serving(with_seconds(home, 3600), "model:one") as served:
        clients, asked = connected(served, MANY), message(SHORT)
        halves = [asked.index(b"host"), len(asked) - 9]
        for place, client in enumerate(clients):
            client.sendall(asked[: halves[place % 2]])
        descriptors = f"/proc/{served.process.pid}/fd"
        home.wait("all connections", lambda: len(os.listdir(descriptors)) > MANY)
        with ThreadPoolExecutor(8) as others:
            [text] = {served.texts(**SHORT)[0] for _ in others.map(lambda _: served.texts(**SHORT), range(40))}
        look = select.poll()
        for client in clients:
            look.register(client, select.POLLIN)
        assert not look.poll(0), "no client that sent half got an answer or lost its connection"
        for place, client in enumerate(clients):
            client.sendall(asked[halves[place % 2] :])
        said = {(status, found["choices"][0]["text"]) for status, _, found in map(answer, clients)}
        assert said == {(200, text)}
        assert served.end() == 0


def test_each_of_a_thousand_requests_is_answered_or_asked_to_come_again(home: Workbench) -> None:
    queue = 64
    with serving(home, "model:one", "--concurrency", "1", "--queue", str(queue)) as served:
        clients = connected(served, MANY)
        for client in clients:
            client.sendall(message(WHOLE))
        found = [(status, again) for status, again, _ in map(answer, clients)]
        assert {*found} == {(200, None), (429, "1")}
        assert found.count((200, None)) > queue, "the first one, and those that fit into the queue"
        counted = served.ask("/metrics")[2]
        for status, again in {*found}:
            number = found.count((status, again))
            assert f'requests_total{{route="/v1/completions",status="{status}"}} {number}.0' in counted
        assert "running 0.0" in counted
        assert served.texts(**SHORT)


def test_a_client_that_stops_reading_is_given_up_and_others_are_served(home: Workbench) -> None:
    with serving(with_seconds(home, 20), "model:one", "--concurrency", str(2 * COUNT)) as served:
        alone = served.texts(**WHOLE)
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        place, _, port = served.host.partition(":")
        client.connect((place, int(port)))
        client.sendall(message({**WHOLE, "n": COUNT, "stream": True}))
        assert client.recv(100).startswith(b"HTTP/1.1 200"), "the stream has begun"
        assert served.texts(**WHOLE) == alone
        ended = 'requests_total{route="/v1/completions",status="499"} 1.0'
        home.wait("its end", lambda: ended in served.ask("/metrics")[2])
        assert "running 0.0" in served.ask("/metrics")[2]
        assert served.texts(**WHOLE) == alone
        assert len(children(served.process)) == 1
        assert served.end() == 0
        client.close()


def test_requests_in_progress_are_answered_after_the_signal_to_end(home: Workbench) -> None:
    """A request on a connection that was kept alive, which comes with the signal, gets status 503."""
    with serving(home, "model:one", "--drain", "600") as served:
        kept = http.client.HTTPConnection(served.host, timeout=PATIENCE)
        kept.request("GET", "/health")
        assert kept.getresponse().read()
        late: list[Any] = []
        long = {**WHOLE, "n": COUNT}
        client = threading.Thread(target=lambda: late.append(served.ask("/v1/completions", long)))
        client.start()
        home.wait("a running request", lambda: f"running {COUNT}.0" in served.ask("/metrics")[2])
        served.process.send_signal(signal.SIGSTOP)  # so that it gets the signal and the request together
        kept.request("POST", "/v1/completions", json.dumps(SHORT).encode())
        served.process.terminate()
        served.process.send_signal(signal.SIGCONT)
        found = kept.getresponse()
        assert (found.status, found.getheader("retry-after")) == (503, "1")
        assert "shutting down" in json.loads(found.read())["error"]["message"]
        client.join()
        [(status, _, whole)] = late
        assert status == 200, whole
        assert (len(whole["choices"]), whole["usage"]["completion_tokens"]) == (COUNT, 60 * COUNT)
        assert served.process.wait(PATIENCE) == 0


@pytest.fixture(scope="module")
def tools(home: Workbench) -> Iterator[ServedModel]:
    """The model whose template names tools."""
    with serving(home, "model:tools") as served:
        yield served


def test_a_conversation_that_the_template_rejects_gets_one_line(tools: ServedModel) -> None:
    messages = [{"role": "user", "content": "Q"}, {"role": "tool", "content": "A"}]
    for more in ({}, {"stream": True}):
        status, _, found = tools.ask("/v1/chat/completions", {"messages": messages, **more})
        assert (status, found["error"]["type"]) == (400, "invalid_request_error")
        said = "messages: cannot be rendered by the model's chat template: no tool may speak here"
        assert found["error"]["message"] == said


def test_the_template_gets_the_tools_of_a_request(tools: ServedModel, home: Workbench) -> None:
    named = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("add", "sort")]
    tokenizer = AutoTokenizer.from_pretrained(home.folder / "tools")
    asked = {"messages": [{"role": "user", "content": "Q: 7"}], "max_tokens": 1, "return_token_ids": True}
    for more, prompt in (
        ({"tools": named}, "(add)(sort)Q: 7"),
        ({"tools": named, "tool_choice": "auto"}, "(add)(sort)Q: 7"),
        ({"tools": named, "tool_choice": "none"}, "Q: 7"),
        ({}, "Q: 7"),
    ):
        status, _, found = tools.ask("/v1/chat/completions", {**asked, **more})
        assert status == 200, found
        assert tokenizer.decode(found["choices"][0]["prompt_token_ids"]) == prompt
        assert found["usage"]["prompt_tokens"] == len(prompt), "a token for each character"


def test_two_models_answer_a_conversation_side_by_side(home: Workbench) -> None:
    """Every line of standard input gets the answers of both, each of which is that of `sample`."""
    names, asked = ("model:one", "model:two"), ("Q: 31", "Q: 402")
    limit = ("--max-new-tokens", "9", "--temperature", "0")
    printed = subprocess.run(
        [home.python, "-P", "-m", "posttrain", "chat", "--compare", *names, *limit], cwd=home.folder,
        env=home.variables(), input="\n\n".join(asked), capture_output=True, text=True, timeout=PATIENCE, check=True,
    ).stdout  # fmt: skip
    _, *said = re.split(r"^── (\S+) sha256:\w+\n", printed, flags=re.MULTILINE)
    assert said[::2] == [*names, *names]
    answers = [one.removesuffix("\n") for one in said[1::2]]
    assert len({*answers}) == 4, "all of them differ"
    tokenizer = AutoTokenizer.from_pretrained(home.folder / "one")
    for name, first, second in zip(names, answers[:2], answers[2:], strict=True):
        turns = [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant", "user"), (asked[0], first, asked[1]), strict=True)
        ]
        prompts = [
            tokenizer.apply_chat_template(turns[:count], tokenize=False, add_generation_prompt=True)
            for count in (1, 3)
        ]  # fmt: skip
        found = home.run("sample", name, *prompts, "--text", *limit, "-o", "json").json["answers"]
        assert [re.sub(r"<\|\w+\|>", "", one["text"]) for one in found] == [first, second]  # without special tokens
