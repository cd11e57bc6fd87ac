"""The roles of a stage, each a worker group, and what is done to all of them together.

Which processes they live in is decided by whoever opens them; nothing here can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from posttrain.domain.errors import InputError
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.roles.frozen import FrozenWorker
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.view import PolicyVersion


@final
@dataclass(frozen=True, slots=True)
class Roles:
    """What a dataflow works with: `roles.rollout.map(RolloutWorker.generate, prompts, sampling, 8)`.

    Groups of ranks that stand on devices of their own or share them; None where a recipe has no such role.
    """

    policy: WorkerGroup[TrainWorker]
    rollout: WorkerGroup[RolloutWorker]
    reference: WorkerGroup[FrozenWorker] | None = None
    critic: WorkerGroup[TrainWorker] | None = None
    reward_model: WorkerGroup[FrozenWorker] | None = None
    sleeps: bool = False  # frozen roles leave their memory when their phase is over

    def rest(self) -> None:
        """The frozen roles have said what the step needs of them: where roles sleep, they do until the next."""
        if self.sleeps and self.reference:
            self.reference.each(FrozenWorker.sleep)
        if self.sleeps and self.reward_model:
            self.reward_model.each(FrozenWorker.sleep)

    def fallbacks(self) -> dict[str, str]:
        """Slower ways that the stage's models must go, each with the reason.

        Those of a scalar model are called by its role too: `reward_model/padding`. The reference is the policy's model.
        """
        found = self.policy.one(TrainWorker.fallbacks) | self.rollout.one(RolloutWorker.fallbacks)
        if self.critic:
            found |= _of_role("critic", self.critic.one(TrainWorker.fallbacks))
        if self.reward_model:
            found |= _of_role("reward_model", self.reward_model.one(FrozenWorker.fallbacks))
        return found

    def publish(self, version: PolicyVersion) -> None:
        """From now on the rollout samples with the policy as it is; proven by digest where weights are copied.

        Raises:
            IntegrityError: a rollout rank serves other weights than were published.
        """
        if self.rollout.one(RolloutWorker.view) == "alias":
            self.rollout.each(RolloutWorker.serve, version)
        else:
            self.rollout.each(RolloutWorker.load, self.policy.stored(TrainWorker.publish, version))

    def save(self, path: Path) -> Mapping[str, str]:
        """Write every learner's part of a checkpoint; file name → digest."""
        written = [*self.policy.each(TrainWorker.save, path)]
        if self.critic:
            written += self.critic.each(TrainWorker.save, path)
        return {name: digest for shards in written for name, digest in shards.items()}

    def restore(self, path: Path) -> None:
        """Go on from a verified checkpoint.

        Raises:
            IntegrityError: it does not fit the models.
        """
        self.policy.each(TrainWorker.restore, path)
        if self.critic:
            self.critic.each(TrainWorker.restore, path)


def _of_role(role: str, found: Mapping[str, str]) -> dict[str, str]:
    return {f"{role}/{name}": f"{role}: {reason}" for name, reason in found.items()}


def need_reference(roles: Roles, penalty: object) -> None:
    """Refuse to train without what a KL penalty is measured against.

    Args:
        penalty: the stage's; None where it has none.

    Raises:
        InputError: a penalty and no reference.
    """
    if penalty is not None and roles.reference is None:
        raise InputError("a KL penalty needs the reference, got roles without one; open them with it, or drop kl")


@final
@dataclass(frozen=True, slots=True)
class LearnerOnly:
    """The single role of plain SPMD training: on demonstrations, or on preferences."""

    learner: WorkerGroup[TrainWorker]

    def fallbacks(self) -> dict[str, str]:
        """See `Roles.fallbacks`."""
        return self.learner.one(TrainWorker.fallbacks)

    def save(self, path: Path) -> Mapping[str, str]:
        """See `Roles.save`."""
        written = self.learner.each(TrainWorker.save, path)
        return {name: digest for shards in written for name, digest in shards.items()}

    def restore(self, path: Path) -> None:
        """See `Roles.restore`."""
        self.learner.each(TrainWorker.restore, path)
