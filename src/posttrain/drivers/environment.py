"""The environment that a background driver and its jobs have: that of the command which gave the run away."""

from __future__ import annotations

import hashlib
import os
import socket
import sys
from pathlib import Path

from posttrain._version import __version__
from posttrain.workspace.settings import STORE_VARIABLE, VARIABLE

_SOURCES = Path(__file__).parents[1]
_OF_A_TERMINAL = frozenset(  # they differ from one terminal to the next, and no job is another one for it
    (
        *("_", "PWD", "OLDPWD", "SHLVL", "TERM", "TERMCAP", "COLORTERM", "COLUMNS", "LINES", "WINDOWID", "DISPLAY"),
        *("WAYLAND_DISPLAY", "XAUTHORITY", "GPG_TTY", "STY", "WINDOW", "TMUX", "TMUX_PANE", "LS_COLORS", "PS1", "PS2"),
        *("PROMPT", "PROMPT_COMMAND", "NO_COLOR", "FORCE_COLOR", "CLICOLOR", "VTE_VERSION", "INVOCATION_ID"),
        *("JOURNAL_STREAM", "DBUS_SESSION_BUS_ADDRESS", "SYSTEMD_EXEC_PID"),
    )
)
_OF_TERMINALS = (
    *("TERM_", "SSH_", "XDG_SE", "XDG_VTNR", "KITTY_", "ITERM_", "WEZTERM_", "KONSOLE_", "WT_", "VSCODE_", "HIST"),
)


def driver_environment() -> dict[str, str]:
    """This process's variables, none of which means another thing in another folder."""
    kept = {name: value for name, value in os.environ.items() if name != STORE_VARIABLE}  # which is recorded
    if kept.get(VARIABLE):
        kept[VARIABLE] = os.path.abspath(kept[VARIABLE])
    if kept.get("PYTHONPATH"):
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, kept["PYTHONPATH"].split(os.pathsep)))
    return kept


def environment_key(root: Path) -> str:
    """Tells environments apart: variables that a job could see, interpreter, host, and the sources of Posttrain."""
    told = [
        f"{name}={value}"
        for name, value in sorted(driver_environment().items())
        if name not in (VARIABLE, *_OF_A_TERMINAL) and not name.startswith(_OF_TERMINALS)
    ]
    told += [str(root), socket.gethostname(), sys.executable, sys.prefix, str(_SOURCES), __version__, _sources()]
    return hashlib.sha256("\0".join(told).encode("utf-8", errors="surrogateescape")).hexdigest()[:8]


def _sources() -> str:
    """Sizes and times of the sources of this package: an upgrade changes them."""
    found = []
    for folder, _, names in os.walk(_SOURCES):
        for name in names:
            if name.endswith(".py"):
                try:
                    state = os.stat(os.path.join(folder, name))
                except FileNotFoundError:
                    continue
                found.append(f"{folder}/{name}:{state.st_size}:{state.st_mtime_ns}")
    return "\n".join(sorted(found))
