"""What holds for every test: one thread before torch is imported, and no clock in property tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from hypothesis import settings

settings.register_profile("posttrain", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("posttrain")
