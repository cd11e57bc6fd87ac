"""Held-out measurements during training, of a few items: for the learning curve, and for what a stage selects by them.
No gate reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import TokenBatch
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.recipes.answers import Extractor, is_correct, reference_answer
from posttrain.engine.recipes.learning import Learning
from posttrain.engine.recipes.recipe import StepReport
from posttrain.engine.recipes.sampling import Prompt
from posttrain.engine.rollout.batches import PromptBatch
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Trajectory


class LossProbe:
    """That of what learns from rows: its own objective on held-out ones, without dropout.

    Args:
        batch: they.
    """

    price = 0  # nothing is answered or trained on

    def __init__(self, batch: TokenBatch) -> None:
        self._batch = batch

    def __call__(self, learning: Learning, /) -> StepReport:
        """`probe/loss` of the weights as they are, and what the objective reports besides."""
        return StepReport(self.price, learning.measure(self._batch))


class AccuracyProbe:
    """That of what samples: greedy answers to fixed items.

    Args:
        items: prompts whose rows have an `answer`.
        extract: a regular expression with a group; what to compare with it.
        max_new_tokens: per answer.
        stop: strings that an answer ends at.
        name: how errors call the data set.

    Raises:
        InputError: a row has no usable answer.
    """

    def __init__(
        self,
        items: Sequence[Prompt],
        tokenizer: PreTrainedTokenizerBase,
        *,
        extract: str,
        max_new_tokens: int,
        stop: tuple[str, ...] = (),
        name: str = "probe",
    ) -> None:
        self._items, self._tokenizer = items, tokenizer
        self._extract, self._limit, self._stop = Extractor(extract), max_new_tokens, stop
        self._answers = [reference_answer(item.row, name, number) for number, item in enumerate(items, start=1)]
        self.price = sum(len(item.tokens) + max_new_tokens for item in items)

    def __call__(self, rollout: WorkerGroup[RolloutWorker], /) -> StepReport:
        """Greedy accuracy of the weights as they are."""
        prompts = PromptBatch(tuple(tuple(item.tokens) for item in self._items), tuple(range(len(self._items))))
        sampling = SamplingParams(max_new_tokens=self._limit, greedy=True, stop=self._stop)
        found = rollout.map(RolloutWorker.generate, prompts, sampling, 1).trajectories
        answered = zip(found, self._answers, strict=True)
        correct = sum(is_correct(self._extract(self._text(t)), answer) for t, answer in answered)
        tokens = sum(len(t.prompt) + t.generated for t in found)
        return StepReport(tokens, {"probe/accuracy": correct / len(self._items)})

    def _text(self, trajectory: Trajectory) -> str:
        return decode_response(self._tokenizer, trajectory.response.tolist(), ended=trajectory.closed)
