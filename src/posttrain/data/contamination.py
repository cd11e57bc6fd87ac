"""Whether evaluation rows were seen in training: a score on such rows says nothing about the task."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.rows import prompt_text
from posttrain.domain.errors import InputError


@dataclass(frozen=True, slots=True)
class ContaminationReport:
    """Evaluation rows that training data gives away. Row numbers count from 1.

    Example: `ContaminationReport(rows=600, exact=(17,), similar=(), ngram=None)`
    """

    rows: int  # evaluation rows looked at
    exact: tuple[int, ...]  # the same prompt stands in the training data
    similar: tuple[int, ...]  # not the same, but most of its n-grams do
    ngram: int | None  # words per n-gram; None: only equal prompts were looked for

    @property
    def share(self) -> float:
        """Share of evaluation rows given away."""
        return (len(self.exact) + len(self.similar)) / self.rows

    def __str__(self) -> str:
        method = "equal prompts" if self.ngram is None else f"equal prompts and {self.ngram}-gram overlap"
        found = len(self.exact) + len(self.similar)
        first = f", first row {min(self.exact + self.similar)}" if found else ""
        return f"{found} of {self.rows} evaluation rows are in the training data ({method}){first}"


def contamination(
    train: Iterable[Mapping[str, Any]],
    evaluation: Sequence[Mapping[str, Any]],
    *,
    ngram: int | None = None,
    overlap: float = 0.5,
) -> ContaminationReport:
    """Compare prompts of canonical rows.

    Args:
        ngram: also flag rows that share n-grams of this many words (13 is usual); rows shorter than that are compared
        whole. overlap: share of a row's n-grams that must stand in the training data to flag it, in (0, 1].

    Raises:
        InputError: no evaluation rows, or a parameter out of range.
    """
    if not evaluation:
        raise InputError("contamination needs evaluation rows, got 0")
    if ngram is not None and ngram < 1:
        raise InputError(f"ngram must be >= 1 word, got {ngram}")
    if not 0 < overlap <= 1:
        raise InputError(f"overlap must be in (0, 1], got {overlap}")
    prompts = [_words(row) for row in train]
    whole = set(prompts)
    known = {gram for words in prompts for gram in _ngrams(words, ngram)} if ngram else set()
    exact, similar = [], []
    for number, row in enumerate(evaluation, start=1):
        words = _words(row)
        if words in whole:
            exact.append(number)
            continue
        grams = list(_ngrams(words, ngram)) if ngram else []
        if grams and sum(gram in known for gram in grams) / len(grams) >= overlap:
            similar.append(number)
    return ContaminationReport(len(evaluation), tuple(exact), tuple(similar), ngram)


def _words(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(prompt_text(row).lower().split())


def _ngrams(words: tuple[str, ...], length: int) -> Iterator[tuple[str, ...]]:
    return (words[i : i + length] for i in range(len(words) - length + 1))
