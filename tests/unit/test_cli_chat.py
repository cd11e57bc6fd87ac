"""What `posttrain chat` prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.chat import Talk, _show, _side_by_side
from posttrain.cli.main import app


class Silent:
    """A model that ends its answer at once, or after one word."""

    name, digest, finish_reason, tokens = "prod", "sha256:0", "stop", 1

    def __init__(self, *pieces: str) -> None:
        self._pieces = pieces

    def answer(self, messages: Any, **sampling: Any) -> Iterator[str]:
        yield from self._pieces


@pytest.mark.parametrize("pieces", [(), ("",)])
def test_an_empty_answer_is_named(capsys: pytest.CaptureFixture[str], pieces: tuple[str, ...]) -> None:
    _show([Talk(Silent(*pieces), None, {})], "hi")  # type: ignore[arg-type]
    assert capsys.readouterr().out == "(empty answer)\n"
    _show([Talk(Silent("yes"), None, {}), Talk(Silent(*pieces), None, {})], "hi")  # type: ignore[arg-type]
    told = capsys.readouterr().out
    assert "yes" in told
    assert told.count("(empty answer)") == 1
    _side_by_side([Talk(Silent("yes"), None, {}), Talk(Silent(*pieces), None, {})], "hi")  # type: ignore[arg-type]
    assert capsys.readouterr().out.count("(empty answer)") == 1


def test_a_model_that_does_not_answer_messages_is_perhaps_one_of_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"prod": Silent(), "other": Silent("yes")}
    monkeypatch.setattr("posttrain.cli.chat._talker", lambda stack, name, runtime: answers[name])
    done = CliRunner().invoke(app, ["chat", "--compare", "other", "prod", "one", "two"])
    assert done.exit_code == 0
    notes = [line for line in done.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: if prod was trained on plain text, not on messages: posttrain sample prod PROMPT",
    ]
