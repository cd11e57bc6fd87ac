"""Whether evaluation rows were seen in training: a score on such rows says nothing about the task.

Three kinds, told apart: the same prompt; the same but for case and blanks, which is another task where case counts; and
near-duplicates, a large part of whose n-grams of words stand in one training prompt. N-grams that many prompts share
are the template of a task, not the task: they do not count. Rows that are nothing but a common template are not found,
nor are short ones.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.data.rows import prompt_text
from posttrain.domain.errors import InputError

NGRAM, OVERLAP = 5, 0.7
MOST_NGRAMS = 2_000_000  # looked at in one comparison: five seconds of one core
_LEAST = 8  # counted n-grams of a row that is compared
_SHARED, _SHARED_LEAST, _SHARED_MOST = 20, 3, 20  # template: in more than 1/20 of the prompts, at least 3, at most 20
_WORD = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class ContaminationReport:
    """Evaluation rows that training data gives away. Row numbers count from 1.

    Example: `ContaminationReport(rows=600, exact=(17,), alike=(), similar=(23,), ngram=5, overlap=0.7, left=0)`
    """

    rows: int  # evaluation rows looked at
    exact: tuple[int, ...]  # the same prompt stands in the training data
    alike: tuple[int, ...]  # the same but for case and blanks
    similar: tuple[int, ...]  # neither, but a near-duplicate
    ngram: int | None  # words and signs per n-gram; None: near-duplicates were not looked for
    overlap: float  # share of a row's counted n-grams in one training prompt
    left: int = 0  # prompts that were not compared for near-duplicates: too many

    @property
    def found(self) -> int:
        """Rows given away."""
        return len(self.exact) + len(self.alike) + len(self.similar)

    @property
    def share(self) -> float:
        """Share of evaluation rows given away."""
        return self.found / self.rows

    def __str__(self) -> str:
        near = f"near-duplicate{'' if len(self.similar) == 1 else 's'}"
        near += f" ({self.overlap:.0%} of {self.ngram}-grams in one prompt)"
        parts = [(self.exact, "equal"), (self.alike, "equal but for case and blanks"), (self.similar, near)]
        told = ", ".join(f"{len(rows)} {word}, first row {rows[0]}" for rows, word in parts if rows)
        left = f"; {self.left} prompts were not looked at for near-duplicates" if self.left else ""
        return f"{self.found} of {self.rows} evaluation rows are in the training data{': ' if told else ''}{told}{left}"


def contamination(
    train: Iterable[Mapping[str, Any]],
    evaluation: Sequence[Mapping[str, Any]],
    *,
    ngram: int | None = NGRAM,
    overlap: float = OVERLAP,
    most: int = MOST_NGRAMS,
) -> ContaminationReport:
    """Compare prompts of canonical rows.

    Args:
        ngram: words per n-gram; None: do not look for near-duplicates.
        overlap: share of a row's counted n-grams that must stand in one training prompt to flag it, in (0, 1].
        most: n-grams to look at; rows beyond are compared for equality only.

    Raises:
        InputError: no evaluation rows, or a parameter out of range.
    """
    if not evaluation:
        raise InputError("contamination needs evaluation rows, got 0")
    if ngram is not None and ngram < 1:
        raise InputError(f"ngram must be >= 1 word, got {ngram}")
    if not 0 < overlap <= 1:
        raise InputError(f"overlap must be in (0, 1], got {overlap}")
    known = {prompt_text(row).strip() for row in train}
    folded = {_folded(text): text for text in sorted(known)}
    exact, alike, others = [], [], defaultdict(list)
    for number, row in enumerate(evaluation, start=1):
        text = prompt_text(row).strip()
        if text in known:
            exact.append(number)
        elif _folded(text) in folded:
            alike.append(number)
        else:
            others[_folded(text)].append(number)
    similar, left = _near(list(folded.values()), others, ngram, overlap, most) if ngram else (set(), 0)
    near = sorted(number for text in similar for number in others[text])
    return ContaminationReport(len(evaluation), tuple(exact), tuple(alike), tuple(near), ngram, overlap, left)


def _folded(text: str) -> str:
    """Prompts that differ in case and blanks only are folded alike."""
    return " ".join(text.casefold().split())


def _near(
    known: Collection[str], asked: Collection[str], ngram: int, overlap: float, most: int
) -> tuple[set[str], int]:
    """Those of `asked` that are near-duplicates of one of `known`, and how many prompts were left out."""
    asked_grams = dict(_grams(asked, ngram, most // 2))
    index: dict[int, list[str]] = defaultdict(list)  # n-gram → prompts asked
    for text, grams in asked_grams.items():
        for gram in grams:
            index[gram].append(text)
    rest = most - sum(map(len, asked_grams.values()))
    hits = [grams & index.keys() for _, grams in _grams(known if index else [], ngram, rest)]
    frequency = Counter(gram for grams in hits for gram in grams)
    within, among = _shared(len(hits)), _shared(len(asked_grams))
    telling = {gram for gram, texts in index.items() if frequency[gram] <= within and len(texts) <= among}
    counted = Counter(text for gram in telling for text in index[gram])
    found = set()
    for grams in hits:
        common = Counter(text for gram in grams & telling for text in index[gram])
        found |= {text for text, n in common.items() if counted[text] >= _LEAST and n / counted[text] >= overlap}
    return found, len(asked) - len(asked_grams) + (len(known) - len(hits) if index else 0)


def _shared(prompts: int) -> int:
    """In how many prompts an n-gram may stand before it is their template."""
    return min(max(prompts // _SHARED, _SHARED_LEAST), _SHARED_MOST)


def _grams(texts: Iterable[str], length: int, most: int) -> Iterator[tuple[str, set[int]]]:
    """The n-grams of one text after the other, until there would be more than so many."""
    for text in texts:
        grams = _ngrams(text, length)
        most -= len(grams)
        if most < 0:
            return
        yield text, grams


def _ngrams(text: str, length: int) -> set[int]:
    words = _WORD.findall(text.casefold())
    return set(map(hash, _runs(words, length)))


def _runs(words: list[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(words[i:] for i in range(length)), strict=False)
