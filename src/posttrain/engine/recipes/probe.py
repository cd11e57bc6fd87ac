"""Held-out measurements during training, of a few items: for the learning curve, and for what a stage selects by them.
No gate reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from posttrain.engine.batch import Document, Provenance, TokenBatch
from posttrain.engine.groups.worker_group import WorkerGroup
from posttrain.engine.models.chat import decode_response
from posttrain.engine.recipes.answers import Extractor, is_correct, reference_answer
from posttrain.engine.recipes.recipe import StepReport
from posttrain.engine.recipes.reward_model import Preference, paired
from posttrain.engine.recipes.sampling import Prompt
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.batches import PromptBatch
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.samples import Trajectory


class LossProbe:
    """Supervised fine-tuning's: the loss of held-out demonstrations, token mean, without dropout.

    Args:
        documents: prompt and completion tokens; at least one.
    """

    price = 0  # nothing is answered or trained on

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents

    def __call__(self, policy: WorkerGroup[TrainWorker], /) -> StepReport:
        """`probe/loss` of the weights as they are, in nats per completion token."""
        batch = TokenBatch.pack(self._documents, provenance=Provenance(role="policy"))
        found = policy.map(TrainWorker.fill, batch, "logprobs", "logprobs")
        mask = found.response_mask
        total = float(found.column("logprobs")[mask].double().sum())
        return StepReport(self.price, {"probe/loss": -total / int(mask.sum())})


class PairProbe:
    """A reward model's: how many held-out pairs it ranks as they were labelled, and its loss on them.

    Args:
        pairs: at least one.
    """

    price = 0

    def __init__(self, pairs: Sequence[Preference]) -> None:
        self._pairs = pairs

    def __call__(self, reward_model: WorkerGroup[TrainWorker], /) -> StepReport:
        """`probe/accuracy` (a tie is no success, as while training) and `probe/loss`."""
        batch = paired(self._pairs, Provenance(role="reward_model"))
        scores = reward_model.map(TrainWorker.fill, batch, "scores", "scores").column("scores")
        margins = (scores[0::2] - scores[1::2]).double().tolist()
        right = sum(margin > 0 for margin in margins)
        loss = sum(math.log1p(math.exp(-abs(m))) + max(-m, 0.0) for m in margins)  # -log sigma(m), stable
        return StepReport(self.price, {"probe/accuracy": right / len(margins), "probe/loss": loss / len(margins)})


class AccuracyProbe:
    """That of what samples: greedy answers to fixed items.

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

    def __call__(self, rollout: WorkerGroup[RolloutWorker], /) -> StepReport:
        """Greedy accuracy of the weights as they are."""
        prompts = PromptBatch(tuple(tuple(item.tokens) for item in self._items), tuple(range(len(self._items))))
        sampling = SamplingParams(max_new_tokens=self._limit, greedy=True)
        found = rollout.map(RolloutWorker.generate, prompts, sampling, 1).trajectories
        answered = zip(found, self._answers, strict=True)
        correct = sum(is_correct(self._extract(self._text(t)), answer) for t, answer in answered)
        tokens = sum(len(t.prompt) + t.generated for t in found)
        return StepReport(tokens, {"probe/accuracy": correct / len(self._items)})

    def _text(self, trajectory: Trajectory) -> str:
        return decode_response(self._tokenizer, trajectory.response.tolist(), ended=not trajectory.truncated)
