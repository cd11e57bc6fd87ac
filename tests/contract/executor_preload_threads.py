"""A module that no fork server can serve: it has started a thread."""

from __future__ import annotations

import threading

from executor_preload import ready as ready

threading.Thread(target=threading.Event().wait, daemon=True).start()
