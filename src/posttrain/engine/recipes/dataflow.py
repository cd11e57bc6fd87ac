"""A user-defined algorithm, run by the same loop as the built-in algorithms.

::

    # best_of_n.py, next to run.yaml; the stage has `kind: dataflow` and `recipe: best_of_n:BestOfN`
    class BestOfN(Dataflow): ...

The methods of the class must be functions of their arguments, as in every algorithm. The algorithm is then resumed,
budgeted, placed and traced like a built-in algorithm.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import kind_of
from posttrain.engine.config import DataflowConfig, TrainingConfig, named, training_config
from posttrain.engine.recipes.algorithm import RolloutAlgorithm, Update
from posttrain.engine.recipes.policy_gradient import Sampling

Entry = Callable[[DataflowConfig], RolloutAlgorithm]


class Dataflow(Sampling[DataflowConfig]):
    """The base class of user-defined algorithms: samples as the stage configures, with defaults for all other methods.

    With several turns, `observe(row, responses)` returns the observation between two responses. `config.settings`
    contains user-defined settings.
    """

    reads_token_scores = True  # `token_scores` is always available

    def updates(self, step: int) -> Sequence[Update]:
        """Return the updates of a step.

        Raises:
            InputError: the algorithm does not define `updates`.
        """
        raise InputError(f"dataflow {type(self).__name__} must define its objective; add the method updates(step)")


def load_dataflow(file: Path, entry: str) -> Entry:
    """Import a user's module, which runs with the job's rights, and return its algorithm.

    The folder is added to the module path, so that worker processes can import the module's definitions.

    Args:
        file: `my_module.py`.
        entry: a name in the module: a class, or a function that returns an algorithm for the stage's configuration.

    Raises:
        InputError: the module cannot be imported, or lacks the name; the object does not accept a configuration.
    """
    sys.path.insert(0, str(file.parent))
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise InputError(f"recipe {file.name} cannot be imported: {type(error).__name__}: {error}; fix it") from error
    found = vars(module).get(entry)
    if not callable(found):
        raise InputError(f"recipe {file.name} must define {entry}, got no such class; check the stage's recipe")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise InputError(
            f"recipe {file.name}: {entry} must be constructed from the stage's configuration alone, got "
            f"{entry}{inspect.signature(found)}; derive a class from posttrain.engine.recipes.dataflow.Dataflow"
        ) from error
    made: Entry = found
    return made


def algorithm_of(kind: str, config: TrainingConfig, recipe: tuple[Path, str] | None) -> Any:
    """Return a stage's algorithm: the user's own, or the algorithm of the stage's kind.

    Args:
        recipe: the file and the entry of the user's algorithm.

    Raises:
        InputError: see `load_dataflow`.
    """
    if recipe:
        return load_dataflow(*recipe)(cast(DataflowConfig, config))
    spec = kind_of(kind).algorithm
    assert spec is not None, "a kind with a training configuration has an algorithm"
    return named(spec.algorithm)(config)


def observe_of(folder: Path, *, kind: str, params: Mapping[str, Any], recipe: Sequence[str]) -> Any:
    """Return the method `observe` of a stage's algorithm, in the process that calls it (`sandbox.observer`).

    Args:
        folder: the folder of the user's file.
        params: the stage's parameters.
        recipe: the file's name and the entry of the user's algorithm; empty: the algorithm of the kind.
    """
    found = (folder / recipe[0], recipe[1]) if recipe else None
    return algorithm_of(kind, training_config(kind, dict(params)), found).observe
