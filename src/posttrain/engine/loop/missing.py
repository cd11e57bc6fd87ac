"""What an algorithm needs and its stage's roles do not have: refused before anything is sampled."""

from __future__ import annotations

from posttrain.domain.errors import InputError
from posttrain.engine.algorithms.objectives import Totals
from posttrain.engine.batch import Need
from posttrain.engine.loop.columns import refuse_odd
from posttrain.engine.loop.roles import Roles
from posttrain.engine.recipes.algorithm import Algorithm
from posttrain.engine.roles.training import FrozenWorker, TrainWorker


def refuse_missing(algorithm: Algorithm, roles: Roles, step: int) -> None:
    """Hold the columns and objectives of a step against the stage's roles and what their models predict.

    Raises:
        InputError: a role that is not there, or does not learn and should; a column or an objective of what a model
            does not predict; a wide column that nobody can fill.
    """
    columns, updates, name = algorithm.requires(step), algorithm.updates(step), type(algorithm).__name__
    there = roles.learners.keys() | roles.frozen.keys()
    for column in columns:
        if column.role not in there:
            raise InputError(
                f"{name} needs the role {column.role} for {column.name}, got {', '.join(sorted(there))}; "
                "open the roles with it"
            )
    refuse_odd(columns, roles, name)
    for update in updates:
        if update.role not in roles.learners:
            trained = ", ".join(roles.learners)
            raise InputError(f"{name} trains the role {update.role}, got {trained} that learn; open the roles with it")
    asked = [(column.role, column.need, f"{name} needs {column.need} for {column.name}") for column in columns]
    for update in updates:
        needs = sorted(update.objective(Totals(1, 1, 1, 1)).needs)
        asked += [(update.role, need, f"the objective of {name} needs {need}") for need in needs]
    can = {role: _predicted(roles, role) for role, _, _ in asked}
    for role, need, who in asked:
        if need not in can[role]:
            told = " and ".join(sorted(can[role]))
            raise InputError(f"{who}, got the role {role}, whose model predicts {told}; ask another role")


def _predicted(roles: Roles, role: str) -> frozenset[Need]:
    learns = roles.learners.get(role)
    return learns.one(TrainWorker.predicts) if learns else roles.frozen[role].one(FrozenWorker.predicts)
