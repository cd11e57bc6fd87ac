"""How podman is asked, and how an image is fetched: again and again while its registry is away, within a time.

Only the standard library, and rooms of ours that keep to it: the supervisor imports this.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from posttrain.domain.errors import InputError, PosttrainError
from posttrain.store.atomic import open_plain

FETCH_VARIABLE = "POSTTRAIN_IMAGE_FETCH_SECONDS"  # of whoever drives: how long one attempt waits for its image
FETCH_SECONDS = 1800.0  # tens of GB come in that time; a registry that is away is waited for
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before an image is asked for again
_FINAL = re.compile(  # what podman says where another try fetches nothing either
    r"manifest unknown|name unknown|not found|unauthorized|authentication required|denied|forbidden|invalid reference",
    re.IGNORECASE,
)
_FRAMED = re.compile(r'level=\w+ msg="(.*)"$')  # what it says while it tries again by itself
_WORDS = 400  # characters of what podman said, the last ones: there is the cause
_LINE = 1200
_TAIL = 8192  # bytes of a log in which its last words are
_VARIABLES = (  # of whoever starts podman, that it needs
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE"),
    "DBUS_SESSION_BUS_ADDRESS",
)
_SECONDS = 60.0  # for one word with podman on a busy machine


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What podman needs of an environment, beside what jobs get of it."""
    return {name: environment[name] for name in _VARIABLES if name in environment}


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    """What podman answers to a short question. Raises as `subprocess.run`."""
    return subprocess.run(
        ["podman", *words], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, check=False,
        env=variables(os.environ), cwd="/",
    )  # fmt: skip


def fetch_seconds(job: str) -> float:
    """How long a job waits for its image.

    Raises:
        InputError: whoever drives says what is no time.
    """
    said = os.environ.get(FETCH_VARIABLE, "")
    try:
        seconds = float(said or FETCH_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise InputError(f"job {job}: {FETCH_VARIABLE} must be a number of seconds above 0, got {said[:80]!r}")
    return seconds


def fetched(image: str, seconds: float, pause: Callable[[float], None] = time.sleep) -> str:
    """Fetch an image, as often as that takes a registry that is away; why it is not here, with podman's last words.

    Args:
        seconds: within which it must come.
    """
    until, tried = time.monotonic() + seconds, 0
    while True:
        code, words = _pulled(image, max(0.0, until - time.monotonic()))
        if code == 0:
            return ""
        words = _cause(words, image) or ("nothing" if code is None else f"exit code {code}")
        if code is None:
            return _late(image, seconds, words)
        if _FINAL.search(words):
            return f"image {image} cannot be fetched, podman says: {words}; mend that, then posttrain retry"
        wait = _PAUSES[min(tried, len(_PAUSES) - 1)]
        if time.monotonic() + wait >= until:
            return _late(image, seconds, words)
        print(f"image {image} cannot be fetched, podman says: {words}; trying again in {wait:g} s", file=sys.stderr)
        sys.stderr.flush()
        pause(wait)
        tried += 1


def _pulled(image: str, seconds: float) -> tuple[int | None, str]:
    """Exit code of podman, None: it did not come to an end in time; and its last words.

    They go into a file: whatever it started, and is still there, would hold a pipe.
    """
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                ["podman", "pull", "--quiet", image], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                timeout=seconds, check=False, env=variables(os.environ), cwd="/",
            )  # fmt: skip
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        said.seek(max(0, os.fstat(said.fileno()).st_size - _TAIL))
        return code, _last(said.read(_TAIL).decode(errors="replace"))


def _late(image: str, seconds: float, words: str) -> str:
    return (
        f"image {image} could not be fetched within {seconds:g} s, podman says: {words}; see that its registry "
        f"answers, or raise {FETCH_VARIABLE}, then posttrain retry"
    )


def _last(words: str) -> str:
    """Podman's last line, which says what was wrong."""
    lines = [line for line in words.splitlines() if line.strip()]
    return one_line(lines[-1]) if lines else ""


def _cause(words: str, image: str) -> str:
    """What podman said, without the name of the image, in which there may be any word, and without a log's frame."""
    framed = _FRAMED.search(words)
    found = (framed[1] if framed else words).replace(f"docker://{image}", "it")
    return found.replace(image, "it").replace(image.partition("@")[0], "it")[-_WORDS:]


def one_line(words: str) -> str:
    """Some of what podman said, as one line."""
    return " ".join(words.split())[:_LINE]


def last_words(folder: Path) -> str:
    """What podman, or whoever starts it, said last of a container that it did not start; empty: nothing is there.

    A job may have written there as well: it is a line for a person, and decides nothing.
    """
    with suppress(PosttrainError, OSError), open_plain(folder / "log.txt") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        lines = log.read(_TAIL).decode(errors="replace").splitlines()
        return next((one_line(line) for line in reversed(lines) if line.startswith(("image ", "Error: "))), "")
    return ""
