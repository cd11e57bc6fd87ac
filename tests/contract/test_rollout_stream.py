"""The streaming port: every engine of ours runs the suite that others can run, and a hostile engine is found out."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import families
import pytest
import torch

from posttrain.domain.errors import InputError, IntegrityError, JobFailedError, PosttrainError
from posttrain.domain.jobs import Fact
from posttrain.engine.config import GRPOConfig
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import RankContext
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.controller import open_roles
from posttrain.engine.loop.on_policy import OnPolicy
from posttrain.engine.models.backbone import key_value_bytes
from posttrain.engine.models.files import ModelSource
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.recipes.grpo import GRPO
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.contract import RolloutEngineContract
from posttrain.engine.rollout.decoding import StopStrings
from posttrain.engine.rollout.kv_pages import PageStore
from posttrain.engine.rollout.port import Completion, Generation, PromptBatch, RolloutEngine, Rollouts, SamplingParams
from posttrain.engine.rollout.worker import EngineError, RolloutWorker, SilentError, answers, generate
from posttrain.engine.samples import Prompt, Trajectory
from posttrain.engine.trace import Trace
from posttrain.engine.weights.stream import PolicyVersion
from posttrain.jobs.entry import failure_of

PROMPTS = [[5, 4], [7, 8, 9]]
SAMPLING = SamplingParams(max_new_tokens=4)


@cache
def model_of(family: str) -> LanguageModel:
    return adopt_module(families.build(family))


def model_bytes() -> int:
    """Bytes of the keys and values of one position."""
    return key_value_bytes(model_of("qwen3").module) or 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    families.build("qwen3").save_pretrained(folder)
    return ModelSource(folder, "float32")


def scripted(prompt: tuple[int, ...], sample: int) -> list[int]:
    """It goes on behind its end, as a policy would."""
    return [*prompt, *[9] * sample, families.EOS, *[8] * 30]


class TestScripted(RolloutEngineContract):
    tolerance = 0.0
    draws = False
    scores = False
    others = ("judge", "older")

    def open_engine(self) -> RolloutEngine:
        others = {name: lambda prompt, sample: [*prompt[::-1], families.EOS] for name in self.others}
        return ScriptedRollout(scripted, eos_token_id=families.EOS, others=others, pace=1)


class TestModule(RolloutEngineContract):
    def open_engine(self) -> RolloutEngine:
        return ModuleRollout(model_of("qwen3"))


class TestNative(RolloutEngineContract):
    tolerance = 0.0

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(model_of("qwen3"))


class TestNativeWithoutMemory(RolloutEngineContract):
    """Two rows fit; sessions are moved to files."""

    tolerance = 0.0

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(model_of("qwen3"), 80 * model_bytes())


class TestNativeInPages(RolloutEngineContract):
    tolerance = 0.0

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(model_of("qwen3"), store=partial(PageStore, page=4))


class _Reading(RolloutEngineContract):
    def says(self, tokens: Sequence[int]) -> str | None:
        return str(families.tokenizer().decode(list(tokens), skip_special_tokens=False))


class TestScriptedThatReads(_Reading):
    tolerance = 0.0
    draws = False
    scores = False
    streams = False

    def open_engine(self) -> RolloutEngine:
        texts = StopStrings(families.tokenizer())
        return ScriptedRollout(scripted, eos_token_id=families.EOS, texts=texts)


class TestModuleThatReads(_Reading):
    def open_engine(self) -> RolloutEngine:
        return ModuleRollout(model_of("qwen3"), texts=StopStrings(families.tokenizer()))


class TestNativeThatReads(_Reading):
    tolerance = 0.0

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(model_of("qwen3"), texts=StopStrings(families.tokenizer()))


class TestNativeThatReadsRarely(_Reading):
    """Flags are read every 16 steps, as on a GPU; memory is for a few rows, so that the younger are preempted."""

    limit = 30
    turns = 1
    tolerance = 0.0

    def open_engine(self) -> RolloutEngine:
        return NativeRollout(model_of("qwen3"), 40_000, read_every=16, texts=StopStrings(families.tokenizer()))


Twist = Callable[[list[Completion]], list[Completion]]


class HostileRollout(ScriptedRollout):
    """Answers as it should, and then something is done to the answers."""

    def __init__(self, twist: Twist) -> None:
        super().__init__(lambda prompt, sample: [9, 8, 7, 6, 5, 4])
        self._twist = twist
        self.aborted: list[str] = []

    def completed(self, timeout: float) -> list[Completion]:
        return self._twist(super().completed(timeout))

    def abort(self, ids: Collection[str]) -> None:
        self.aborted += ids
        super().abort(ids)


def changed(**fields: Any) -> Twist:
    """The third answer, built with other tokens or log-probabilities."""

    def twist(done: list[Completion]) -> list[Completion]:
        version = next((v for c in done[2:3] for v in c.trajectory.versions), "")
        given: dict[str, Any] = {
            "prompt": PROMPTS[1],
            "tokens": [9, 8, 7, 6],
            "logprobs": [-1.0] * 4,
            "truncated": True,
        }
        given |= {"version": version, **fields}
        return [*done[:2], *(replace(c, trajectory=Trajectory.answer(**given)) for c in done[2:3]), *done[3:]]

    return twist


def never(done: Sequence[Completion]) -> list[Completion]:
    return []


ATTACKS: list[tuple[Twist, type[PosttrainError], str]] = [
    (changed(version="0.7"), IntegrityError, r"sample 0 of prompt 1 must be sampled by policy \(any\), got 0\.7"),
    (
        changed(tokens=[9] * 5, logprobs=[-1.0] * 5),
        EngineError,
        r"sample 0 of prompt 1 must have 1\.\.4 tokens, got 5",
    ),
    (changed(tokens=[], logprobs=[]), EngineError, r"sample 0 of prompt 1 must have 1\.\.4 tokens, got 0"),
    (changed(logprobs=[-1.0, float("nan"), -1.0, -1.0]), JobFailedError, "sample 0 of prompt 1 .* finite .* got nan"),
    (changed(logprobs=[-1.0, float("-inf"), -1.0, -1.0]), JobFailedError, "sample 0 of prompt 1 .* finite .* got -inf"),
    (changed(logprobs=[0.5, -1.0, -1.0, -1.0]), EngineError, "sample 0 of prompt 1 .* <= 0, got 0.5"),
    (
        changed(logprobs=[[-1.0]] * 4),
        EngineError,
        "sample 0 of prompt 1 must have one log-probability a token, got an array of 2 dimensions",
    ),
    (
        changed(prompt=[7, 8]),
        EngineError,
        "sample 0 of prompt 1 must begin with its prompt of 3 tokens, but begins differently",
    ),
    (lambda done: [*done, *done[2:3]], EngineError, "sample once, got sample 0 of prompt 1 twice; fix the engine"),
    (lambda done: [replace(c, id=f"{c.id}9") for c in done], EngineError, r"got \d+\.0\.09, which was not requested"),
    (never, SilentError, "returned no sample within 0 s; waiting: 4, the first is sample 0 of prompt 0"),
    (
        lambda done: [replace(c, trajectory=c.trajectory.ended("aborted")) for c in done],
        EngineError,
        "sample 0 of prompt 0 must have ended by itself or at its limit, got aborted",
    ),
]


@pytest.mark.parametrize(("twist", "kind", "message"), ATTACKS)
def test_a_hostile_engine_is_ended_in_one_line_with_the_sample(
    twist: Twist, kind: type[PosttrainError], message: str
) -> None:
    engine = HostileRollout(twist)
    with pytest.raises(kind, match=message) as caught:
        generate(engine, PROMPTS, samples=2, sampling=SAMPLING, patience=0)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    assert engine.aborted, "what was left in work goes on"


@pytest.mark.parametrize(("twist", "kind", "message"), ATTACKS)
def test_where_it_streams_to_the_loop_the_line_says_role_rank_and_sample(
    twist: Twist,
    kind: type[PosttrainError],
    message: str,
    saved: ModelSource,
) -> None:
    pool = ResourcePool(InlineBackend(pool="rollout"))
    try:
        group = pool.start("rollout", RolloutWorker, saved, HostileRollout(twist), patience=0)
        batch = PromptBatch(tuple(tuple(prompt) for prompt in PROMPTS), (0, 1))
        feed = group.feed(covers, RolloutWorker.feed, batch, SAMPLING, 2)
        with pytest.raises(kind) as caught:
            read_to_the_end(feed)
    finally:
        pool.close()
    failure = failure_of(caught.value)
    classes = {SilentError: "infrastructure", JobFailedError: "diverged"}  # the others are for who brings the engine
    assert failure.kind == classes.get(kind, "bad_input")
    told = failure.message
    assert re.match(f"rollout rank 0: .*{message}".replace(r"\(any\)", r"0\.0"), told)
    assert "\n" not in told


def covers(found: Rollouts) -> tuple[int, list[int], bool]:
    return found.provenance.rank, [group.key for group in found.groups], found.idle


def read_to_the_end(feed: Any) -> None:
    while not feed.ended:
        feed.take(60.0)


@pytest.mark.parametrize("feeds", [False, True])
@pytest.mark.parametrize(
    ("twist", "said"),
    [
        (lambda done: [*done, *done[1:2]], "every sample once, got sample 1 of prompt 388 twice; fix the engine"),
        (changed(logprobs=[0.5, -1.0, -1.0, -1.0]), "the answer to sample 0 of prompt 389 must have log-probabilities"),
        (never, "returned no sample within 0 s; waiting: 4, the first is sample 0 of prompt 388"),
    ],
)
def test_in_a_second_call_the_line_names_its_prompts_and_not_those_of_the_first(
    twist: Twist, said: str, feeds: bool, saved: ModelSource
) -> None:
    looks = 0

    def later(done: list[Completion]) -> list[Completion]:
        nonlocal looks
        looks += 1
        return done if looks == 1 else twist(done)

    calls = [PromptBatch(tuple(map(tuple, PROMPTS)), keys) for keys in ((0, 1), (388, 389))]
    pool = ResourcePool(InlineBackend(pool="rollout"))

    def ask(batch: PromptBatch) -> None:
        if feeds:
            read_to_the_end(group.feed(covers, RolloutWorker.feed, batch, SAMPLING, 2))
        else:
            group.map(RolloutWorker.generate, batch, SAMPLING, 2)

    try:
        group = pool.start("rollout", RolloutWorker, saved, HostileRollout(later), patience=0)
        ask(calls[0])
        with pytest.raises((EngineError, SilentError)) as caught:
            ask(calls[1])
    finally:
        pool.close()
    assert failure_of(caught.value).message.startswith("rollout rank 0: rollout engine scripted")
    assert said in failure_of(caught.value).message


def test_what_comes_late_is_no_answer_to_the_next_call() -> None:
    """The same place of another call has another name."""
    late: list[Completion] = []

    def delayed(done: list[Completion]) -> list[Completion]:
        late.extend(done)
        return [*late[:1], *done]

    engine = HostileRollout(delayed)
    with pytest.raises(EngineError, match="got sample 0 of prompt 0 twice"):
        generate(engine, PROMPTS, samples=2, sampling=SAMPLING)
    late[0] = replace(late[0], trajectory=Trajectory.answer(PROMPTS[1], [1], [-9.0], truncated=True))
    assert len(generate(engine, PROMPTS, samples=2, sampling=SAMPLING)) == 4, "it is passed over"
    alone = [late[0]]
    silent = HostileRollout(lambda done: alone)
    with pytest.raises(SilentError, match="returned no sample within 0 s; waiting: 4"):
        generate(silent, PROMPTS, samples=2, sampling=SAMPLING, patience=0)


def test_an_honest_engine_is_believed() -> None:
    found = generate(HostileRollout(list), PROMPTS, samples=2, sampling=SAMPLING)
    assert [answer.response.tolist() for answer in found] == [[9, 8, 7, 6]] * 4


def test_the_tokens_of_answered_generations_are_forgotten() -> None:
    """While turns follow each other, the call goes on: what it keeps must not grow with their contexts."""
    engine = ScriptedRollout(lambda prompt, sample: (9, 8))
    turns = [[Generation(f"0.{turn}", tuple(range(4, 40 + turn)), 1, SAMPLING, 4)] for turn in range(5)]
    stream = answers(engine, turns[0], "")
    found = next(stream)
    for turn in turns[1:]:
        assert len(found) == 1
        assert stream.gi_frame.f_locals["prompts"] == {}
        found = stream.send(turn)
    stream.close()


def test_a_worker_refuses_answers_of_another_version_than_it_serves() -> None:
    class Stale(ScriptedRollout):
        def update(self, policy: str, version: str, *, in_flight: Any = "finish") -> None:
            super().update(policy, "0.0.0" if version.endswith("4") else version, in_flight=in_flight)

    engine = Stale(lambda prompt, sample: [9, 8, 7])
    context = RankContext()
    context.lend(model_of("qwen3"))
    worker = RolloutWorker(context, engine=engine)
    batch = PromptBatch(((5, 4),), (388,))
    served = PolicyVersion(0, 3)
    worker.samples_with(served)
    assert worker.generate(batch, SAMPLING, 1).trajectories[0].versions == (str(served),)
    worker.samples_with(PolicyVersion(0, 4))
    with pytest.raises(IntegrityError, match=r"sample 0 of prompt 388 must be sampled by policy .*4"):
        worker.generate(batch, SAMPLING, 1)


def test_weights_that_are_read_in_place_change_only_while_paused() -> None:
    engine = ModuleRollout(model_of("qwen3"))
    with pytest.raises(InputError, match=r"reads weights in place and must be paused to update to 0\.3"):
        engine.update("", "0.3")
    engine.pause()
    with pytest.raises(InputError, match="serves the policy in training, got opponent"):
        engine.update("opponent", "0.3")


TRUNCATIONS = [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize(
    "ask", [RolloutWorker.generate, lambda *words: list(RolloutWorker.feed(*words))], ids=["generate", "feed"]
)
def test_training_samples_from_the_whole_distribution(ask: Callable[..., Any], truncation: dict[str, float]) -> None:
    context = RankContext()
    context.lend(model_of("qwen3"))
    worker, batch = RolloutWorker(context), PromptBatch(((5, 4),), (388,))
    assert ask(worker, batch, SAMPLING, 1)
    cut = SamplingParams(max_new_tokens=4, **truncation)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="must sample from the whole distribution"):
        ask(worker, batch, cut, 1)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_both_engines_cut_the_distribution_alike(truncation: dict[str, float]) -> None:
    cut = SamplingParams(max_new_tokens=4, **truncation)  # type: ignore[arg-type]
    native, module = (
        generate(e, PROMPTS, samples=2, sampling=cut)
        for e in (NativeRollout(model_of("qwen3")), ModuleRollout(model_of("qwen3")))
    )
    assert [a.response.tolist() for a in native] == [a.response.tolist() for a in module]


@pytest.mark.parametrize("step", [0, 1])
def test_a_step_of_the_loop_ends_in_the_same_line(saved: ModelSource, step: int) -> None:
    """Through the algorithm's own step; nothing was trained, and nothing of it waits. Prompts are named by their place
    in the data stream.
    """
    config = GRPOConfig(data="d", reward="r", steps=2, prompts_per_step=2, group_size=2, max_new_tokens=4)
    looks = 0

    def twice(done: list[Completion]) -> list[Completion]:
        nonlocal looks
        looks += bool(done)
        return [*done, *done[3:]] if looks > step else done

    engine = HostileRollout(twice)
    pool = ResourcePool(InlineBackend())
    roles = open_roles(config, saved, 11, lambda role: pool, engine=engine)  # type: ignore[arg-type]
    prompts = [Prompt(tuple(prompt)) for prompt in PROMPTS]
    recipe = OnPolicy(config, GRPO(config), roles, prompts, None, 11)
    facts: list[Fact] = []
    for done in range(step):
        recipe.step(done, Trace(facts.append, done))
    before = {name: p.detach().clone() for name, p in roles.made.one(parameters)}
    with pytest.raises(JobFailedError) as caught:
        recipe.step(step, Trace(facts.append, step))
    assert failure_of(caught.value).message == (
        "rollout rank 0: rollout engine scripted must answer every sample once, "
        f"got sample 1 of prompt {2 * step + 1} twice; fix the engine"
    )
    assert all(torch.equal(before[name], p) for name, p in roles.made.one(parameters))
    recipe.rewind()
    assert not recipe._ahead.buffer.pace(step, step).held


def parameters(worker: TrainWorker) -> list[tuple[str, torch.Tensor]]:
    return list(worker.engine.model.module.named_parameters())  # type: ignore[attr-defined]
