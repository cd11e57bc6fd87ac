"""Which file and which function a reward is, when nobody says: decided alike where it is registered and where it runs.

Names only; who calls has the files and the functions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from posttrain.domain.errors import InputError

CONVENTIONAL_FILE = "reward.py"
CONVENTIONAL_ENTRIES = ("score", "compute_score")


def source_name(files: Collection[str], wanted: str, folder: str) -> str:
    """The Python file of a reward's folder: the wanted one, `reward.py`, or the only one.

    Args:
        files: Python files at the top of the folder.
        wanted: what was asked for; empty: nothing.
        folder: its name, for the error.

    Raises:
        InputError: it is not there, or there are several and none is called `reward.py`.
    """
    only = next(iter(files)) if len(files) == 1 else ""
    chosen = wanted or (CONVENTIONAL_FILE if CONVENTIONAL_FILE in files else only)
    if chosen not in files:
        missing = repr(wanted) if wanted else f"`{CONVENTIONAL_FILE}` or a single Python file"
        remedy = f"; name one with --entry {min(files)}:FUNCTION" if files else ""
        raise InputError(
            f"reward folder {folder} must hold {missing}, got {', '.join(sorted(files)) or 'none'}{remedy}"
        )
    return chosen


def entry_name(functions: Iterable[str], source: str) -> str:
    """The function of a reward's source that nobody named: `score`, `compute_score`, or the only public one.

    Args:
        functions: what the file defines.
        source: the file's name, for the error.

    Raises:
        InputError: there is none of these.
    """
    public = [name for name in functions if not name.startswith("_")]
    entry = next((name for name in CONVENTIONAL_ENTRIES if name in public), public[0] if len(public) == 1 else "")
    if not entry:
        defined = ", ".join(public) or "none"
        remedy = f"; name the one with --entry {public[0]}" if public else ""
        raise InputError(
            f"{source} must define a function `score`, or one public function; it defines {defined}{remedy}"
        )
    return entry
