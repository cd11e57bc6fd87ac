"""What can be said of a data set before it is registered: one look at each row, of which one is in memory."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from posttrain.data.files import file_format
from posttrain.data.parts import data_files
from posttrain.data.rows import each_row, has_answer, prompt_text
from posttrain.domain.canonical import digest_bytes, digest_json

_TELL = 10_000  # rows between two words of how many were looked at


def inspect_dataset(
    data: Path | Mapping[str, Path], *, name: str = "", progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """`{"rows", "columns", "format", "files", "prompts", "prompts_digest", "answers", "characters"}` of a data set.

    `format` is as `data.files.file_format` says, several sorted with a blank; `files` counts them. `prompts` counts
    distinct prompts, `answers` rows with an answer that a response can be compared with, `characters` is
    {min, mean, max} of prompt lengths.

    Args:
        data: a file, a folder or a pattern (`data.parts`), or files by name.
        progress: is told how many rows were looked at; no more than one of them is in memory.

    Raises:
        NotFoundError: no such file.
        InputError: no rows, a malformed line (`file:line`) or row; not one data set.
    """
    files = data if isinstance(data, Mapping) else data_files(data)
    rows = answers = characters = longest = 0
    shortest, columns, prompts = sys.maxsize, set[str](), set[str]()
    for _, row in each_row(files, name=name):
        text = prompt_text(row)
        rows, answers, characters = rows + 1, answers + has_answer(row), characters + len(text)
        shortest, longest = min(shortest, len(text)), max(longest, len(text))
        columns |= row.keys()
        prompts |= prompt_digests([text])
        if rows % _TELL == 0:
            progress(f"{rows} rows")
    return {
        "rows": rows,
        "columns": sorted(columns),
        "format": " ".join(sorted({file_format(path) for path in files.values()})),
        "files": len(files),
        "prompts": len(prompts),
        "prompts_digest": digest_json(sorted(prompts)),
        "answers": answers,
        "characters": {"min": shortest, "mean": round(characters / rows, 1), "max": longest},
    }


def prompt_digests(texts: Iterable[str]) -> frozenset[str]:
    """Digests of prompts, blanks at the ends ignored: equal digests are the same task."""
    return frozenset(digest_bytes(text.strip().encode()) for text in texts)
