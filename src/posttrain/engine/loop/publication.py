"""Publication of the policy's weights to the rollout with attestation, and the set of a stage's roles.

::

    policy ranks                          controller                     rollout ranks
    attest: hash of own shards  ────────▶ sum: the expected hash
    bucket 0, 1, …  ──── object store, or rank to rank ────────────────▶ copied into place
                                          compare ◀──────────────────── attest: hash of the decoder's weights
    fill: scores of texts       ────────▶ verdict ◀──────────────────── probe: the engine's scores of these texts

One version is published at a time, while no rank samples. If the hashes differ, the rollout's weights match no version,
so the job fails, and the next attempt continues from the last checkpoint.

The last line of the diagram is only for an engine that exposes no tensors (`weights.probe`). The hash is then of the
tensors from which the engine takes its weights. The texts are the first prompts of the stage's data. The policy's
scores of the version before are those of its publication; an attempt that continues from a checkpoint has none, so the
verdict on its first publication is `undecided`.

A rank that is replaced during a transfer lacks the earlier buckets, so the transfer starts again for all ranks. A rank
that is replaced later gets the weights from a rank that samples with them or, if the policy has not learned since the
publication, from the policy, and attests the weights in the same way.

`Roles` contains the roles of a stage, each a worker group, and the operations on all roles. The code that opens the
roles decides in which processes they run; this module does not depend on that choice.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, final

import torch

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.port import WorkerLostError, nothing
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.sharding import Layout
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.probe import Attested, Challenge, Probe, tolerance, weakest
from posttrain.engine.weights.stream import Attestation, AttestedWeights, Bucket, PolicyVersion

# a group that has the published weights, and the methods of its workers that attest and return the weights in buckets
_Giver = tuple[WorkerGroup[Any], Callable[[Any, Layout], tuple[Attestation, int]], Callable[[Any], Bucket]]


@final
@dataclass(slots=True)
class Prober:
    """Attests engines that expose no tensors.

    Args:
        texts: the challenge, the same at every publication of a stage.
    """

    texts: Challenge = ()
    _latest: Probe | None = None
    _oldest: Probe | None = None  # of the last decided verdict, or the first

    def verdict(
        self,
        policy: WorkerGroup[TrainWorker],
        rollout: WorkerGroup[RolloutWorker],
        version: PolicyVersion,
        ranks: Collection[int],
    ) -> Attested:
        """Return the weakest verdict on these ranks of the rollout, which sample with `version`.

        Raises:
            IntegrityError: the engine of a rank decodes with different weights.
            InputError: there are no texts.
        """
        if self._latest is None or self._latest.version != version:
            self._latest = self._pose(policy, rollout, version)
        found, probe = rollout.at(ranks).each(RolloutWorker.probe, self.texts), self._latest
        told = weakest(probe.verdict(f"rollout rank {rank}", one) for rank, one in zip(ranks, found, strict=True))
        self._oldest = self._latest if told == "probe" or self._oldest is None else self._oldest
        return told

    def _pose(
        self, policy: WorkerGroup[TrainWorker], rollout: WorkerGroup[RolloutWorker], version: PolicyVersion
    ) -> Probe:
        batch = TokenBatch.pack([Document(text[:1], text[1:], temperature=1.0) for text in self.texts])
        filled = policy.map(TrainWorker.fill, batch, "now", "logprobs").column("now")
        now = filled[batch.response_mask].cpu().double().numpy()
        dtypes = {entry.dtype for entry in rollout.one(RolloutWorker.layout) if entry.dtype.is_floating_point}
        rounding = tolerance(max(policy.one(TrainWorker.epsilon), *(torch.finfo(dtype).eps for dtype in dtypes)))
        known = {one.version: one.now for one in (self._latest, self._oldest) if one}
        return Probe(version, now, list(known.items()), rounding)


@final
@dataclass(frozen=True, slots=True)
class Alias:
    """The rollout reads the policy's memory: nothing is transferred."""

    policy: WorkerGroup[TrainWorker]
    rollout: WorkerGroup[RolloutWorker]
    prober: Prober

    def publish(self, version: PolicyVersion) -> Attested:
        """Publish the current policy: the rollout samples with it from now on.

        Raises:
            IntegrityError: a rollout rank decodes with different weights.
        """
        found = self.rollout.each(RolloutWorker.samples_with, version)
        if probed := [rank for rank, attested in enumerate(found) if attested == "probe"]:
            found.append(self.prober.verdict(self.policy, self.rollout, version, probed))
        return weakest(found)


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """Shards are transferred in buckets, between the ranks of one process group or through the object store."""

    policy: WorkerGroup[TrainWorker]
    rollout: WorkerGroup[RolloutWorker]
    neighbours: bool  # whether the rollout's ranks run in the policy's processes
    prober: Prober

    def publish(self, version: PolicyVersion) -> Attested:
        """See `Alias.publish`."""
        published, ranks = None, range(self.rollout.ranks)
        while published is None:
            try:
                published = self._carry(version, self._learned, ranks)
            except WorkerLostError as lost:
                self.rollout.replacing.replace(lost)
        self.rollout.replacing.restore = partial(self._restore, version, published[0])
        return published[1]

    @property
    def _learned(self) -> _Giver:
        return (self.policy, TrainWorker.attest, TrainWorker.bucket)

    def _restore(self, version: PolicyVersion, published: Attestation, ranks: Collection[int]) -> None:
        """Transfer the published weights to replaced ranks.

        Raises:
            WorkerLostError: no process has these weights.
        """
        others = [rank for rank in range(self.rollout.ranks) if rank not in ranks]
        sampler = (self.rollout.at(others[:1]), RolloutWorker.offer, RolloutWorker.bucket)
        self._carry(version, sampler if others else self._learned, ranks, published)

    def _carry(
        self, version: PolicyVersion, giver: _Giver, ranks: Collection[int], published: Attestation | None = None
    ) -> tuple[Attestation, Attested]:
        """Transfer weights from the giver to these ranks of the rollout; return their attestation and the verdict.

        Args:
            published: the required attestation; None: the attestation of the giver.
        """
        readers = self.rollout.at(ranks)
        layout, (group, attest, bucket) = readers.one(RolloutWorker.layout), giver
        offers = group.each(attest, layout)
        expected, count = Attestation(), max(count for _, count in offers)
        for attested, _ in offers:
            expected = expected + attested
        if expected != (published or expected):
            raise WorkerLostError(
                f"no process still has the weights of policy version {version}, with which the lost ranks "
                f"{sorted(ranks)} of the rollout sampled; resume from the last checkpoint"
            )
        self._complete(expected, layout)
        if self.neighbours:
            readers.each(RolloutWorker.exchange, count)
        else:
            for _ in range(count):
                readers.each(RolloutWorker.take, group.each_stored(bucket))
        found = list(zip(ranks, readers.each(RolloutWorker.attest), strict=True))
        for rank, loaded in found:
            self._compare(version, rank, expected, loaded)
        readers.each(RolloutWorker.accept, version, expected)
        probed = [rank for rank, loaded in found if not loaded.exact]
        return expected, self.prober.verdict(self.policy, self.rollout, version, probed) if probed else "exact"

    def _complete(self, expected: Attestation, layout: Layout) -> None:
        missing = {entry.name for entry in layout} ^ expected.parts.keys()
        if missing:
            raise IntegrityError(
                f"{self.policy.role} must publish the {len(layout)} tensors that the rollout decodes with, got a "
                f"mismatch at {min(missing)}; give both roles the same model"
            )

    def _compare(self, version: PolicyVersion, rank: int, expected: Attestation, loaded: AttestedWeights) -> None:
        odd = loaded.found.differing(expected)
        if not odd:
            return
        skipped = f"the weights have not changed since version {loaded.before}: an update was skipped"
        why = "the weights were altered on the way" if loaded.changed else skipped
        raise IntegrityError(
            f"rollout rank {rank} must decode with policy version {version} ({expected}, {len(expected.parts)} "
            f"tensors), got {loaded.found}: {len(odd)} tensors differ, first {odd[0]}; {why}; resume from the last "
            "checkpoint"
        )


# A transport uses at most one bucket of extra memory on each rank; afterwards the rollout has the policy's weights,
# or the transport has raised
WeightTransport = Alias | Buckets


def transport(
    policy: WorkerGroup[TrainWorker], rollout: WorkerGroup[RolloutWorker], prober: Prober | None = None
) -> WeightTransport:
    """Return the transport between two roles, according to their placement.

    A rank that is replaced after this call gets its weights with the next published version.
    """
    rollout.replacing.restore = nothing
    view, prober = rollout.one(RolloutWorker.view), prober or Prober()
    return Alias(policy, rollout, prober) if view == "alias" else Buckets(policy, rollout, view == "neighbour", prober)


@final
@dataclass(frozen=True, slots=True)
class Roles:
    """The roles of an algorithm: `roles.learners["policy"].map(TrainWorker.update, batch, objective, step=3)`.

    The groups of ranks have separate or shared devices.
    """

    learners: Mapping[str, WorkerGroup[TrainWorker]]  # the model of the first learner is the stage's output
    frozen: Mapping[str, WorkerGroup[FrozenWorker]] = field(default_factory=dict)
    rollout: WorkerGroup[RolloutWorker] | None = None
    sleeps: bool = False  # whether frozen roles free their memory when their phase is over
    micro_batch_tokens: int = 0  # per rank; 0: unknown, so all documents are requested in one call
    prober: Prober = field(default_factory=Prober)
    recalled: Mapping[str, WorkerGroup[TrainWorker]] = field(default_factory=dict)  # role → learner that has its start

    @property
    def made(self) -> WorkerGroup[TrainWorker]:
        """The role whose model the stage outputs."""
        return next(iter(self.learners.values()))

    @property
    def sampler(self) -> WorkerGroup[RolloutWorker]:
        """The rollout.

        Raises:
            InputError: the stage has no rollout.
        """
        if self.rollout is None:
            raise InputError("an algorithm that samples needs the role rollout, but it was not opened; open it")
        return self.rollout

    def group(self, role: str) -> WorkerGroup[TrainWorker] | WorkerGroup[FrozenWorker]:
        """Return the worker group of a role that predicts."""
        return self.frozen[role] if role in self.frozen else {**self.learners, **self.recalled}[role]

    def alone(self, role: str) -> bool:
        """Return whether no other role is in a role's pool."""
        mine = self.group(role).backend
        others = [self.group(name).backend for name in (*self.learners, *self.frozen) if name != role]
        others += [self.rollout.backend] if self.rollout else []
        return not any(other is mine for other in others)

    def early(self, role: str) -> bool:
        """Return whether a role may predict while the rollout works.

        The role must not be in the rollout's pool; if roles sleep to free memory, the role must be alone in its pool.
        """
        return self.group(role).backend is not self.sampler.backend and (not self.sleeps or self.alone(role))

    def rest(self) -> None:
        """End the frozen roles' predictions of this step.

        If roles sleep to free memory, the roles that share a pool sleep until the next step.
        """
        for role, group in self.frozen.items():
            if self.sleeps and not self.alone(role):
                group.each(FrozenWorker.sleep)

    def fallbacks(self) -> dict[str, str]:
        """Return the slower paths that the stage's models use, each with the reason.

        For models other than the stage's, the role is a prefix: `reward_model/padding`. The reference is the policy's
        model.
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

    def publish(self, version: PolicyVersion) -> Attested:
        """Publish the current policy: the rollout samples with it from now on, after attesting the weights.

        Raises:
            IntegrityError: a rollout rank decodes with weights that differ from the published weights.
            InputError: see `Prober.verdict`.
        """
        return transport(self.made, self.sampler, self.prober).publish(version)

    def save(self, path: Path) -> Mapping[str, str]:
        """Write every learner's part of a checkpoint; return a map from file name to digest."""
        written = [shards for group in self.learners.values() for shards in group.each(TrainWorker.save, path)]
        return {name: digest for shards in written for name, digest in shards.items()}

    def restore(self, path: Path) -> None:
        """Continue from a verified checkpoint.

        Raises:
            IntegrityError: the checkpoint does not fit the models.
        """
        for group in self.learners.values():
            group.each(TrainWorker.restore, path)


def _of_role(role: str, found: Mapping[str, str]) -> dict[str, str]:
    return {f"{role}/{name}": f"{role}: {reason}" for name, reason in found.items()}
