"""`.ci/lanes.py`, which is no package, as a module."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

_FILE = Path(__file__).resolve().parents[1] / ".ci" / "lanes.py"
_SPEC = importlib.util.spec_from_file_location("lanes", _FILE)
assert _SPEC is not None
assert _SPEC.loader is not None
ci = importlib.util.module_from_spec(_SPEC)
sys.modules[_SPEC.name] = ci  # a dataclass looks its module up
_SPEC.loader.exec_module(ci)
