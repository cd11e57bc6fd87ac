"""The trace page: offline, escaped, and showing both a typical and the slowest step."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.jobs import Sample, Span
from posttrain.telemetry.timeline import AttemptSpans
from posttrain.web.pages import brief, volume
from posttrain.web.report import TracePage, render_trace_page, trace_page

EPOCH = 1_700_000_000.0


def spans(steps: int, slow: int | None = None, ranks: int = 2) -> list[Span]:
    said = []
    at = EPOCH
    for step in range(steps):
        seconds = 4.0 if step == slow else 1.0
        busy = [[rank, at + 0.1, seconds - 0.2] for rank in range(ranks)]
        said.append(
            Span(
                "rollout.generate",
                step,
                at,
                seconds,
                {"kind": "call", "role": "rollout", "method": "generate", "pool": "main", "ranks": busy}
                | {"bytes_out": 2000, "bytes_in": 5_000_000, "imbalance": 1.25},
            )
        )
        said += [Span("rollout", step, at, seconds), Span("update", step, at + seconds, 0.5)]
        at += seconds + 0.5
    return said


def page(said: list[Span], *samples: Sample) -> TracePage:
    return TracePage("sort-1234", "sort", "succeeded", [AttemptSpans("grpo", 1, said)], samples)


def sample(name: str, response: str) -> Sample:
    return Sample(
        id=name,
        step=0,
        prompt="Q",
        response=response,
        prompt_tokens=[1],
        tokens=[2, 3],
        behaviour_logprobs=[-0.1, -0.2],
        truncated=False,
        versions=["0.0"],
        reward=None,
        fate="dropped: no score",
        status="none",
    )


class _Strict(HTMLParser):
    """Every tag closes where it should."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "rect", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("rect", "line"):
            assert self.open.pop() == tag


@pytest.mark.parametrize("said", [[], spans(1), spans(5, slow=3), spans(1000, slow=3)], ids=len)
def test_the_page_is_well_formed_offline_and_small(said: list[Span]) -> None:
    text = render_trace_page(page(said, sample("0.1.2", "x")))
    parser = _Strict()
    parser.feed(text)
    assert parser.open == []
    assert "default-src 'none'" in text
    assert not re.search(r"<script|https?://|url\(", text)
    assert len(text) < 300_000


def test_roles_and_two_steps_are_shown() -> None:
    text = render_trace_page(page(spans(5, slow=3)))
    for words in (
        "grpo: Typical step: 2, 1.5 s",
        "grpo: Slowest step: 3, 4.5 s",
        "rollout · rank 1",
        "25 MB",
        "1.25",
    ):
        assert words in text
    assert text.count("as a Gantt chart") == 2
    assert render_trace_page(page(spans(1))).count("as a Gantt chart") == 1


def test_a_step_that_few_have_is_told_with_how_many() -> None:
    said = [*spans(4), Span("checkpoint", 2, EPOCH + 4.5, 0.25)]
    assert "250 ms (in 1 of 4 steps)" in render_trace_page(page(said))


def test_many_ranks_are_left_to_the_trace_file() -> None:
    text = render_trace_page(page(spans(1, ranks=40)))
    assert "rollout · rank 15" in text
    assert "rollout · rank 16<" not in text
    assert "24 more ranks" in text


def test_what_a_run_says_is_escaped() -> None:
    text = render_trace_page(page([Span("<b>update", 0, EPOCH, 1.0)], sample("0.0.0", "<script>alert(1)</script>")))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "<b>" not in text


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkspaceError, match=r"trace: cannot write .*missing"):
        trace_page(tmp_path / "missing" / "a.html", page(spans(1)))


def test_numbers_are_short() -> None:
    assert [brief(s) for s in (0.0, 4.2e-5, 0.041, 2.51, 200.0)] == ["0 ms", "42 µs", "41 ms", "2.5 s", "3 min 20 s"]
    assert [volume(size) for size in (0, 812, 3_210_000, 4.1e9)] == ["0 B", "812 B", "3.21 MB", "4.1 GB"]
