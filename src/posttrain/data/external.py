"""Data sets whose bytes lie elsewhere: a registered version says where, and its digest what they must be."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from posttrain.domain.canonical import DIGEST_PREFIX
from posttrain.domain.errors import IntegrityError, NotFoundError, PosttrainError
from posttrain.domain.records import Asset
from posttrain.store.atomic import make_folder
from posttrain.store.external import EXTERNAL, URI, VERSION, ChangedError, External, check_external, fetch_external
from posttrain.store.trees import file_digest


def place_of(asset: Asset) -> External:
    """Where the bytes of an external version are."""
    return External(str(asset.meta[URI]), str(asset.meta.get(VERSION, "")))


def external_versions(registered: Iterable[Asset], digest: str, name: str = "") -> list[Asset]:
    """Those of some versions that are external and have these bytes; the one of this name first, then the latest."""
    found = [asset for asset in registered if asset.digest == digest and asset.form == EXTERNAL]
    return sorted(found, key=lambda asset: (asset.ref != name, -asset.created_at))


def cached_file(cache: Path, digest: str) -> Path:
    """Where jobs look for a file before they ask the artifact store; they hash it."""
    return cache / "files" / digest.removeprefix(DIGEST_PREFIX)


def local_copy(versions: Iterable[Asset], cache: Path) -> Path:
    """A copy of an external version's bytes below `cache`, fetched where there is none or a damaged one.

    Args:
        versions: of one digest, at least one; the first that can be read is taken.

    Raises:
        IntegrityError: the object changed; with both checksums and what to do.
        NotFoundError: it is gone. InfrastructureError: its store does not answer.
    """
    troubles: list[PosttrainError] = []
    for asset in versions:
        path = cached_file(cache, asset.digest)
        if path.is_file() and file_digest(path) == asset.digest:
            return path
        make_folder(path.parent)
        try:
            fetch_external(place_of(asset), asset.digest, path)
            return path
        except PosttrainError as error:
            troubles.append(_told(asset, error))
    raise troubles[0]


def check_where_it_lies(asset: Asset) -> int:
    """Hash the bytes of an external version at their URI; how many they are. Raises as `local_copy`."""
    try:
        return check_external(place_of(asset), asset.digest)
    except PosttrainError as error:
        raise _told(asset, error) from error


def _told(asset: Asset, error: PosttrainError) -> PosttrainError:
    """The error with the version that it concerns, and what mends it."""
    version = f" --version {asset.meta[VERSION]}" if asset.meta.get(VERSION) else ""
    again = f"posttrain asset add {asset.kind}:{asset.name} --external {asset.meta[URI]}{version}"
    if isinstance(error, ChangedError):
        way = f"put it back, or register what is there now: {again} --checksum {error.found}"
        return IntegrityError(f"{asset.ref}: {error}; {way}")
    if isinstance(error, NotFoundError):
        return NotFoundError(f"{asset.ref}: {error}; put it back, or register the data set from where it is now")
    return type(error)(f"{asset.ref}: {error}")
