"""Tests here use what the end-to-end and the contract tests have."""

import sys
from pathlib import Path

for folder in ("e2e", "contract"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / folder))
