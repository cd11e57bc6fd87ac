"""The model card of an exported model: what it is, how it was made, what it was judged by. Markdown with the front
matter that model hubs read.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from posttrain.domain.gates import Verdict

_ESCAPED = str.maketrans({char: f"\\{char}" for char in "\\`*_{}[]<>|#~"})


@dataclass(frozen=True, slots=True)
class StageLine:
    """A stage that the model went through."""

    name: str
    kind: str
    inputs: tuple[tuple[str, str, str], ...]  # slot, name, digest
    params: tuple[tuple[str, str], ...]  # the settings, as written in the manifest
    tokens: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class ScoreLine:
    """What an evaluation measured of this very model."""

    stage: str
    metric: str  # suite/name
    value: float
    data: str = ""  # the suite's data set


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Everything the card says."""

    title: str
    digest: str  # of the model as the workspace holds it
    dtype: str
    cast: bool  # the weights were converted on the way out
    made: str  # run/stage
    release: str  # "prod, release 3"; empty: not released
    manifest: str  # digest
    base: str  # of the first model; empty: made from nothing
    seed: int
    stages: tuple[StageLine, ...]
    scores: tuple[ScoreLine, ...]
    gates: tuple[Verdict, ...]
    lineage: tuple[str, ...]  # lines of an indented tree
    version: str  # of Posttrain
    state: str = "succeeded"  # of the run
    chosen: str = ""  # "probe/accuracy 0.91 at step 40": the best model by the stage's probe; empty: the last one
    regressions: tuple[str, ...] = ()  # a line for each metric that is significantly worse than before
    judge: bool = False  # a reward model: a sequence classifier of one label

    @property
    def front_matter(self) -> str:
        """YAML that hubs read: library, task, base model, results."""
        kinds = sorted({stage.kind for stage in self.stages})
        task = "text-classification" if self.judge else "text-generation"
        head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
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
    """The card as Markdown; the same card gives the same text."""
    return _template().render(card=card)


@functools.cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=False,  # it is no HTML; what comes from a run goes through `plain` or into a block of code
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(plain=plain, code=code, figure=lambda value: f"{value:.4g}")
    return environment.get_template("card.md")


def plain(text: str) -> str:
    """Text on one line in which nothing is markup."""
    return " ".join(str(text).split()).translate(_ESCAPED)


def code(text: str) -> str:
    """A line of a block of code, which no text can close."""
    return " ".join(str(text).split("\n")).replace("```", "'''")
