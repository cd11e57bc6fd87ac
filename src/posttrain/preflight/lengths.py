"""How long the documents of a stage are: by the tokenizer of the model it starts from, else by their characters.

A model that the run makes from nothing has no tokenizer yet. Its own will have a token for every character, three for a
chat turn's marks and one for the end of an answer, so that is what is counted for it; of a model whose tokenizer cannot
be read here, a vocabulary of words needs a quarter of that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from posttrain.control.planning import Planned
from posttrain.data.fitting import PlanTokenizer, open_tokenizer
from posttrain.data.rows import Row
from posttrain.domain import rendering
from posttrain.domain.contracts import RowNeeds
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.kinds import kind_of
from posttrain.domain.manifest import StageManifest
from posttrain.domain.runspec import RunSpec
from posttrain.preflight.fitting import base_model, model_files
from posttrain.workspace.opened import OpenWorkspace

_LOOKED_AT = 256  # rows of one data set, evenly over it
_TURN, _BEGUN, _END = 3, 2, 1  # tokens of a chat turn's marks, of those that an answer begins after, of an answer's end


class Lengths:
    """Lengths of documents in tokens, by stage; tokenizers are opened once."""

    def __init__(self, planned: Planned, spec: RunSpec | None, workspace: OpenWorkspace, source: Path) -> None:
        self._planned, self._spec, self._workspace, self._source = planned, spec, workspace, source
        self._opened: dict[str, PlanTokenizer | None] = {}

    def counted(self, stage: StageManifest) -> bool:
        """Whether the stage's tokens are counted by its model's tokenizer."""
        return self._tokenizer(stage) is not None

    def of_rows(self, stage: StageManifest, slot: str, rows: Sequence[Row]) -> tuple[float, float] | None:
        """Tokens of one document of a data set, in the mean and at the most of those looked at: prompt and answer where
        it is learnt from, else the prompt.
        """
        needs, parts = self._planned.contracts[stage.name].rows.get(slot), kind_of(stage.kind).sizes
        if needs is None:  # of an installed kind that asks nothing of its rows
            needs = RowNeeds(learn="completion" in parts, pairs="chosen" in parts)
        tokenizer, seen = self._tokenizer(stage), rows[:: max(1, len(rows) // _LOOKED_AT)]
        found = [length for row in seen for length in _lengths(row, needs, tokenizer)]
        return (sum(found) / len(found), max(found)) if found else None

    def _tokenizer(self, stage: StageManifest) -> PlanTokenizer | None:
        ref = base_model(self._planned.manifest, stage)
        if ref is None or ref.digest is None:
            return None
        if ref.digest not in self._opened:
            try:
                word = self._spec.model if self._spec else None
                files = model_files(self._workspace, ref, word, self._source.parent)
                self._opened[ref.digest] = open_tokenizer(files.read)
            except (InputError, NotFoundError, IntegrityError, OSError):  # whoever checks the fit says what is wrong
                self._opened[ref.digest] = None
        return self._opened[ref.digest]


def _lengths(row: Row, needs: RowNeeds, tokenizer: PlanTokenizer | None) -> Iterator[float]:
    """Of the documents that a row becomes; none where it cannot be rendered, which the check of the fit tells."""
    try:
        if tokenizer is None:
            yield from _characters(row, needs)
        elif needs.pairs:
            for prompt, chosen, rejected in rendering.pairs(tokenizer, [row], name=""):
                yield len(prompt) + (len(chosen) + len(rejected)) / 2
        elif needs.learn:
            for turns in rendering.examples(tokenizer, [row], name=""):
                yield from [len(prompt) + len(answer) for prompt, answer in turns]
        else:
            yield from map(len, rendering.prompts(tokenizer, [row], name=""))
    except Exception:  # of a template: whatever its author wrote
        return


def _characters(row: Row, needs: RowNeeds) -> Iterator[float]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if needs.pairs:
        answers = sum(_size(row.get(column)) + _END for column in ("chosen", "rejected")) / 2
        yield _size(prompt) + _begun(prompt) + answers
    elif needs.learn and (prompt is None or row.get("completion") is None) and messages is not None:
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                yield _size(messages[:at]) + _BEGUN + _size(message) + _END
    elif needs.learn:
        yield _size(prompt) + _begun(prompt) + _size(row.get("completion") or row.get("text")) + _END
    else:
        asked: Any = prompt if prompt is not None else messages
        yield _size(asked) + _begun(asked)


def _begun(prompt: Any) -> int:
    return 0 if prompt is None or isinstance(prompt, str) else _BEGUN


def _size(value: Any) -> int:
    """Characters of a text or of messages, whose turns have marks; an answer's own are counted by whoever asks."""
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return len(str(value.get("content") or ""))
    answer = len(value) == 1 and value[0].get("role") == "assistant"
    return sum(len(str(message.get("content") or "")) + (0 if answer else _TURN) for message in value)
