"""The roles of a stage, each a worker group, and what is done to all of them together.

Which processes they live in is decided by whoever opens them; nothing here can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from posttrain.domain.errors import InputError
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.loop.publishing import transport
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.view import PolicyVersion


@final
@dataclass(frozen=True, slots=True)
class Roles:
    """What an algorithm works with: `roles.learners["policy"].map(TrainWorker.update, batch, objective, step=3)`.

    Groups of ranks that stand on devices of their own or share them.
    """

    learners: Mapping[str, WorkerGroup[TrainWorker]]  # the first is the model that the stage leaves
    frozen: Mapping[str, WorkerGroup[FrozenWorker]] = field(default_factory=dict)
    rollout: WorkerGroup[RolloutWorker] | None = None
    sleeps: bool = False  # frozen roles leave their memory when their phase is over
    micro_batch_tokens: int = 0  # that a rank computes at once; 0: not known, so everything is asked for at once

    @property
    def made(self) -> WorkerGroup[TrainWorker]:
        """The role whose model the stage leaves."""
        return next(iter(self.learners.values()))

    @property
    def sampler(self) -> WorkerGroup[RolloutWorker]:
        """Whoever samples.

        Raises:
            InputError: nobody does.
        """
        if self.rollout is None:
            raise InputError("an algorithm that samples needs a rollout, got roles without one; open them with it")
        return self.rollout

    def group(self, role: str) -> WorkerGroup[TrainWorker] | WorkerGroup[FrozenWorker]:
        """Whoever predicts for a role."""
        return self.frozen[role] if role in self.frozen else self.learners[role]

    def alone(self, role: str) -> bool:
        """Whether nobody else stands in a role's pool."""
        mine = self.group(role).backend
        others = [self.group(name).backend for name in (*self.learners, *self.frozen) if name != role]
        others += [self.rollout.backend] if self.rollout else []
        return not any(other is mine for other in others)

    def early(self, role: str) -> bool:
        """Whether a role may predict while the rollout works: not in its pool; and where roles sleep, so that others
        have the memory, only in a pool of its own.
        """
        return self.group(role).backend is not self.sampler.backend and (not self.sleeps or self.alone(role))

    def rest(self) -> None:
        """The frozen roles have said what the step needs of them: where roles sleep, those that share a pool do until
        the next.
        """
        for role, group in self.frozen.items():
            if self.sleeps and not self.alone(role):
                group.each(FrozenWorker.sleep)

    def fallbacks(self) -> dict[str, str]:
        """Slower ways that the stage's models must go, each with the reason.

        Those of another than the stage's own model are called by its role too: `reward_model/padding`. The reference
        is the policy's model.
        """
        found = self.made.one(TrainWorker.fallbacks)
        if self.rollout is not None:
            found |= self.rollout.one(RolloutWorker.fallbacks)
        for role, group in list(self.learners.items())[1:]:
            found |= _of_role(role, group.one(TrainWorker.fallbacks))
        for role, frozen in self.frozen.items():
            if role != "reference":
                found |= _of_role(role, frozen.one(FrozenWorker.fallbacks))
        return found

    def publish(self, version: PolicyVersion) -> None:
        """From now on the rollout samples with the policy as it is, which is attested.

        Raises:
            IntegrityError: a rollout rank decodes with other weights than were published.
        """
        if self.rollout is not None:
            transport(self.made, self.rollout).publish(version)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write every learner's part of a checkpoint; file name → digest."""
        written = [shards for group in self.learners.values() for shards in group.each(TrainWorker.save, path)]
        return {name: digest for shards in written for name, digest in shards.items()}

    def restore(self, path: Path) -> None:
        """Go on from a verified checkpoint.

        Raises:
            IntegrityError: it does not fit the models.
        """
        for group in self.learners.values():
            group.each(TrainWorker.restore, path)


def _of_role(role: str, found: Mapping[str, str]) -> dict[str, str]:
    return {f"{role}/{name}": f"{role}: {reason}" for name, reason in found.items()}
