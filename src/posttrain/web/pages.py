"""The base of all pages, and the model card of an exported model.

A page is one self-contained file of limited size. The file contains styles and pictures, but no script and no external
reference; a content-security policy in the page forbids both. The template engine escapes all text from a run.

The card describes the model, how it was made and how it was evaluated, in Markdown with the front matter that model
hubs read.
"""

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from posttrain.domain.errors import WorkspaceError
from posttrain.domain.gates import Verdict

MOST_BYTES = 2_000_000  # maximum bytes of a page, for a run of any size
_TONES = {
    **dict.fromkeys(("succeeded", "pass", "live", "promoted"), "good"),
    **dict.fromkeys(("failed", "rejected", "fail", "error", "lost"), "bad"),
    **dict.fromkeys(("stopped", "stopping", "inconclusive", "skipped"), "warn"),
}
_ESCAPED = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#~"})


@dataclass(frozen=True, slots=True)
class Sizes:
    """The limits of a page's contents."""

    points: int  # points of a line
    panels: int  # panels of all stages together
    samples: int  # responses in one list
    text: int  # characters of a prompt or response
    rows: int  # rows of a table
    value: int = 400  # characters of a parameter or a lineage line


# limits that are tried one after the other until the page is small enough
SIZES = (
    Sizes(points=240, panels=240, samples=16, text=1_200, rows=300),
    Sizes(points=120, panels=200, samples=12, text=800, rows=200),
    Sizes(points=60, panels=120, samples=6, text=400, rows=120, value=200),
    Sizes(points=24, panels=40, samples=3, text=160, rows=60, value=120),
    Sizes(points=24, panels=8, samples=1, text=80, rows=20, value=80),
)


def fitted(render: Callable[[Sizes], str], most: int = MOST_BYTES) -> str:
    """Return the page with the first entry of `SIZES` that limits it to `most` bytes, or else with the last entry."""
    text = ""
    for sizes in SIZES:
        text = render(sizes)
        if len(text.encode("utf-8", "replace")) <= most:
            break
    return text


def write_page(path: Path, page: str | bytes, what: str) -> None:
    """Write a page or a picture atomically; until then, concurrent readers get the previous file.

    Args:
        what: the file's name in errors.

    Raises:
        WorkspaceError: `path` cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write at the same time
    try:
        # a lone surrogate in a response must not fail the report
        partial.write_bytes(page if isinstance(page, bytes) else page.encode("utf-8", "replace"))
        os.replace(partial, path)
    except OSError as error:
        raise WorkspaceError(f"{what}: cannot write {path}: {error.strerror}; choose another path") from error


@functools.cache
def template(name: str) -> Template:
    """Return a page's template, which is read only once, since the file may change while a driver runs for days."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        # the card is not HTML: its text from a run is escaped by `plain`, or is in a block of code
        autoescape=name.endswith(".html"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown = {one.__name__: one for one in (number, duration, tone, brief, volume, excerpt, ago, moment, plain, code)}
    environment.filters.update(shown, figure=lambda value: f"{value:.4g}")
    return environment.get_template(name)


def number(value: float | None, signed: bool = False) -> str:
    """Return a number with four significant digits and separated thousands, or a dash for None."""
    if value is None:
        return "–"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):+,}" if signed else f"{int(value):,}"
    return f"{value:+.4g}" if signed else f"{value:.4g}"


def duration(seconds: float | None) -> str:
    """Format seconds as `4.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if seconds is None:
        return "–"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def brief(seconds: float) -> str:
    """Format seconds as `320 µs`, `41 ms`, `2.5 s` or `3 min 20 s`."""
    if seconds >= 1:
        return duration(seconds)
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} µs"


def ago(seconds: float) -> str:
    """Format seconds that have passed as `just now`, `4 minutes ago` or `in 2 hours`."""
    passed = abs(seconds)
    for word, scale in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(passed // scale)
        if count:
            said = f"{count} {word}{'s' if count > 1 else ''}"
            return f"{said} ago" if seconds > 0 else f"in {said}"
    return "just now" if seconds > -1 else "in a moment"


def moment(at: float) -> str:
    """Format a time in UTC by ISO 8601; "" for an invalid time."""
    try:
        return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return ""


def volume(size: float) -> str:
    """Format bytes as `812 B` or `3.2 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size:.0f} B"


def tone(state: str) -> str:
    """Return the colour class for a state or outcome; its name is always shown in addition to the colour."""
    return _TONES.get(str(state), "calm")


def excerpt(text: str, most: int) -> str:
    """Return a text's first characters, and how many are omitted; invisible and direction marks become visible."""
    plain = "".join(_visible(one) for one in text[:most])
    return plain if len(text) <= most else f"{plain} … ({len(text) - most:,} more characters)"


def _visible(character: str) -> str:
    code = ord(character)
    if code < 0x20 and character not in "\t\n":
        return chr(0x2400 + code)
    hidden = 0x7F <= code < 0xA0 or 0x200E <= code <= 0x200F or 0x202A <= code <= 0x202E or 0x2066 <= code <= 0x2069
    return "\ufffd" if hidden or 0xD800 <= code < 0xE000 or code == 0x061C else character


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage that trained the model."""

    name: str
    kind: str
    inputs: tuple[tuple[str, str, str], ...]  # slot, name, digest
    params: tuple[tuple[str, str], ...]  # the settings, as written in the manifest
    tokens: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """A result from an evaluation of the card's model."""

    stage: str
    metric: str  # suite/name
    value: float
    data: str = ""  # the suite's data set


@dataclass(frozen=True, slots=True)
class ModelCard:
    """The contents of the card."""

    title: str
    digest: str  # the digest of the model in the workspace
    dtype: str
    cast: bool  # whether the export converted the weights
    made: str  # run/stage
    release: str  # such as "prod, release 3"; "" if the model was not released
    manifest: str  # digest
    base: str  # the name of the base model; "" if it was randomly initialised
    seed: int
    stages: tuple[StageLine, ...]
    scores: tuple[ScoreLine, ...]
    gates: tuple[Verdict, ...]
    lineage: tuple[str, ...]  # lines of an indented tree
    version: str  # the version of Posttrain
    state: str = "succeeded"  # the state of the run
    chosen: str = ""  # "probe/accuracy 0.91 at step 40" for the best model by the stage's probe; "" for the last model
    regressions: tuple[str, ...] = ()  # a line for each metric that is significantly worse than before
    judge: bool = False  # whether the model is a reward model: a sequence classifier with one label
    adapter_of: str = ""  # the base of an adapter, with its digest; "" for a whole model
    form: str = ""  # of a model with an adapter: adapter, or merged

    @property
    def front_matter(self) -> str:
        """YAML for model hubs: library, task, base model, results."""
        kinds = sorted({stage.kind for stage in self.stages})
        task = "text-classification" if self.judge else "text-generation"
        library = "peft" if self.form == "adapter" else "transformers"
        head: dict[str, Any] = {"library_name": library, "pipeline_tag": task}
        head["tags"] = ["posttrain", *(kind.replace("_", "-") for kind in kinds)]
        if self.base.startswith("hf:"):
            head["base_model"] = self.base.removeprefix("hf:").partition("@")[0]
        if self.scores:
            results = [
                {
                    "task": {"type": task},
                    "dataset": {"name": score.data or score.metric.partition("/")[0], "type": "local"},
                    "metrics": [{"type": score.metric.rpartition("/")[2], "name": score.metric, "value": score.value}],
                }
                for score in self.scores
                if math.isfinite(score.value)
            ]
            head["model-index"] = [{"name": self.title, "results": results}]
        return yaml.safe_dump(head, sort_keys=False, allow_unicode=True)


def render_card(card: ModelCard) -> str:
    """Return the card as Markdown; the same card gives the same text."""
    return template("card.md").render(card=card)


def plain(text: str) -> str:
    """Return a text on one line with all markup escaped."""
    return " ".join(str(text).split()).translate(_ESCAPED)


def code(text: str) -> str:
    """Return a text as one line for a fenced code block, with fences replaced, so the text cannot end the block."""
    return " ".join(str(text).split("\n")).replace("```", "'''")
