"""Held-out accuracy during training: greedy answers to a few items, for the learning curve. No gate reads it."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.recipes.answers import Extractor, is_correct, reference_answer
from posttrain.engine.recipes.recipe import StepReport
from posttrain.engine.recipes.sampling import Prompt
from posttrain.engine.rollout.batches import PromptBatch
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker


class AccuracyProbe:
    """GRPO's `Probe` over fixed items.

    Args:
        items: prompts whose rows have an `answer`.
        extract: a regular expression with a group; what to compare with it.
        max_new_tokens: per answer.
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
        name: str = "probe",
    ) -> None:
        self._items, self._tokenizer = items, tokenizer
        self._extract, self._limit = Extractor(extract), max_new_tokens
        self._answers = [reference_answer(item.row, name, number) for number, item in enumerate(items, start=1)]
        self.price = sum(len(item.tokens) + max_new_tokens for item in items)

    def __call__(self, rollout: WorkerGroup[RolloutWorker]) -> StepReport:
        """Greedy accuracy of the weights as they are."""
        prompts = PromptBatch(tuple(tuple(item.tokens) for item in self._items), tuple(range(len(self._items))))
        sampling = SamplingParams(max_new_tokens=self._limit, greedy=True)
        found = rollout.map(RolloutWorker.generate, prompts, sampling, 1).trajectories
        correct = sum(
            is_correct(self._extract(decode_response(self._tokenizer, t.tokens, ended=not t.truncated)), answer)
            for t, answer in zip(found, self._answers, strict=True)
        )
        tokens = sum(len(t.prompt) + len(t.tokens) for t in found)
        return StepReport(tokens, {"probe/accuracy": correct / len(self._items)})
