"""The user's own algorithm, run by the same loop.

::

    # best_of_n.py, next to run.yaml; the stage has `kind: dataflow` and `recipe: best_of_n:BestOfN`
    class BestOfN(Dataflow): ...

It is a function of its arguments, like every algorithm; then it is resumed, budgeted, placed and traced like every
other.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from posttrain.domain.errors import InputError
from posttrain.engine.config import DataflowConfig
from posttrain.engine.recipes.algorithm import RolloutAlgorithm, Update
from posttrain.engine.recipes.policy_gradient import Sampling

Entry = Callable[[DataflowConfig], RolloutAlgorithm]


class Dataflow(Sampling[DataflowConfig]):
    """The base of a user's algorithm: samples as its stage is configured, with defaults for everything else.

    With several turns `observe(row, responses)` returns the observation between two of them. `config.settings` holds
    its author's own settings.
    """

    reads_token_scores = True  # in the column `token_scores`; its author decides

    def updates(self, step: int) -> Sequence[Update]:
        """Return the updates of a step.

        Raises:
            InputError: the algorithm does not define them.
        """
        raise InputError(f"dataflow {type(self).__name__} must define its objective, got no updates(step); define it")


def load_dataflow(file: Path, entry: str) -> Entry:
    """Import a user's module, which runs with the job's own rights, and find its algorithm.

    The folder is added to the module path, so that worker processes can import what the module defines.

    Args:
        file: `my_module.py`.
        entry: its name: a class, or a function that makes an algorithm of the stage's configuration.

    Raises:
        InputError: the module cannot be imported, has no such name, or one that does not take a configuration.
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
            f"recipe {file.name}: {entry} must be made of the stage's configuration alone, got "
            f"{entry}{inspect.signature(found)}; derive a class from posttrain.engine.recipes.dataflow.Dataflow"
        ) from error
    made: Entry = found
    return made
