"""Versions of the API: what a client speaks, what a server speaks, and what either knows the other by.

Within a version the API only grows: an answer may have fields that a client does not know, which it ignores; a request
with a parameter that a server does not know is refused, and a client sends only what is not the default.
"""

from __future__ import annotations

API_VERSION = 1  # that a client speaks; it is in the path of every request
API_VERSIONS = (1,)  # that a server speaks: beside its own that of the release before
UNKNOWN_PARAMETER = "unknown parameter"  # words of a refusal
