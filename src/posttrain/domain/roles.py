"""The roles of a stage: the models that take part in its steps, and the reward function.

The configuration of a stage declares its roles. Assembly, placement, planner and preflight read the declaration, so
none of them depends on the algorithm. A step has these phases, in this order::

    rollout ─▶ reward ─▶ one phase per predicting role ─▶ one phase per learning role ─▶ weights

A phase exists if a role works in it. In the phase `weights`, the rollout receives the weights of the policy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from posttrain.domain.errors import InputError

DECLARED = "roles."  # prefix of the input slots of the models that a run file declares for the roles of a stage
SERVED = "models."  # prefix of the input slots of the models that a job serves to its rewards
Head = Literal["language", "value", "score"]
Work = Literal["rollout", "score", "predict", "update"]


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role: `RoleSpec("critic", head="value", trained=True, work=("predict", "update"))`."""

    name: str
    model: str = "model"  # the input slot of its initial weights; "": no model, but a reward function or a URL
    head: Head = "language"  # its prediction: next tokens, a value at each token, or one score for a response
    trained: bool = False  # whether its weights change during the stage
    work: tuple[Work, ...] = ("predict",)  # what it does in a step
    base_of: str = ""  # the role whose weights it reads, if both are in one process
    wide: int = 0  # bytes per response token of the predictions that remain on its ranks
    url: str = ""  # of the server that computes its predictions instead of a model


POLICY = RoleSpec("policy", trained=True, work=("update",))
CRITIC = RoleSpec("critic", head="value", trained=True, work=("predict", "update"))
REFERENCE = RoleSpec("reference")
REWARD_MODEL = RoleSpec("reward_model", model="reward_model", head="score", work=("score",))
TEACHER = RoleSpec("teacher", model="teacher")
ROLLOUT = RoleSpec("rollout", work=("rollout",), base_of="policy")
REWARD = RoleSpec("reward", model="", work=("score",))


def is_frozen_input(slot: str) -> bool:
    """Return whether an input slot has the model of a further role, and not the model that the stage continues."""
    return slot in (REWARD_MODEL.model, TEACHER.model) or slot.startswith((DECLARED, SERVED))


def role_named(roles: Sequence[RoleSpec], name: str) -> RoleSpec | None:
    """Return the role of this name; None: the stage has no such role."""
    return next((role for role in roles if role.name == name), None)


def with_models(roles: Sequence[RoleSpec]) -> tuple[str, ...]:
    """Return the names of the roles that have a model in memory.

    Raises:
        InputError: a package's configuration declares a role that is not a `RoleSpec`.
    """
    odd = next((role for role in roles if not isinstance(role, RoleSpec)), None)
    if odd is not None:
        raise InputError(f"roles() must return RoleSpec values, got {odd!r:.60}; write RoleSpec({odd!r:.60})")
    return tuple(role.name for role in roles if role.model)


def in_pools(roles: Sequence[RoleSpec]) -> tuple[str, ...]:
    """Return the names of the roles that run in pools: those with a model, here or on another server."""
    return tuple(role.name for role in roles if role.model or role.url)


def servers_of(params: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return field → the server that a stage names there: `{"teacher": {"url": …, "key": "TEACHER_KEY"}}`."""
    declared = {f"roles.{name}.model": _map(role).get("model") for name, role in _map(params.get("roles")).items()}
    models = {f"models.{name}": one for name, one in _map(params.get("models")).items()}
    given = {"teacher": params.get("teacher"), **declared, **models}
    return {field: one for field, one in given.items() if isinstance(_map(one).get("url"), str)}


def keys_of_servers(params: Mapping[str, Any]) -> frozenset[str]:
    """Return the variables with the keys of the servers that a stage names."""
    return frozenset(str(one["key"]) for one in servers_of(params).values() if one.get("key"))


def _map(value: Any) -> Mapping[str, Any]:
    """Return a value of a stage of any kind as a map; empty: it is none."""
    return value if isinstance(value, Mapping) else {}


def step_phases(roles: Sequence[RoleSpec]) -> dict[str, tuple[str, ...]]:
    """Return the phases of a step → the roles that work in them. Frozen roles predict before trained roles."""
    learners = [role.name for role in roles if "update" in role.work]
    sampling = [role for role in roles if "rollout" in role.work]
    found = {
        "rollout": tuple(role.name for role in sampling),
        "reward": tuple(role.name for role in roles if "score" in role.work),
    }
    for role in sorted(roles, key=lambda role: role.trained):
        if "predict" in role.work:
            phase = "values" if role.head == "value" else role.name
            found[phase] = (*found.get(phase, ()), role.name)
    for name in reversed(learners):
        found["update" if len(learners) == 1 else f"update {name}"] = (name,)
    for role in sampling:
        if role_named(roles, role.base_of):
            found["weights"] = (role.base_of, role.name)
    return {phase: names for phase, names in found.items() if names}
