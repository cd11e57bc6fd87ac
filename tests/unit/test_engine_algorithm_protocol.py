"""The algorithms of the field fit the protocol: a type checker reads their stubs, and refuses what does not fit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STUBS = Path(__file__).with_name("algorithm_stubs.py")
ROOT = STUBS.parents[2]
WRONG = [  # what it is, right, wrong
    ("a need that nobody has", '"teacher", "topk", wide=64)', '"teacher", "logits", wide=64)'),
    ("an update without an objective", 'Update("policy", RightAnswers, mini_batches=4)', 'Update("policy")'),
    ("a verdict that is none", 'return Drop("all rewards are equal") if', 'return "all rewards are equal" if'),
    ("credit that is no batch", "return batch.with_document_columns(reference_point=point", "return (point"),
    (
        "documents of nobody",
        "return TokenBatch.pack([sample.last.document for sample in pairs], unit=2)",
        "return pairs",
    ),
]


def checked(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    (folder / "stubs.py").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]  # which says strict
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), str(folder / "stubs.py")]  # that of `make types`
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.slow
def test_the_field_fits_and_what_does_not_is_refused(tmp_path: Path) -> None:
    text = STUBS.read_text(encoding="utf-8")
    right = checked(tmp_path, text)
    assert right.returncode == 0, right.stdout
    for name, good, bad in WRONG:
        assert text.count(good) == 1, name
        assert checked(tmp_path, text.replace(good, bad)).returncode == 1, name
