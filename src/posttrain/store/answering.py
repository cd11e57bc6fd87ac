"""What an object store that fails is called: nothing there, a disk that is full, or a store that does not answer."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from posttrain.domain.errors import NotFoundError, PosttrainError, UnavailableError
from posttrain.store.atomic import unwritable

_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how obstore's messages carry errno
_PANIC = "PanicException"  # of Rust code, where an address is none; no module has the class
_QUERY = re.compile(r"\?[^\s\"']*")  # of a URL: a signature may be in it


@contextmanager
def answering(url: str, digest: str) -> Iterator[None]:
    """Errors of obstore in the block as ours.

    Args:
        url: of the store.
        digest: what is asked for.

    Raises:
        NotFoundError: it is not there.
        WorkspaceError: the disk is full or read-only.
        UnavailableError: the store does not answer, or refuses this process.
    """
    try:
        yield
    except PosttrainError:
        raise
    except FileNotFoundError as error:  # obstore's NotFoundError is one
        raise NotFoundError(f"blob {digest} is not in the artifact store; run the stage again") from error
    except (BaseError, OSError) as error:
        raise _failure(url, error) from error
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        raise UnavailableError(
            f"artifact store {url} cannot be asked: {str(error).splitlines()[0]}; check its address in the environment"
        ) from error


def _failure(url: str, error: Exception) -> PosttrainError:
    line = _QUERY.sub("", str(error).splitlines()[0]) if str(error) else type(error).__name__
    if not url.startswith(("file:", "memory:")):
        if isinstance(error, PermissionDeniedError | UnauthenticatedError):
            return UnavailableError(
                f"artifact store {url} refuses this process: {line}; check its keys, and what they may do there"
            )
        return UnavailableError(f"artifact store {url} does not answer: {line}; try again")
    found = _OS_ERROR.search(str(error))
    code = int(found.group(1)) if found else getattr(error, "errno", None)
    if code is None and isinstance(error, PermissionDeniedError):
        code = errno.EACCES
    if code is not None:
        return unwritable(url, OSError(code, os.strerror(code)))
    return UnavailableError(f"artifact store {url} does not answer: {line}; try again")
