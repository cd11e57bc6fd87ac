"""The code that decides results: a trainer's, and that of a kind which an installed package brought.

A manifest's `code` names both: `{"native": "sha256:…", "kind:words": "sha256:…"}`. Posttrain's own kinds are part of
their trainer's code and are not named.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import installed_kind
from posttrain.domain.manifest import Manifest, StageManifest
from posttrain.execution.ports import Trainer

_KIND = "kind:"


def code_of(stages: Iterable[tuple[str, str]], trainers: Mapping[str, Trainer]) -> dict[str, str]:
    """What a manifest's `code` holds.

    Args:
        stages: kind and trainer of each.
    """
    written = list(stages)
    named = [name for _, name in written] + [f"{_KIND}{kind}" for kind, _ in written if installed_kind(kind)]
    return {name: present_code(name, trainers) for name in sorted(set(named))}


def present_code(name: str, trainers: Mapping[str, Trainer]) -> str:
    """The digest that a name of `code` has now.

    Raises:
        InputError: there is no such trainer or kind any more, or its package is broken.
    """
    if name.startswith(_KIND):
        kind = name.removeprefix(_KIND)
        found = installed_kind(kind)
        if found is None:
            raise InputError(f"kind {kind!r} must be installed; install the package that it came from")
        return found.code_digest()
    return trainer_of(name, trainers).code_digest()


def trainer_of(name: str, trainers: Mapping[str, Trainer]) -> Trainer:
    """A trainer that a manifest names.

    Raises:
        InputError: it is not installed any more, or its package is broken.
    """
    if name not in trainers:
        known = ", ".join(sorted(trainers))
        raise InputError(
            f"trainer {name!r} must be installed, there is only {known}; install the package that it came from"
        )
    return trainers[name]


def names_of(manifest: Manifest, stage: StageManifest) -> list[str]:
    """What of the manifest's `code` decides a stage's result."""
    return [stage.trainer, *(name for name in (f"{_KIND}{stage.kind}",) if name in manifest.code)]


def deciding_code(manifest: Manifest, stage: StageManifest) -> Any:
    """The part of a stage's cache key that its code is."""
    found = [manifest.code[name] for name in names_of(manifest, stage)]
    return found[0] if len(found) == 1 else found


def called(name: str) -> str:
    """A name of `code` in an error."""
    return f"kind {name.removeprefix(_KIND)!r}" if name.startswith(_KIND) else f"trainer {name!r}"
