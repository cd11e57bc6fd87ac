"""Any object store obstore knows by URL: `s3://bucket/prefix`, `gs://…`, `az://…`; credentials by the environment."""

from __future__ import annotations

import time
from typing import Any

from obstore.store import from_url

from posttrain.domain.errors import InputError

YOUNG = 3600.0  # seconds; nothing younger is deleted unless somebody asks for it


class Remote:
    """An object store by URL. A write it has acknowledged is durable."""

    def __init__(self, url: str) -> None:
        self.url = url

    def open(self) -> Any:
        """The store.

        Raises:
            InputError: obstore does not know the URL.
        """
        try:
            return from_url(self.url)
        except Exception as error:  # obstore raises its own and built-in errors alike here
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(
                f"artifact store URL {self.url!r} cannot be opened: {line}; name a folder or s3://…"
            ) from error

    def touch(self, _key: str, modified: float) -> bool:
        """An object gets another time only where it is written again, which is done for one that is not young."""
        return time.time() - modified < YOUNG

    def settle(self, key: str) -> None:
        """Nothing to do."""
