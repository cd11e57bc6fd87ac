"""Rollout engines that decode with other weights than they show, or update otherwise than they are asked to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

import families
import numpy as np
from broken_rollouts import Honest, model
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.models.sharding import module_views
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import Completion, Generation, InFlight, Proof
from posttrain.engine.samples import Floats, Trajectory


class Undaunted(Honest):
    """Says something, also where the policy says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._asked: list[Generation] = []

    def submit(self, work: Sequence[Generation]) -> None:
        self._asked = list(work)
        self._inner.submit(work)

    def completed(self, timeout: float) -> list[Completion]:
        try:
            return self._inner.completed(timeout)
        except JobFailedError:
            some = {"tokens": [9], "logprobs": [0.0], "truncated": True}
            return [Completion(one.id, Trajectory.answer(one.tokens, **some)) for one in self._asked]  # type: ignore[arg-type]


class Copying(Honest):
    """Shows the module's tensors, and decodes with a copy of them."""

    def __init__(self) -> None:
        self._inner = NativeRollout(adopt_module(deepcopy(model().module)))

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        return Proof(module_views(model().module))


class Unfusing(Honest):
    """Shows a copy of one tensor, made for the looks of it."""

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        return Proof(self._copied(self._inner._weights.views()))

    def _copied(self, views: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, held in views:
            yield name, held.clone() if name.endswith("1.mlp.up_proj.weight") else held


class Frozen(Honest):
    """Keeps the norm's weights that it was opened with beside those that it shows."""

    def __init__(self) -> None:
        super().__init__()
        self._shown = self._inner._weights
        norm = self._shown.final_norm.clone()
        self._inner._decoder._weights = replace(self._shown, final_norm=norm)

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        return Proof(self._shown.views())


class Hidden(Honest):
    """Exposes no tensors, and keeps every promise."""

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        return Proof(logprobs=[self.proven(one.logprobs) for one in self._inner.score(challenge)])

    def proven(self, logprobs: Floats) -> Floats:
        return logprobs


class Keeping(Hidden):
    """Reports every version, and keeps the weights that it was opened with."""

    def __init__(self) -> None:
        self._own = adopt_module(deepcopy(model().module))
        self._inner = NativeRollout(self._own)


class Halfway(Keeping):
    """Loads a version without its last layer."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        own = dict(self._own.module.named_parameters())
        for name, held in model().module.named_parameters():
            if ".layers.1." not in name:
                own[name].data.copy_(held)
        self._inner.update(policy, version, in_flight=in_flight)


class Unrelated(Hidden):
    """Has random weights."""

    def __init__(self) -> None:
        self._inner = NativeRollout(adopt_module(families.build("qwen3", seed=9)))


class Undefined(Hidden):
    """Answers a challenge with NaN."""

    def proven(self, logprobs: Floats) -> Floats:
        return logprobs * np.float32(np.nan)


class Curt(Hidden):
    """Leaves out the token that has no log-probability."""

    def proven(self, logprobs: Floats) -> Floats:
        return logprobs[1:]


class Imitating(Hidden):
    """Proves the weights of the policy, and decodes with others."""

    def __init__(self) -> None:
        super().__init__()
        self._truth = self._inner
        self._inner = Unrelated()._inner

    def attest(self, challenge: Sequence[Sequence[int]]) -> Proof:
        return Proof(logprobs=[one.logprobs for one in self._truth.score(challenge)])


class Updating(Honest):
    """Does something else with an update."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        self._inner.update(policy, version, in_flight=self.way(in_flight))

    def way(self, in_flight: InFlight) -> InFlight:
        return in_flight


class Hasty(Updating):
    """Takes an update at any time."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        paused = self._inner._intake.paused
        self._inner.pause()
        self._inner.update(policy, version, in_flight=in_flight)
        if not paused:
            self._inner.resume()


class Anybody(Updating):
    """Takes an update of any policy for its own."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        self._inner.update("", version, in_flight=in_flight)


class Lenient(Updating):
    """Takes an update to finish what has begun, which it cannot."""

    def way(self, in_flight: InFlight) -> InFlight:
        return "keep_kv" if in_flight == "finish" else in_flight


class Overtaken(Lenient, Hasty):
    """Would have weights of its own, and finishes with those of the next version."""

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        Hasty.update(self, policy, version, in_flight=self.way(in_flight))


class Lazy(Updating):
    """Never computes anything again."""

    def way(self, in_flight: InFlight) -> InFlight:
        return "keep_kv" if in_flight == "recompute" else in_flight


class Diligent(Updating):
    """Always computes everything again."""

    def way(self, in_flight: InFlight) -> InFlight:
        return "recompute" if in_flight == "keep_kv" else in_flight


class Claiming(Updating):
    """Says of a whole response that its last version sampled it."""

    def completed(self, timeout: float) -> list[Completion]:
        return [claimed(done, -1) for done in self._inner.completed(timeout)]


class Nostalgic(Updating):
    """Says of a whole response that its first version sampled it."""

    def completed(self, timeout: float) -> list[Completion]:
        return [claimed(done, 0) for done in self._inner.completed(timeout)]


def claimed(done: Completion, which: int) -> Completion:
    """The same answer, all of one of its versions."""
    versions = done.trajectory.versions or ("",)
    return Completion(done.id, done.trajectory.sampled_with(version=versions[which]))
