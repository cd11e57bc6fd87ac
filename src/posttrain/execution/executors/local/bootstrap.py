"""The first lines of a local job: `python -s -S -P bootstrap.py MODULE ATTEMPT_DIR`.

With `-S`, no file of site-packages has run yet, not even a `.pth` file. The environment is compared with the
environment that the order names. Only then does the process become the job, by starting the interpreter again without
`-S`, because Ray would pass `-S` on to its workers. If the environment differs, the job fails with a one-line error in
`result.json`, and imports none of the environment's packages.
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4]))  # behind the standard library

from posttrain.execution.environment import Environment, marks_of, pinned, read_environment
from posttrain.store.atomic import create_json


def main(module: str, folder: str) -> None:
    """Compare the environment, then become the job."""
    if not refused(Path(folder)):
        os.execv(sys.executable, [sys.executable, "-s", "-P", *compiled_flags(), "-m", module, folder])


def compiled_flags() -> list[str]:
    """Return the Python options that store compiled files in this process's folder."""
    return ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []


def refused(folder: Path) -> bool:
    """Return whether the environment differs; if so, write the job's failed result."""
    different = trouble(folder)
    if different:
        failure = {"kind": "bad_input", "message": different, "signature": "EnvironmentChanged"}
        result = {"status": "failed", "outputs": {}, "metrics": {}, "tokens": 0, "seconds": 0.0, "failure": failure}
        create_json(folder / "result.json", result)
        print(different, file=sys.stderr)
    return bool(different)


def marks(folder: Path) -> str:
    """Return a digest of sizes, times and inodes of an attempt's environment files; empty: these are not compared."""
    expected = _expected(folder)
    return marks_of(expected.roots) if isinstance(expected, Environment) else ""


def trouble(folder: Path) -> str:
    """Return how the environment differs from the environment that the order names; empty: no difference."""
    expected = _expected(folder)
    if not isinstance(expected, Environment):
        return expected
    found = read_environment(expected.roots, expected.packages, expected.files)
    if found == expected:  # compares the lists of files, since a digest of 20,000 files takes longer
        return ""
    return (
        f"the environment differs from the one with which the run began: {found.differs(expected)}; "
        "restore it, or accept the current environment with posttrain retry; if Posttrain's own code changed, "
        "submit the run again, which locks the current code"
    )


def _expected(folder: Path) -> Environment | str:
    """Return the environment that the order names, or the error; an empty text if the order names no environment."""
    try:
        order = json.loads((folder / "job.json").read_bytes())
        digest, cache = str(order.get("environment") or ""), Path(order["cache_dir"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # not a valid order: the module itself reports the error
    if not digest:
        return ""
    expected = pinned(digest, cache)
    if expected is None:
        return f"the listing of environment {digest[:19]}… no longer exists; posttrain retry uses the current files"
    return expected


if __name__ == "__main__":
    main(*sys.argv[1:])
