"""The loop around an algorithm that samples: what it keeps, replaces, counts and refuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_engine_recipes import PROMPTS, TINY, TOKENIZER, EvenTokens, inline, quiet, scalar, weights

from posttrain.domain.errors import BudgetExceededError, InputError
from posttrain.domain.jobs import Fact, Note, Sample
from posttrain.engine.algorithms.objectives import LossParts, SupervisedObjective, Totals, score_rewards
from posttrain.engine.batch import Document, Need, Predictions, TokenBatch
from posttrain.engine.config import DataflowConfig, GroupConfig, GRPOConfig, PPOConfig
from posttrain.engine.evaluation.evaluate import ProbeSchedule
from posttrain.engine.loop.controller import Controller, Limits, open_roles
from posttrain.engine.loop.on_policy import OnPolicy, engine_metrics
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.recipes.algorithm import Drop, PromptSource, ScoredGroup, Update, pack
from posttrain.engine.recipes.dataflow import Dataflow
from posttrain.engine.recipes.dpo import DPOObjective
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.recipes.policy_gradient import PolicyGradient
from posttrain.engine.recipes.ppo import PPO
from posttrain.engine.roles.learner import DivergedError
from posttrain.engine.roles.training import FrozenWorker, TrainWorker
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedBatch
from posttrain.engine.rollout.batched import BatchedEngine
from posttrain.engine.rollout.port import Completion, Generation, Rollouts
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.scores import ModelScorer
from posttrain.engine.settings import PolicyGradientOptimizerConfig
from posttrain.engine.trace import StepReport, Trace
from posttrain.engine.weights.checkpoint import read_state
from posttrain.pacing.admission import Buffer, InOrder


class Picky(Dataflow):
    """Drops the groups of some places in the data stream, and learns the rest by heart."""

    dropped: frozenset[int] = frozenset({1, 2, 4})
    refills = 2

    def __init__(self, config: DataflowConfig) -> None:
        super().__init__(config)
        self.formed: list[list[int]] = []

    @property
    def source(self) -> PromptSource:
        return replace(super().source, refills=self.refills)

    def keep(self, group: ScoredGroup) -> Drop | None:
        return Drop("not to be learnt") if group.group.key in self.dropped else None

    def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
        self.formed.append([group.group.key for group in groups])
        return pack(groups)

    def updates(self, step: int) -> Sequence[Update]:
        return (Update("policy", SupervisedObjective),)


def stage(algorithm: type[Picky] = Picky, **changes: Any) -> tuple[OnPolicy, Picky]:
    options = {"recipe": "a:b", "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 2}
    optimizer = PolicyGradientOptimizerConfig(learning_rate=2e-2, warmup_steps=1)
    config = DataflowConfig(**{**options, "max_new_tokens": 4, "optimizer": optimizer, **changes})
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    made = algorithm(config)
    return OnPolicy(config, made, roles, PROMPTS, EvenTokens(), 11), made


@pytest.mark.parametrize("cut", [0, 1])
def test_documents_of_an_algorithms_own_are_followed_as_far_as_they_are_those_that_were_sampled(cut: int) -> None:
    """Without log-probabilities there is no ratio; of other tokens than were sampled no number is told."""

    class Own(Picky):
        dropped = frozenset[int]()

        def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
            documents = [Document(a.prompt, a.response[: len(a.response) - cut]) for g in groups for a in g.answers]
            return TokenBatch.pack(documents, sample_ids=[name for group in groups for name in group.ids])

    facts: list[Fact] = []
    stage(Own, trace={"groups": "all"})[0].step(0, Trace(facts.append, 0))
    samples = [fact for fact in facts if isinstance(fact, Sample)]
    assert len(samples) == 6
    for sample in samples:
        assert sample.fate == "update 0, mini-batch 0"
        assert len(sample.logprobs) == (0 if cut else len(sample.tokens))
        assert not len(sample.ratios)
        assert not len(sample.clipped)


@dataclass(frozen=True, slots=True)
class Entropic:
    """Raises the entropy, and reads no log-probability."""

    totals: Totals
    needs: ClassVar[frozenset[Need]] = frozenset({"entropy"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        return LossParts(-predicted.of("entropy").sum() / self.totals.tokens, {})


def test_a_sample_that_was_learnt_from_without_log_probabilities_is_not_said_to_be_dropped() -> None:
    class Unlike(Picky):
        dropped = frozenset[int]()

        def updates(self, step: int) -> Sequence[Update]:
            return (Update("policy", Entropic),)

    facts: list[Fact] = []
    stage(Unlike, trace={"groups": "all"})[0].step(0, Trace(facts.append, 0))
    samples = [fact for fact in facts if isinstance(fact, Sample)]
    assert [sample.fate for sample in samples] == ["update 0, mini-batch 0"] * 6
    assert not any(len(sample.logprobs) or len(sample.ratios) for sample in samples)


def test_what_credit_computes_more_precisely_is_kept_in_float32() -> None:
    """A user's own algorithm hands the rewards of a step, float64, to pure functions."""

    class Exact(Picky):
        dropped = frozenset[int]()

        def credit(self, batch: TokenBatch) -> TokenBatch:
            scores = score_rewards(batch.column("reward"), batch.response_mask, batch.lengths)
            assert scores.dtype == torch.float64
            return batch.with_columns(advantages=scores)

        def updates(self, step: int) -> Sequence[Update]:
            return (Update("policy", Looking),)

    stage(Exact)[0].step(0, quiet(0))


@dataclass(frozen=True, slots=True)
class Looking:
    """A policy gradient that looks at what reaches the ranks."""

    totals: Totals
    needs: ClassVar[frozenset[Need]] = frozenset({"logprobs"})
    denominators: ClassVar[frozenset[str]] = frozenset({"tokens"})

    def __call__(self, micro: TokenBatch, predicted: Predictions, /) -> LossParts:
        assert {column.dtype for column in micro.token_columns.values()} == {torch.float32}
        return LossParts(-(predicted.of("logprobs") * micro.column("advantages")).sum() / self.totals.tokens, {})


def test_dropped_groups_are_replaced_in_the_order_of_the_stream() -> None:
    recipe, picky = stage()
    report = recipe.step(0, quiet(0))
    assert picky.formed == [[0, 3, 5]], "0 1 2, then 3 4 for the two that were dropped, then 5"
    assert recipe.journal.consumed == 6
    assert report.metrics["groups/dropped"] == pytest.approx(3 / 6)
    recipe.step(1, quiet(1))
    assert picky.formed[1] == [6, 7, 8]


def test_after_so_many_rounds_a_step_trains_on_what_there_is() -> None:
    class Never(Picky):
        dropped = frozenset(range(1, 100))

    recipe, never = stage(Never)
    before = weights(recipe)
    recipe.step(0, quiet(0))
    assert (never.formed, recipe.journal.consumed) == ([[0]], 3 + 2 + 2)
    assert any(not torch.equal(before[name], value) for name, value in weights(recipe).items())


def test_everything_sampled_is_counted_and_reserved_before_it_is_asked_for() -> None:
    """And what was kept until then is still to be trained on."""
    asked: list[tuple[int, int]] = []
    kept: list[int] = []  # tokens of the documents

    class Counting(Picky):
        def keep(self, group: ScoredGroup) -> Drop | None:
            verdict = super().keep(group)
            kept.append(0 if verdict else sum(len(answer) for answer in group.answers))
            return verdict

    def reserve(spent: int, more: int, *, refuse: bool = True) -> bool:
        asked.append((spent, more))
        return True

    recipe, _ = stage(Counting)
    spent = recipe.step(0, quiet(0), reserve).tokens
    prompt, limit, samples = 3, 4, 2
    sampled, trained = prompt + samples * limit, samples * (prompt + limit)
    # group 1 is dropped while 2 is in work, 2 while 3 is, and 4 when nothing else is; each time one prompt joins
    for going, there, lacking, (_, more) in zip((1, 1, 0), (1, 1, 4), (2, 2, 1), asked, strict=True):
        assert more == (going + 1) * sampled + sum(kept[:there]) + lacking * trained
    assert 0 < asked[0][0] < asked[1][0] < asked[2][0] < spent
    assert sum(asked[-1]) >= spent, "what nothing was dropped of any more"


class OneByOne(BatchedEngine):
    """Answers one prompt's samples at a time, the newest prompt first, and keeps a record."""

    def __init__(self) -> None:
        super().__init__("one by one", 64, self._answers)
        self.record: list[str] = []

    def submit(self, work: Sequence[Generation]) -> None:
        self.record += [f"begins {key}" for key in dict.fromkeys(one.key for one in work)]
        super().submit(work)

    def completed(self, timeout: float) -> list[Completion]:
        first = [one for one in self._waiting if one.key != 2] or self._waiting  # prompt 2 is the slow one
        self._waiting = [
            *(one for one in first if one.key == first[0].key),
            *(w for w in self._waiting if w.key != first[0].key),
        ]
        return super().completed(timeout)

    def _answers(self, work: Sequence[Generation]) -> ScriptedBatch:
        self.record.append(f"ends {work[0].key}")
        assert len({one.key for one in work}) == 1
        return ScriptedBatch([([7, 2], True, False)] * len(work), -0.5)

    def _holding(self, batch: list[Generation]) -> list[Generation]:
        return [one for one in batch if one.key == self._waiting[0].key]


def test_audit_18_a_replacement_starts_as_soon_as_a_group_is_dropped() -> None:
    """Group 1 is dropped while 2 is decoded: its replacement 3 begins, and ends, before 2 does."""

    class First(Picky):
        dropped = frozenset({1})

    engine = OneByOne()
    options = {"recipe": "a:b", "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 2}
    config = DataflowConfig(**options, max_new_tokens=4)  # type: ignore[arg-type]
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline(), engine=engine)
    picky, scorer = First(config), EvenTokens()
    scorer.groups = lambda prompts, tokens: 1  # type: ignore[method-assign]  # each is scored when it is there
    OnPolicy(config, picky, roles, PROMPTS, scorer, 11).step(0, quiet(0))
    assert picky.formed == [[0, 2, 3]]
    assert engine.record == [
        "begins 0", "begins 1", "begins 2", "ends 0", "ends 1", "begins 3", "ends 3", "ends 2",
    ]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(verdicts=st.lists(st.booleans(), min_size=14, max_size=14), refills=st.integers(0, 3), prompts=st.integers(1, 3))
def test_audit_18_replacing_at_once_trains_the_groups_that_rounds_train(
    verdicts: list[bool], refills: int, prompts: int
) -> None:
    """Against rounds by hand: every round replaces what the one before it dropped, so often at the most."""
    buffer: Buffer[int] = Buffer(InOrder(0), prompts, 1, refills)
    started, judged = 0, 0
    while admitted := buffer.admit(0, 0):
        buffer.start(range(started, started + admitted.count), 0, 0)
        started += admitted.count
        while judged < started:  # in the order of the stream; a dropped group's place is filled before the next verdict
            (buffer.complete(judged, judged) if verdicts[judged] else buffer.drop(judged))
            judged += 1
            if more := buffer.admit(0, 0):
                buffer.start(range(started, started + more.count), 0, 0)
                started += more.count
    found = [key for _, key in buffer.ready()]
    kept, begin, size = list[int](), 0, prompts
    for _ in range(refills + 1):
        kept += [key for key in range(begin, begin + size) if verdicts[key]]
        begin, size = begin + size, sum(not verdicts[key] for key in range(begin, begin + size))
    assert (found, started) == (kept, begin)


def test_what_replaces_a_group_must_be_affordable(tmp_path: Path) -> None:
    recipe, _ = stage()
    price = recipe.max_tokens(0)
    controller = Controller(recipe, tmp_path, "sha256:x", 100, lambda fact: None, limits=Limits(tokens=price + 1))
    before = weights(recipe)
    with pytest.raises(BudgetExceededError, match="replacing dropped groups"):
        controller.run()
    assert 0 < controller.tokens <= price, "what it had sampled is billed"
    assert all(torch.equal(before[name], value) for name, value in weights(recipe).items())


def test_responses_depend_on_the_place_in_the_stream_and_on_nothing_else() -> None:
    """So a group that came in as a replacement says what it would have said in the first place."""

    def answers(algorithm: type[Picky]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}

        class Listening(algorithm):  # type: ignore[misc,valid-type]
            def keep(self, group: ScoredGroup) -> Drop | None:
                found[group.group.key] = [str(answer.response.tolist()) for answer in group.answers]
                verdict: Drop | None = super().keep(group)
                return verdict

            def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
                return None  # the weights stay

        recipe, _ = stage(Listening)
        for step in range(2):
            recipe.step(step, quiet(step))
        return found

    class Content(Picky):
        dropped: frozenset[int] = frozenset()

    picky, content = answers(Picky), answers(Content)
    assert {key: picky[key] for key in range(6)} == {key: content[key] for key in range(6)}


class FixedProbe:
    max_tokens = 40

    def __call__(self, rollout: Any, /) -> StepReport:
        return StepReport(40, {"probe/accuracy": 0.0})


def test_a_replacement_leaves_what_the_last_probe_costs_and_a_checkpoint_from_before_the_step(tmp_path: Path) -> None:
    class Often(Picky):
        dropped: frozenset[int] = frozenset(range(4, 99))

    def run(limit: int) -> Controller:
        recipe, _ = stage(Often, steps=2)
        recipe._probe = ProbeSchedule(FixedProbe(), 99, 2)
        made = Controller(
            recipe, tmp_path / str(limit), "sha256:x", 100, lambda fact: None, limits=Limits(tokens=limit)
        )
        with pytest.raises(BudgetExceededError, match="replacing dropped groups"):
            made.run()
        return made

    recipe, _ = stage(Often, steps=2)
    first = recipe.step(0, quiet(0)).tokens
    price = recipe.max_tokens(1)
    made = run(40 + first + price + 40)  # what the step may cost and the probe after it, and nothing to replace by
    assert made._step == 1, "the step that had begun is not done"
    [saved] = (tmp_path / str(40 + first + price + 40)).glob("step-*")
    state = read_state(saved)
    assert (state.step, state.tokens) == (1, made.tokens)
    assert state.consumed == 3, "as the first step left it"


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_a_judge_that_answers_with_no_number_ends_the_stage(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = judged(kind)
    fill = FrozenWorker.fill

    def nan(self: FrozenWorker, batch: TokenBatch, column: str, need: Any) -> TokenBatch:
        if need == "scores":
            return batch.with_document_columns(scores=torch.full((len(batch),), float("nan")))
        return fill(self, batch, column, need)

    monkeypatch.setattr(FrozenWorker, "fill", nan)
    with pytest.raises(DivergedError, match="must return finite scores, got nan for response 0"):
        recipe.step(0, quiet(0))


def judged(kind: str = "grpo", **changes: Any) -> OnPolicy:
    """Scored by a reward model, without a reference."""
    options = {"data": "d", "reward_model": "r", "steps": 3, "prompts_per_step": 3, "group_size": 2, "kl": None}
    config_type, algorithm = {"grpo": (GRPOConfig, GRPO), "ppo": (PPOConfig, PPO)}[kind]
    config: Any = config_type(**{**options, "max_new_tokens": 4, **changes})
    critic = scalar() if kind == "ppo" else None
    model = adopt_module(initial_model(TINY, TOKENIZER, 0))
    roles = open_roles(config, model, 11, inline(), sources={"critic": critic, "reward_model": scalar(5)})
    made: Any = algorithm
    return OnPolicy(config, made(config), roles, PROMPTS, ModelScorer(roles.frozen["reward_model"], TOKENIZER), 11)


def test_a_judge_sleeps_while_others_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the algorithm asks for no column, and before the first step."""
    told: list[str] = []
    sleep, feed, update = FrozenWorker.sleep, RolloutWorker.feed, TrainWorker.update

    def watched(name: str, real: Any) -> Any:
        @wraps(real)
        def called(*given: Any, **named: Any) -> Any:
            told.append(name)
            return real(*given, **named)

        return called

    def judge(self: FrozenWorker, batch: TokenBatch, column: str, need: Any) -> TokenBatch:
        told.append("score")
        return batch.with_document_columns(scores=torch.arange(len(batch)).float())

    monkeypatch.setattr(FrozenWorker, "fill", judge)
    monkeypatch.setattr(FrozenWorker, "sleep", watched("sleep", sleep))
    monkeypatch.setattr(RolloutWorker, "feed", watched("feed", feed))
    monkeypatch.setattr(TrainWorker, "update", watched("update", update))
    recipe = judged(placement={"sleep": True})
    for step in range(2):
        recipe.step(step, quiet(step))
    asleep = False
    for name in told:
        asleep = {"sleep": True, "score": False}.get(name, asleep)
        assert asleep or name in ("sleep", "score"), told
    calls = [name for name, before in zip(told, [None, *told], strict=False) if name != before]
    assert calls.count("feed") == calls.count("update") == 2


def test_a_sample_of_a_pair_is_followed_on_its_own() -> None:
    class Pairs(PolicyGradient[GroupConfig]):
        """Online DPO."""

        def form(self, groups: Sequence[ScoredGroup], seed: int) -> TokenBatch | None:
            chosen = [(group, i) for group in groups for i in (0, 1)]
            documents = [group.answers[i].document for group, i in chosen]
            return TokenBatch.pack(documents, sample_ids=[group.ids[i] for group, i in chosen], unit=2)

        def updates(self, step: int) -> Sequence[Update]:
            return (Update("policy", partial(DPOObjective, beta=0.1, smoothing=0.0)),)

    options = {"data": "d", "reward": "r", "kl": {"coefficient": 0.1}, "steps": 1, "prompts_per_step": 3}
    config = GroupConfig(**{**options, "group_size": 2, "max_new_tokens": 4})  # type: ignore[arg-type]
    roles = open_roles(config, adopt_module(initial_model(TINY, TOKENIZER, 0)), 11, inline())
    recipe = OnPolicy(config, Pairs(config), roles, PROMPTS, EvenTokens(), 11)
    facts: list[Any] = []
    recipe.step(0, Trace(facts.append, 0))
    followed = [fact for fact in facts if isinstance(fact, Sample)]
    assert [len(fact.logprobs) for fact in followed] == [len(fact.tokens) for fact in followed]
    assert len(followed) == 2


def test_what_several_ranks_counted_is_added_and_nothing_lost() -> None:
    parts = [Rollouts((), counts={"steps": 2, "decoded_tokens": 8, "preemptions": 0}) for _ in range(2)]
    found = Rollouts.gather(parts, [[], []]).counts
    assert found == {"steps": 4, "decoded_tokens": 16, "preemptions": 0}
    assert engine_metrics(found) == {"rollout/rows": 4.0, "rollout/preemptions": 0.0}
    assert engine_metrics({"steps": 3}) == engine_metrics({}) == {}


def test_an_engine_without_counts_is_refused_when_it_is_opened() -> None:
    class Old:
        name, context_length = "old", 8

    model = adopt_module(initial_model(TINY, TOKENIZER, 0))
    config = GRPOConfig(data="d", reward="r", steps=1)
    with pytest.raises(
        InputError, match=r"^rollout engine old lacks holds_sessions, attest, counts, .*port\.RolloutEngine requires"
    ):
        open_roles(config, model, 11, inline(), engine=Old())  # type: ignore[arg-type]


def test_what_the_rollouts_engine_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little memory rows wait, make room and are taken up again; what they say stays."""
    monkeypatch.setattr("posttrain.engine.rollout.kv_slots._FIRST_CLASS", 32)
    found = []

    class All(Picky):
        dropped = frozenset()

    options = {"recipe": "a:b", "data": "d", "reward": "r", "steps": 4, "prompts_per_step": 3, "group_size": 8}
    config = DataflowConfig(**options, max_new_tokens=50)  # type: ignore[arg-type]
    position = 2 * TINY.layers * TINY.kv_heads * TINY.hidden_size // TINY.heads * 4  # bytes
    for cache in (9 * 32 * position, None):
        model = adopt_module(initial_model(TINY, TOKENIZER, 0))
        roles = open_roles(config, model, 11, inline(), engine=NativeRollout(model, kv_cache=cache))
        recipe = OnPolicy(config, All(config), roles, PROMPTS, EvenTokens(), 11)
        told = recipe.step(0, quiet(0)).took
        found.append((told, weights(recipe)))
    (narrow, end), (ample, other) = found
    assert all(torch.equal(value, other[name]) for name, value in end.items())
    assert narrow["rollout/rows"] < ample["rollout/rows"] <= 24
    assert narrow["rollout/preemptions"] > ample["rollout/preemptions"] == 0
    assert narrow["rollout/recomputed_tokens"] > ample["rollout/recomputed_tokens"] == 0
    prompts = sum(len(prompt.tokens) for prompt in PROMPTS[:3])
    assert narrow["rollout/prefilled_tokens"] > ample["rollout/prefilled_tokens"] >= prompts


class TestWhoLearnsIsHeldAgainstWhoSampled:
    """With the same weights both compute the same log-probabilities; else it is told, once."""

    @staticmethod
    def told(
        monkeypatch: pytest.MonkeyPatch, off: float, dtype: torch.dtype = torch.float32
    ) -> tuple[list[str], float]:
        feed = RolloutWorker.feed

        def shifted(self: RolloutWorker, *given: Any, **named: Any) -> Iterator[Rollouts]:
            for found in feed(self, *given, **named):
                for answer in found.trajectories:
                    for segment in answer.segments:
                        if segment.logprobs is not None:
                            segment.logprobs[:] -= off
                yield found

        monkeypatch.setattr(RolloutWorker, "feed", shifted)
        config = GRPOConfig(
            data="d", reward="r", steps=3, prompts_per_step=3, group_size=2, max_new_tokens=8, mini_batches=1
        )
        model = initial_model(TINY, TOKENIZER, 0).to(dtype)
        roles = open_roles(config, adopt_module(model), 11, inline())
        recipe = OnPolicy(config, GRPO(config), roles, PROMPTS, EvenTokens(), 11)
        facts: list[Any] = []
        reports = [recipe.step(step, Trace(facts.append, step)) for step in range(2)]
        notes = [fact.message for fact in facts if isinstance(fact, Note) and fact.level == "warning"]
        return notes, reports[0].metrics["mismatch_kl"]

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_one_that_decodes_as_it_should_is_not_told_of(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
    ) -> None:
        notes, found = self.told(monkeypatch, 0.0, dtype)
        assert notes == []
        assert found < {torch.float32: 1e-9, torch.bfloat16: 1e-3, torch.float16: 1e-5}[dtype]

    @pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 5e-4), (torch.bfloat16, 0.04), (torch.float16, 4e-3)])
    def test_one_that_is_off_by_what_the_rounding_of_its_type_explains_is_not_told_of(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float
    ) -> None:
        notes, found = self.told(monkeypatch, off, dtype)
        assert found == pytest.approx(off * off / 2, rel=0.3)
        assert notes == []

    @pytest.mark.parametrize(("dtype", "off"), [(torch.float32, 3e-3), (torch.bfloat16, 0.08), (torch.float16, 0.02)])
    def test_audit_19_one_that_does_not_is_told_of_once_by_the_threshold_of_its_type(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, off: float
    ) -> None:
        notes, found = self.told(monkeypatch, off, dtype)
        assert found == pytest.approx(off * off / 2, rel=0.15)
        [line] = notes
        assert "must be those of the rollout that sampled" in line
        assert "in step 0 with the same weights" in line
