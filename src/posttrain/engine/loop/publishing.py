"""Carrying the policy's weights to whoever samples, and the proof that they arrived.

::

    policy ranks                          controller                     rollout ranks
    attest: hash of own shards  ────────▶ sum: what must be found
    bucket 0, 1, …  ──── object store, or rank to rank ────────────────▶ copied into place
                                          compare ◀──────────────────── attest: hash of the views decoded with

One version is published at a time, while nobody samples. What differs is refused: the rollout is left with weights that
are no version's, so the job ends and goes on from its last checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

from posttrain.domain.errors import IntegrityError
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.exported import Layout
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.attestation import Attestation
from posttrain.engine.weights.view import PolicyVersion, Standing


class WeightTransport(Protocol):
    """How weights come from a policy to a rollout. Every implementation takes one bucket of extra memory at the most
    at each rank, and leaves the rollout with what the policy attested or raises.
    """

    def publish(self, version: PolicyVersion) -> None:
        """From now on the rollout samples with the policy as it is.

        Raises:
            IntegrityError: a rollout rank decodes with something else.
        """


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """The rollout reads the policy's memory: nothing is carried."""

    rollout: WorkerGroup[RolloutWorker]

    def publish(self, version: PolicyVersion) -> None:
        """See `WeightTransport`."""
        self.rollout.each(RolloutWorker.samples_with, version)


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """Shards in buckets: from rank to rank of one process group, or through the object store."""

    policy: WorkerGroup[TrainWorker]
    rollout: WorkerGroup[RolloutWorker]
    neighbours: bool  # the rollout's ranks stand beside the policy's

    def publish(self, version: PolicyVersion) -> None:
        """See `WeightTransport`."""
        layout = self.rollout.one(RolloutWorker.layout)
        offers = self.policy.each(TrainWorker.attest, layout)
        expected, count = Attestation(), max(count for _, count in offers)
        for attested, _ in offers:
            expected = expected + attested
        self._complete(expected, layout)
        if self.neighbours:
            self.rollout.each(RolloutWorker.exchange, count)
        else:
            for _ in range(count):
                self.rollout.each(RolloutWorker.take, self.policy.each_stored(TrainWorker.bucket))
        for rank, standing in enumerate(self.rollout.each(RolloutWorker.attest)):
            self._compare(version, rank, expected, standing)
        self.rollout.each(RolloutWorker.accept, version, expected)

    def _complete(self, expected: Attestation, layout: Layout) -> None:
        missing = {entry.name for entry in layout} ^ expected.parts.keys()
        if missing:
            raise IntegrityError(
                f"{self.policy.role} must publish the {len(layout)} tensors that the rollout decodes with, got a "
                f"mismatch at {min(missing)}; give both roles the same model"
            )

    def _compare(self, version: PolicyVersion, rank: int, expected: Attestation, standing: Standing) -> None:
        odd = standing.found.differing(expected)
        if not odd:
            return
        if standing.changed:
            why = "the weights were altered on the way"
        else:
            why = f"nothing changed since it served {standing.before}, an update was skipped"
        raise IntegrityError(
            f"rollout rank {rank} must decode with policy version {version} ({expected}, {len(expected.parts)} "
            f"tensors), got {standing.found}: {len(odd)} tensors differ, first {odd[0]}; {why}; resume from the last "
            "checkpoint"
        )


def transport(policy: WorkerGroup[TrainWorker], rollout: WorkerGroup[RolloutWorker]) -> WeightTransport:
    """The way between two roles, by where they stand."""
    view = rollout.one(RolloutWorker.view)
    return Alias(rollout) if view == "alias" else Buckets(policy, rollout, view == "neighbour")
