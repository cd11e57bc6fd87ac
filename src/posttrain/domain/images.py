"""Container images by reference: which one a run's jobs run in, and which ones a project lets its runs name.

A run names an image by digest, `registry.example.org/team/train@sha256:…`, so what runs is what was planned. A project
allows such a reference, or `registry.example.org/team/train@*`: every digest of that repository.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from posttrain.domain.errors import InputError

ANY = "*"
_HOST = r"(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+)(?::[0-9]{1,5})?"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_HOST}(?:/{_PART})+")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST = 400  # characters of a reference
_SHOWN = 120
_WHERE = "REGISTRY/NAME@sha256:…"


def image_reference(text: str) -> str:
    """A reference to one image, pinned by digest.

    Raises:
        ValueError: it is none, in one line.
    """
    name, _, digest = text.partition("@")
    if _DIGEST.fullmatch(digest) and _named(name):
        return text
    if _named(name) or _named(name.rpartition(":")[0]):
        raise ValueError(
            f"must be pinned by digest, {_WHERE}, since a tag may mean another image tomorrow, got {text[:_SHOWN]!a}; "
            "podman image inspect --format '{{.Digest}}' shows it"
        )
    raise ValueError(f"must be a whole reference, {_WHERE} with its registry's host, got {text[:_SHOWN]!a}")


def image_digest(reference: str) -> str:
    """What of a reference decides which image it is."""
    return reference.rpartition("@")[2]


def image_rule(text: str) -> str:
    """What a project may allow: one image by its digest, or `NAME@*`.

    Raises:
        InputError: it is neither.
    """
    name, _, digest = text.partition("@")
    if digest == ANY and _named(name):
        return text
    try:
        return image_reference(text)
    except ValueError as error:
        raise InputError(f"image {error}; or allow every digest of a repository: REGISTRY/NAME@{ANY}") from error


def allows(rules: Collection[str], reference: str) -> bool:
    """Whether a project's images have this one."""
    return reference in rules or f"{reference.partition('@')[0]}@{ANY}" in rules


def _named(name: str) -> bool:
    return len(name) <= _LONGEST and bool(_NAME.fullmatch(name))
