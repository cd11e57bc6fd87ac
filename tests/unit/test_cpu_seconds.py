"""A fast test that takes too many CPU seconds fails, its processes' included; a slow one may take them."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest_plugins = ("pytester",)
TESTS = """
    import subprocess, sys, pytest
    BURN = "import time\\nwhile time.process_time() < 0.5: pass"

    def test_light(): pass

    def test_heavy(): exec(BURN.replace("0.5", f"{__import__('time').process_time() + 0.5}"))

    def test_heavy_child(): subprocess.run([sys.executable, "-c", BURN], check=True)

    @getattr(pytest.mark, "slow")
    def test_slow(): subprocess.run([sys.executable, "-c", BURN], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("pace", [1, 4])
def test_what_takes_too_much_fails_and_what_is_slow_may(pytester: pytest.Pytester, pace: int) -> None:
    """On a processor that is four times slower, nothing here takes too much."""
    pytester.makeconftest(
        f"""
        import cpu_seconds
        from cpu_seconds import CpuSeconds

        cpu_seconds.pace = lambda: {pace}

        def pytest_addoption(parser):
            parser.addoption("--cpu", type=int, default=0)
            parser.addoption("--cpu-file")

        def pytest_configure(config):
            config.addinivalue_line("markers", "slow: slow")
            config.pluginmanager.register(CpuSeconds(config, limit=0.4))
        """
    )
    pytester.makepyfile(TESTS)
    kept = Path(pytester.path) / "kept.json"
    ended = pytester.runpytest_inprocess("--cpu", "2", "--cpu-file", str(kept), "-p", "no:xdist", "-p", "no:randomly")
    ended.assert_outcomes(passed=2 if pace == 1 else 4, failed=2 if pace == 1 else 0)
    assert "test_light" in kept.read_text()
    if pace > 1:
        return
    ended.stdout.fnmatch_lines(["*a fast test must take at most 0.4 CPU seconds, this one took 0.*", "*2 of 4 tests*"])
