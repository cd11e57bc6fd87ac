"""Talking to served models on the console: with and without its script, side by side, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from console_bench import ATTACK, CHANNEL, Browser, ConsoleWorld, console_world
from stub_model import DIGEST, KEY, StubModel, stub_model
from test_server_console import Elements

from posttrain.domain.ids import Role
from posttrain.workspace.served import Served, announce_model

HOME = "/projects/default"
PLACE = f"{HOME}/channels/prod/chat"
LINES = {"accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("chat")) as made:
        yield made


@pytest.fixture
def viewer(world: ConsoleWorld) -> Browser:
    """A person who may only read."""
    browser = Browser(world.bench)
    browser.log_in(world.bench.person("vic", Role.VIEWER))
    return browser


@pytest.fixture
def model(world: ConsoleWorld) -> Iterator[StubModel]:
    """A served model of two channels."""
    with stub_model() as made:
        root = world.bench.workspace.root
        conceal = [announce_model(root, "default", name, Served(made.url, KEY)) for name in ("prod", CHANNEL)]
        yield made
        for one in conceal:
            one()


def sent(browser: Browser, message: str, **fields: str) -> dict[str, str]:
    return {"form_token": browser.token(f"{HOME}/channels"), "message": message, **fields}


def test_an_answer_comes_in_lines_and_nothing_of_it_is_markup(viewer: Browser, model: StubModel) -> None:
    history = [{"role": "user", "content": "before"}, {"role": "assistant", "content": ATTACK}]
    answer = viewer.post(PLACE, sent(viewer, ATTACK, history0=json.dumps(history)), **LINES)
    assert (answer.status, answer.headers["content-type"]) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in answer.body.splitlines()]
    assert lines == [{"text": ATTACK}, {"text": " / "}, {"text": ATTACK}, {"digest": DIGEST}]
    assert model.asked[-1]["messages"] == [*history, {"role": "user", "content": ATTACK}]
    whole = viewer.post(PLACE, sent(viewer, ATTACK, history0=json.dumps(history), other=CHANNEL)).body.decode()
    assert whole.count("__pwned") > 9
    assert Elements(whole).found == []
    assert len(model.asked) == 3, "each of the two channels once"


def test_what_is_wrong_is_one_line(viewer: Browser, model: StubModel, world: ConsoleWorld) -> None:
    def lines(**fields: Any) -> tuple[int, str]:
        answer = viewer.post(PLACE, sent(viewer, "hi", **fields), **LINES)
        return answer.status, answer.body.decode()

    model.breaks = True
    assert "ended while it answered" in json.loads(lines()[1].splitlines()[-1])["error"]
    model.breaks = False
    for bad in (
        "{",
        "[1]",
        '[{"role": "system", "content": "x"}]',
        json.dumps([{"role": "user", "content": "x" * 50_000}]),
    ):
        assert lines(history0=bad)[0] == 422, bad
    assert "role must be user or assistant" in lines(history0='[{"role": "system", "content": "x"}]')[1]
    assert viewer.post(PLACE, sent(viewer, "  "), **LINES).status == 422
    assert viewer.post(PLACE, {"message": "hi"}, **LINES).status == 403, "a form of another page"
    assert viewer.post(f"{HOME}/channels/nosuch/chat", sent(viewer, "hi"), **LINES).status == 422
    announce_model(world.bench.workspace.root, "default", "prod", Served(model.url, "another key"))
    assert "wrong key" in json.loads(lines()[1])["error"]
    asked = len(model.asked)
    assert Browser(world.bench).post(PLACE, {"form_token": "0" * 64, "message": "hi"}, **LINES).status in (
        303,
        401,
        403,
    )
    assert len(model.asked) == asked


def test_a_channel_that_is_not_served_says_how_it_is(viewer: Browser) -> None:
    assert "posttrain serve-model prod" in viewer.get(PLACE).body.decode()
    assert viewer.post(PLACE, sent(viewer, "hi"), **LINES).status == 422
    assert viewer.get(f"{HOME}/channels/{quote(CHANNEL)}/chat?other=prod").status == 200
    assert viewer.get(f"{HOME}/channels/prod/chat?other=nosuch").status == 404
