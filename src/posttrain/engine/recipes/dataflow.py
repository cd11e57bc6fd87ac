"""A dataflow of the user's own: a function over the same roles, run by the same controller.

::

    # best_of_n.py, beside run.yaml; the stage says `kind: dataflow` and `recipe: best_of_n:best_of_n`
    def best_of_n(flow: Dataflow, step: int, trace: Trace) -> StepReport: ...

One call is one step. What it does must be a function of (seed, step, weights, journal), as of every recipe; then it is
resumed, budgeted, placed and traced like every other.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from posttrain.domain.errors import InputError
from posttrain.domain.seeds import derive_seed
from posttrain.engine.config import DataflowConfig
from posttrain.engine.journal import Journal
from posttrain.engine.recipes.recipe import StepReport, Trace
from posttrain.engine.recipes.roles import Roles
from posttrain.engine.recipes.sampling import Probe, ProbeSchedule, Prompt, Sampled, Scorer, sample_groups, score_groups
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.weights.view import PolicyVersion


@final
@dataclass(frozen=True, slots=True)
class Dataflow:
    """What a user's dataflow works with."""

    roles: Roles  # worker groups: `flow.roles.policy.map(TrainWorker.update, batch, objective, step=step)`
    journal: Journal  # the data cursor; `take` moves it
    prompts: Sequence[Prompt]  # every row
    settings: Mapping[str, Any]  # the stage's own, as written
    config: DataflowConfig
    seed: int
    scorer: Scorer | None  # the stage's reward, where it has one

    def sample(self, step: int) -> Sampled:
        """The next prompts with `group_size` responses each, scored when the stage has a reward."""
        c = self.config
        sampled = sample_groups(
            self.roles.rollout,
            self.journal,
            self.prompts,
            count=c.prompts_per_step,
            samples=c.group_size,
            sampling=SamplingParams(
                max_new_tokens=c.max_new_tokens,
                temperature=c.temperature,
                seed=derive_seed(self.seed, "dataflow", "rollout", step),
            ),
        )
        return score_groups(sampled, self.scorer) if self.scorer else sampled


Step = Callable[[Dataflow, int, Trace], StepReport]


class CustomDataflow:
    """The recipe around a user's function.

    Args:
        function: one step.
        flow: what it works with.
        probe: the held-out measurement, if there is one.
    """

    phase = "dataflow"

    def __init__(self, function: Step, flow: Dataflow, probe: Probe | None = None) -> None:
        self.steps = flow.config.steps
        self.roles, self.journal = flow.roles, flow.journal
        self._function, self._flow = function, flow
        self._probe = ProbeSchedule.of(probe, flow.config.probe, self.steps)

    def price(self, step: int) -> int:
        """What the stage declares; else every prompt read once, every response at the token limit and trained on."""
        c = self._flow.config
        if c.tokens_per_step is not None:
            return c.tokens_per_step
        prompts = sum(len(self._flow.prompts[row].tokens) for row in self.journal.peek(c.prompts_per_step))
        generated = c.prompts_per_step * c.group_size * c.max_new_tokens
        return prompts + generated + c.group_size * prompts + generated

    def step(self, step: int, trace: Trace) -> StepReport:
        """One call of the function.

        Raises:
            InputError: it spent more tokens than the step may, or returned something else than a report.
        """
        most = self.price(step)
        report = self._function(self._flow, step, trace)
        if not isinstance(report, StepReport):
            raise InputError(f"dataflow must return a StepReport, got {type(report).__name__}; return one")
        if report.tokens > most:
            raise InputError(
                f"dataflow spent {report.tokens} tokens in step {step}, at most {most} were declared; "
                "set tokens_per_step"
            )
        return report

    def serve(self, version: PolicyVersion) -> None:
        """The rollout samples with the weights of the last update."""
        self.roles.publish(version)

    def probe(self, step: int, trace: Trace) -> StepReport | None:
        """Greedy held-out accuracy before the first step, every N steps, and at the end."""
        return self._probe.measure(step, trace, self.roles.rollout)

    def probe_price(self, step: int) -> int:
        """The probe's limit where one is due."""
        return self._probe.price(step)


def load_dataflow(file: Path, entry: str) -> Step:
    """Import a user's module, which runs with the job's own rights, and find its function.

    The folder goes onto the module path, so that worker processes can import what the module defines.

    Args:
        file: `my_module.py`.
        entry: the function's name.

    Raises:
        InputError: the module cannot be imported, or has no such function.
    """
    sys.path.insert(0, str(file.parent))
    try:
        module = importlib.import_module(file.stem)
    except Exception as error:
        raise InputError(f"recipe {file.name} cannot be imported: {type(error).__name__}: {error}; fix it") from error
    function = vars(module).get(entry)
    if not callable(function):
        raise InputError(f"recipe {file.name} must define a function {entry}, got none; check the stage's recipe")
    found: Step = function
    return found
