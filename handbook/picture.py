"""The picture of the concepts: one column, which stays readable on a phone.

It is inline SVG with the page's colours, so it follows the page's dark mode.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

_WIDTH, _PAD, _LINE = 400, 12, 18
_STAGES = 122  # height of the drawing of a run's stages


def page() -> str:
    """Return the figure as HTML without empty lines, which would end it in Markdown."""
    parts: list[str] = []
    top = 4
    for title, lines, arrow, kind in _STORY:
        drawing = _STAGES if title == _RUN else 0
        height = _PAD + _LINE * (1 + len(lines)) + 8 + drawing
        parts += _box(top, height, title, lines, kind, drawing)
        if drawing:
            parts += _stages(top + 30)
        top += height
        if arrow:
            parts += _arrow(top, arrow)
            top += 46
    drawn = "\n".join(parts)
    return (
        f'<figure class="picture">\n<svg viewBox="0 0 {_WIDTH} {top + 4}" role="img" aria-labelledby="picture-title">\n'
        f'<title id="picture-title">From run.yaml to a released model</title>\n{_STYLE}\n{drawn}\n</svg>\n</figure>'
    )


_STYLE = (
    "<style>"
    ".picture text{font:14px var(--font-stack,sans-serif);fill:var(--color-foreground-primary)}"
    ".picture .title{font-weight:700}"
    ".picture .said{fill:var(--color-foreground-secondary)}"
    ".picture .name{text-anchor:middle}"
    ".picture .small{font-size:13px}"
    ".picture rect{fill:var(--color-background-secondary);stroke:var(--color-foreground-border);stroke-width:1.5}"
    ".picture rect.stage{fill:var(--color-background-primary)}"
    ".picture rect.kept{stroke-dasharray:5 3}"
    ".picture rect.live{stroke:var(--color-brand-primary);stroke-width:2.5}"
    ".picture path{stroke:var(--color-foreground-secondary);stroke-width:1.5;fill:none}"
    "</style>"
)
# title, lines, label of the arrow to the next box, frame
_RUN = "run: stages, in the order of their inputs"
_STORY: list[tuple[str, list[str], str, str]] = [
    (
        "run.yaml, and assets it names",
        ["assets: base model, data sets, reward functions", "stages, gates, budget, the channel to release to"],
        "plan: checked; every word becomes a digest",
        "",
    ),
    (
        "manifest",
        ["immutable; its digest is the run's identity"],
        "run: recorded and driven; again: attached",
        "",
    ),
    (
        _RUN,
        [
            "A stage is computed by attempts: one job each,",
            "in a folder of its own (facts, checkpoints).",
            "A lost job is followed by one that goes on from",
            "the newest checkpoint. Equal stages are reused.",
        ],
        "every gate PASS: compare-and-set",
        "",
    ),
    (
        "channel: prod",
        [
            "points at one model; each move is a release",
            "rollback moves it back to the one before",
            "sample, eval and export read what it points at",
        ],
        "every step leaves its record",
        "live",
    ),
    (
        "workspace: .posttrain/",
        [
            "ledger: runs, stages, attempts, releases; events",
            "chained by hash",
            "blobs: models, data, rewards, results by digest",
            "lineage leads from weights to prompts; verify",
            "hashes all of it again",
        ],
        "",
        "kept",
    ),
]


def _box(top: int, height: int, title: str, lines: list[str], kind: str, drawing: int) -> Iterator[str]:
    yield f'<rect class="{kind}" x="4" y="{top}" width="{_WIDTH - 8}" height="{height}" rx="8"/>'
    yield _text(_PAD + 4, top + _PAD + 9, title, "title")
    for number, line in enumerate(lines, start=1):
        yield _text(_PAD + 4, top + _PAD + 9 + drawing + number * _LINE, line, "said")


def _stages(top: int) -> Iterator[str]:
    """Draw sft → grpo → evaluate, the channel's model → baseline, both → gate → release."""
    places = {"sft": (16, 0, 52), "grpo": (92, 0, 58), "evaluate": (174, 0, 82), "baseline": (174, 44, 82)}
    places |= {"gate": (310, 22, 74), "release": (310, 76, 74)}
    for name, (x, y, width) in places.items():
        yield f'<rect class="stage" x="{x}" y="{top + y}" width="{width}" height="30" rx="5"/>'
        yield f'<text class="name" x="{x + width / 2:g}" y="{top + y + 20}">{name}</text>'
    yield _text(16, top + 64, "channel's model", "said small")
    lines = [
        "M 68 15 H 90",
        "M 150 15 H 172",
        "M 124 59 H 172",
        "M 256 15 H 284 V 32 H 308",
        "M 256 59 H 284 V 42 H 308",
    ]
    yield from (_to_the_right(top, line) for line in lines)
    yield f'<path d="M 347 {top + 52} V {top + 74} m -4 -7 l 4 7 l 4 -7"/>'
    yield _text(192, top + 96, "if all gates pass:", "said small")


def _to_the_right(top: int, line: str) -> str:
    """Return a line that ends in an arrow's head; its heights are relative to `top`."""
    words = line.split()
    heights = {number for number, word in enumerate(words) if number and (words[number - 1] == "V" or number == 2)}
    moved = [str(int(word) + top) if number in heights else word for number, word in enumerate(words)]
    return f'<path d="{" ".join(moved)} m -7 -4 l 7 4 l -7 4"/>'


def _arrow(top: int, said: str) -> Iterator[str]:
    middle = 28
    yield f'<path d="M {middle} {top + 2} V {top + 41} m -5 -8 l 5 8 l 5 -8"/>'
    yield _text(middle + 16, top + 27, said, "said")


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>'
