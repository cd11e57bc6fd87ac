"""Objects that lie elsewhere: named by URL, version and checksum, read and hashed, never written.

Credentials come from the environment, as for the artifact store; a URL that holds some is refused before anything is
recorded. A name in the environment that cannot be an S3 server is refused as well: obstore panics at some of these.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import unquote, urlsplit

from posttrain.domain.canonical import verified
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, NotFoundError
from posttrain.store.atomic import write_stream

VARIABLES = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_LONGEST = 80


def refuse_no_endpoint(url: str) -> None:
    """Look at the variables by which a store at an `s3://` URL is found.

    Raises:
        InputError: one of them is set, and names no server.
    """
    if not url.startswith(("s3://", "s3a://")):
        return
    for name in VARIABLES:
        value = os.environ.get(name)
        if value is not None and not _names_server(value):
            raise InputError(
                f"{name} must be the address of an S3 server, http://HOST or https://HOST, got {value[:_LONGEST]!r}; "
                "correct it, or unset it for Amazon's own"
            )


def _names_server(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and value.isascii()
    except ValueError:  # brackets that do not close, a port that is no number
        return False


EXTERNAL = "external"  # the form of an asset version whose bytes lie elsewhere


URI, VERSION = "uri", "version"  # in its meta


SCHEMES = ("s3", "gs", "az", "file")


_VERSIONED = ("s3", "gs", "az")  # whose objects have versions that a read may name


_CHUNK = 4 << 20


_SECONDS = timedelta(seconds=30)  # that a request may take, with what obstore itself tries again


@dataclass(frozen=True, slots=True)
class External:
    """One object: `External("s3://bucket/train.jsonl", version="3Lg…")`."""

    uri: str
    version: str = ""  # of the store; empty: whatever is there

    def __str__(self) -> str:
        return f"{self.uri} (version {self.version})" if self.version else self.uri

    @property
    def name(self) -> str:
        """Of its file: `train.jsonl`."""
        return unquote(self.uri.rpartition("/")[2])

    @property
    def of_this_machine(self) -> bool:
        """Whether another machine may have something else at this URL, or nothing."""
        return self.uri.startswith("file:")


class ChangedError(IntegrityError):
    """The object is not what it was."""

    def __init__(self, place: External, checksum: str, found: str) -> None:
        super().__init__(f"{place} has checksum {found}, and must have {checksum}")
        self.found = found


def external(uri: str, version: str = "") -> External:
    """An object by its URL, as it may be recorded.

    Raises:
        InputError: a URL of no known scheme, of no object, or one that holds credentials, which is not repeated.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InputError(f"external URI is none: {error}; write s3://BUCKET/KEY") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise InputError(
            f"external URI {shown} must hold no credentials, query or fragment; give credentials by the environment"
        )
    if parts.scheme not in SCHEMES:
        raise InputError(f"external URI must begin with {', '.join(f'{s}://' for s in SCHEMES)}, got {uri!r}")
    if not parts.path.strip("/") or uri.endswith("/") or (parts.scheme != "file") != bool(parts.netloc):
        raise InputError(f"external URI must name one object, such as s3://BUCKET/KEY or file:///PATH, got {uri!r}")
    if version and parts.scheme not in _VERSIONED:
        raise InputError(f"{uri}: a version must be of an object in {', '.join(_VERSIONED)}, got {version!r}")
    return External(uri, version)


def check_external(place: External, checksum: str) -> int:
    """Hash an object where it lies, in constant memory; how many bytes it has.

    Raises:
        ChangedError: its checksum is another.
        NotFoundError: it is not there. InfrastructureError: its store does not answer, or not to us.
    """
    return sum(len(chunk) for chunk in _verified(place, checksum))


def fetch_external(place: External, checksum: str, path: Path) -> None:
    """Write an object's bytes to `path`, atomically and in constant memory, if they have this checksum.

    Raises:
        ChangedError, NotFoundError, InfrastructureError: as `check_external`; nothing is at `path` then.
        WorkspaceError: `path` cannot be written.
    """
    write_stream(path, lambda file: file.writelines(_verified(place, checksum)))


def _verified(place: External, checksum: str) -> Iterator[bytes]:
    return verified(_stream(place), checksum, lambda found: ChangedError(place, checksum, found))


def _stream(place: External) -> Iterator[bytes]:
    import obstore  # who has no such assets need not load it
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    folder = place.uri.rpartition("/")[0]
    try:
        if place.of_this_machine:
            store = from_url(f"{folder}/")
        else:
            refuse_no_endpoint(folder)
            store = from_url(folder, retry_config={"max_retries": 3, "retry_timeout": _SECONDS})
        found = obstore.get(store, place.name, options={"version": place.version} if place.version else None)
        yield from (bytes(chunk) for chunk in found.stream(min_chunk_size=_CHUNK))
    except FileNotFoundError as error:  # obstore's NotFoundError is one
        raise NotFoundError(f"there is no object {place}") from error
    except (BaseError, OSError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "canonicalize filesystem root" in line:  # a folder that is not there
            raise NotFoundError(f"there is no object {place}") from error
        raise InfrastructureError(f"{place} cannot be read: {line}; check address and credentials") from error
