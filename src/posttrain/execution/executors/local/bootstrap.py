"""The first lines of a local job: `python -s -S -P bootstrap.py MODULE ATTEMPT_DIR`.

With `-S` nothing of site-packages has run yet, no `.pth` file either. The environment is compared with the one that
the order names; only then the process becomes the job: the same interpreter anew, without `-S`, which Ray would hand
down to its workers. An environment that differs is the job's answer: one line in `result.json`, and nothing of it was
imported.
"""

import json
import os
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[4]))  # behind the standard library

from posttrain.execution.environment import Environment, marks_of, pinned, read_environment
from posttrain.store.atomic import create_json


def main(module: str, folder: str) -> None:
    """Compare, then become the job."""
    if not refused(Path(folder)):
        os.execv(sys.executable, [sys.executable, "-s", "-P", *compiled_flags(), "-m", module, folder])


def compiled_flags() -> list[str]:
    """Python's options that keep compiled files where this process keeps them."""
    return ["-X", f"pycache_prefix={sys.pycache_prefix}"] if sys.pycache_prefix else []


def refused(folder: Path) -> bool:
    """Whether the environment is another one; then that is the job's answer."""
    different = trouble(folder)
    if different:
        failure = {"kind": "bad_input", "message": different, "signature": "EnvironmentChanged"}
        result = {"status": "failed", "outputs": {}, "metrics": {}, "tokens": 0, "seconds": 0.0, "failure": failure}
        create_json(folder / "result.json", result)
        print(different, file=sys.stderr)
    return bool(different)


def marks(folder: Path) -> str:
    """A digest of sizes, times and inodes of the files that an attempt's environment has; empty: nobody compares."""
    expected = _expected(folder)
    return marks_of(expected.roots) if isinstance(expected, Environment) else ""


def trouble(folder: Path) -> str:
    """How the environment differs from the one that the job was ordered for; empty where it does not."""
    expected = _expected(folder)
    if not isinstance(expected, Environment):
        return expected
    found = read_environment(expected.roots, expected.packages, expected.files)
    if found == expected:  # by their files: a digest of twenty thousand takes longer
        return ""
    return (
        f"the environment must be the one that the run began with, got {found.differs(expected)}; "
        "restore it, or posttrain retry takes it as it is"
    )


def _expected(folder: Path) -> Environment | str:
    """The environment that the order names; else what is wrong with it, or an empty text where it names none."""
    try:
        order = json.loads((folder / "job.json").read_bytes())
        digest, cache = str(order.get("environment") or ""), Path(order["cache_dir"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""  # no order of ours: the module itself says what is wrong with it
    if not digest:
        return ""
    expected = pinned(digest, cache)
    if expected is None:
        return f"the listing of the environment {digest[:19]}… is gone; posttrain retry takes the environment as it is"
    return expected


if __name__ == "__main__":
    main(*sys.argv[1:])
