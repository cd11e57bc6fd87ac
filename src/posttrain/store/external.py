"""External objects: identified by URL, version and checksum, read and hashed, never written.

Credentials come from the environment, as for the artifact store; a URL with credentials is rejected before anything is
recorded. An endpoint in the environment that cannot be an S3 server is also rejected, because obstore panics on some
such endpoints.
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
    """Check the environment variables that set the endpoint for an `s3://` URL.

    Raises:
        InputError: a variable is set, and is not the address of a server.
    """
    if not url.startswith(("s3://", "s3a://")):
        return
    for name in VARIABLES:
        value = os.environ.get(name)
        if value is not None and not _names_server(value):
            raise InputError(
                f"{name} must be the address of an S3 server, http://HOST or https://HOST, got {value[:_LONGEST]!r}; "
                "correct it, or unset it to use Amazon S3"
            )


def _names_server(value: str) -> bool:
    try:
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and value.isascii()
    except ValueError:  # such as unclosed brackets or a port that is not a number
        return False


EXTERNAL = "external"  # form of an asset version with external bytes


URI, VERSION = "uri", "version"  # keys in the version's meta


SCHEMES = ("s3", "gs", "az", "file")


_VERSIONED = ("s3", "gs", "az")  # schemes whose objects have versions


_CHUNK = 4 << 20


_SECONDS = timedelta(seconds=30)  # maximum duration of a request, including obstore's retries


@dataclass(frozen=True, slots=True)
class External:
    """One object: `External("s3://bucket/train.jsonl", version="3Lg…")`."""

    uri: str
    version: str = ""  # the store's version; empty: the current one

    def __str__(self) -> str:
        return f"{self.uri} (version {self.version})" if self.version else self.uri

    @property
    def name(self) -> str:
        """The file name: `train.jsonl`."""
        return unquote(self.uri.rpartition("/")[2])

    @property
    def of_this_machine(self) -> bool:
        """Whether the URL is a local path, at which another machine may have a different file, or no file."""
        return self.uri.startswith("file:")


class ChangedError(IntegrityError):
    """The checksum of the object differs from the recorded one."""

    def __init__(self, place: External, checksum: str, found: str) -> None:
        super().__init__(f"{place}: checksum must be {checksum}, got {found}")
        self.found = found


def external(uri: str, version: str = "") -> External:
    """Return the object of a URL, after checking that the URL may be recorded.

    Raises:
        InputError: the URL has an unknown scheme, names no object, or contains credentials (not shown in the error).
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise InputError(f"external URI cannot be parsed: {error}; write s3://BUCKET/KEY") from error
    if "@" in parts.netloc or parts.query or parts.fragment:
        shown = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise InputError(
            f"external URI {shown} must contain no credentials, query or fragment; set credentials in the environment"
        )
    if parts.scheme not in SCHEMES:
        raise InputError(f"external URI must begin with {', '.join(f'{s}://' for s in SCHEMES)}, got {uri!r}")
    if not parts.path.strip("/") or uri.endswith("/") or (parts.scheme != "file") != bool(parts.netloc):
        raise InputError(f"external URI must name one object, such as s3://BUCKET/KEY or file:///PATH, got {uri!r}")
    if version and parts.scheme not in _VERSIONED:
        raise InputError(
            f"{uri}: a version can be given only for an object in {', '.join(_VERSIONED)}, got {version!r}; remove the "
            "version"
        )
    return External(uri, version)


def check_external(place: External, checksum: str) -> int:
    """Hash an external object in constant memory; return its size in bytes.

    Raises:
        ChangedError: the object has a different checksum.
        NotFoundError: the object does not exist.
        InfrastructureError: the store does not answer, or denies access.
    """
    return sum(len(chunk) for chunk in _verified(place, checksum))


def fetch_external(place: External, checksum: str, path: Path) -> None:
    """Write an object's bytes to `path`, atomically and in constant memory, if they have this checksum.

    Raises:
        ChangedError, NotFoundError, InfrastructureError: see `check_external`; `path` is unchanged.
        WorkspaceError: `path` cannot be written.
    """
    write_stream(path, lambda file: file.writelines(_verified(place, checksum)))


def _verified(place: External, checksum: str) -> Iterator[bytes]:
    return verified(_stream(place), checksum, lambda found: ChangedError(place, checksum, found))


def _stream(place: External) -> Iterator[bytes]:
    import obstore  # loaded only for external assets
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
    except FileNotFoundError as error:  # obstore's NotFoundError is a FileNotFoundError
        raise NotFoundError(f"there is no object {place}") from error
    except (BaseError, OSError) as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "canonicalize filesystem root" in line:  # the folder does not exist
            raise NotFoundError(f"there is no object {place}") from error
        raise InfrastructureError(f"{place} cannot be read: {line}; check address and credentials") from error
