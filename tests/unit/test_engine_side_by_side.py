"""Learners in pools of their own learn side by side: all are asked before any answer is waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk, FixedScorer, even_tokens

from posttrain.domain.errors import DeadlineError
from posttrain.engine.config import PPOConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import Answer, Call
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.files import ModelSource, ScalarSource, initial_model
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.settings import PolicyGradientOptimizerConfig

LEARNERS = ("critic", "policy")


class Meeting:
    """Updates that no learner answers before every learner was asked for its own of that number.

    Whoever waits for one earlier would wait for ever: the deadline is over at once then.
    """

    def __init__(self) -> None:
        self.asked = dict.fromkeys(LEARNERS, 0)
        self.events: list[tuple[str, str]] = []

    def missing(self, number: int) -> list[str]:
        """Who was not asked so often yet."""
        return [role for role, count in self.asked.items() if count < number]

    def hold(self, backend: InlineBackend) -> None:
        """Keep back the updates of a backend, whose methods are replaced."""
        submit, wait = backend.submit, backend.wait

        def submitted(
            role: str, ranks: Sequence[int], method: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> list[Any]:
            if method is not TrainWorker.update:
                return submit(role, ranks, method, args, kwargs)
            self.asked[role] += 1
            self.events.append(("asked", role))
            return [Held(self, role, r, partial(submit, role, [r], method, args, kwargs)) for r in ranks]

        def waited(calls: Sequence[Any], timeout: float) -> list[Answer[Any]]:
            return wait([call.met(timeout) if isinstance(call, Held) else call for call in calls], timeout)

        backend.submit, backend.wait = submitted, waited  # type: ignore[method-assign]


class Held:
    """A call that is carried out when somebody waits for it, and everybody has met."""

    method = "update"

    def __init__(self, meeting: Meeting, role: str, rank: int, run: Callable[[], list[Call[Any]]]) -> None:
        self.role, self.rank = role, rank
        self._meeting, self._number, self._run = meeting, meeting.asked[role], run

    def done(self) -> bool:
        return not self._meeting.missing(self._number)

    def answered(self) -> None:
        """Nobody has fetched it."""

    def met(self, timeout: float) -> Call[Any]:
        late = self._meeting.missing(self._number)
        if late:
            raise DeadlineError(
                f"{self.role} must answer update {self._number} within {timeout:g} seconds, and does not before "
                f"{' and '.join(late)} was asked for its own"
            )
        self._meeting.events.append(("taken", self.role))
        [call] = self._run()
        return call


@pytest.mark.parametrize("lag", [0, 1])
def test_every_learner_is_asked_before_any_answer_is_taken(tmp_path: Path, lag: int) -> None:
    """With a lag something else is looked at meanwhile, between the looks at an update."""
    folder, meeting = tmp_path / "model", Meeting()
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    pools: dict[str, ResourcePool] = {}
    for name in (*LEARNERS, "rollout", "reference"):
        backend = InlineBackend(pool=name)
        meeting.hold(backend)
        pools[name] = ResourcePool(backend)
    steps, parts, passes = 2, 2, 2
    config = PPOConfig(
        data="d", reward="r", steps=steps, prompts_per_step=3, group_size=4, max_new_tokens=4, mini_batches=parts,
        ppo_epochs=passes, placement={name: {"cpus": 1} for name in pools}, lag={"steps": lag} if lag else None,
        optimizer=PolicyGradientOptimizerConfig(learning_rate=2e-2),
    )  # fmt: skip
    model, critic = ModelSource(folder, "float32"), ScalarSource(folder, "float32")
    roles = open_roles(config, model, 11, lambda role: pools[role], sources={"critic": critic})
    Desk(tmp_path, OnPolicy(config, PPO(config), roles, PROMPTS, FixedScorer(even_tokens), 11)).run()
    updates = steps * parts * passes
    assert [what for what, _ in meeting.events] == ["asked", "asked", "taken", "taken"] * updates
    assert Counter(meeting.events) == {(what, role): updates for what in ("asked", "taken") for role in LEARNERS}
