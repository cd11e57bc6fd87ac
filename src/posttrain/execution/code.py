"""The code that decides results: its names in a manifest's `code`, and its present digests.

Both sides compare it: the driver before it launches a stage, and the agent of a job on another machine before the job.
"""

from collections.abc import Mapping

from posttrain.domain.engines import ENGINE, engine_words, installed_engine
from posttrain.domain.errors import InputError
from posttrain.domain.kinds import installed_kind
from posttrain.domain.manifest import KIND
from posttrain.execution.ports import Trainer


def present_code(name: str, trainers: Mapping[str, Trainer]) -> str:
    """Return the current digest of a name in `code`.

    Raises:
        InputError: the trainer, kind or engine is no longer installed, or its package is broken.
    """
    if name.startswith(ENGINE):
        return installed_engine(*engine_words(name)).code_digest()
    if name.startswith(KIND):
        kind = name.removeprefix(KIND)
        found = installed_kind(kind)
        if found is None:
            raise InputError(f"kind {kind!r} must be installed; install its package")
        return found.code_digest()
    return trainer_of(name, trainers).code_digest()


def trainer_of(name: str, trainers: Mapping[str, Trainer]) -> Trainer:
    """Return the trainer of this name.

    Raises:
        InputError: the trainer is not installed, or its package is broken.
    """
    if name not in trainers:
        known = ", ".join(sorted(trainers))
        raise InputError(f"trainer {name!r} is not installed (installed: {known}); install its package")
    return trainers[name]


def called(name: str) -> str:
    """Return a name of `code` as errors show it."""
    if name.startswith(ENGINE):
        return "{} engine {!r}".format(*engine_words(name))
    return f"kind {name.removeprefix(KIND)!r}" if name.startswith(KIND) else f"trainer {name!r}"
