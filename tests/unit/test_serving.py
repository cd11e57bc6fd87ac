"""A served model without an engine: turns, texts that grow, the switch of releases, and the orders of an engine."""

from __future__ import annotations

import asyncio
import json
import pickle
import queue
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

from posttrain.domain.errors import BusyError, InputError, IntegrityError, JobFailedError
from posttrain.engine.config import InitModelConfig
from posttrain.engine.models.adapters import write_adapter
from posttrain.engine.models.files import character_tokenizer, initial_model, load_tokenizer
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import NotFiniteError, RolloutEngine
from posttrain.engine.rollout.worker import open_rollout
from posttrain.jobs.bodies.serving import END, Serving, _keep as keep
from posttrain.serving import engines, service
from posttrain.serving.app import Limits, Spending, Turns
from posttrain.serving.engines import EngineLostError, EngineProcess, Models, Release, Served
from posttrain.serving.texts import Growing, Texts
from posttrain.serving.wire import asked_completion

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1] / "contract")
)  # a tokenizer whose characters take several tokens
import families


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Texts:
    folder = tmp_path_factory.mktemp("tokenizer")
    families.tokenizer().save_pretrained(folder)
    return Texts(folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_engine_and_server_read_a_tokenizer_alike(architecture: Any, tmp_path: Path) -> None:
    """`AutoTokenizer` of transformers would give a qwen2 model the rules of Qwen2's tokenizer."""
    config = InitModelConfig(architecture=architecture, hidden_size=16, intermediate_size=16, layers=1)
    tokenizer = character_tokenizer(config.characters)
    initial_model(config, tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    text = "Q: sort 31\nA:"
    found = load_tokenizer(tmp_path).encode(text, add_special_tokens=False)
    assert list(Texts(tmp_path).encode(text, special=False)) == found
    assert len(found) == len(text)


# --- texts ------------------------------------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, families.VOCABULARY - 1), min_size=1, max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=6),
    stop=st.lists(st.sampled_from(["the", "answer", ">", "é", "€", "</s>", "</", "a a", "\n", "<s>the"]), max_size=3),
    skip=st.booleans(),
)
def test_a_text_in_pieces_is_the_text(
    texts: Texts, tokens: list[int], cuts: list[int], stop: list[str], skip: bool
) -> None:
    """Every piece is the beginning of the rest, also where a stop string cuts it off."""
    by = "truncated"
    for count in range(1, len(tokens) + 1):  # as the engine finds a stop string
        if any(one in texts.decode(tokens[:count]) for one in stop):
            tokens, by = tokens[:count], "string"
            break
    growing, said, begin = Growing(texts, stop, skip_special=skip), "", 0
    for cut in sorted({cut for cut in cuts if cut < len(tokens)}):
        said += growing.add(tokens[begin:cut])
        begin = cut
    said += growing.end(tokens[begin:], by)
    whole = Growing(texts, stop, skip_special=skip).end(tokens, by)
    assert said == whole
    if by == "truncated":
        assert whole == texts.decode(tokens, skip_special=skip)
    elif not skip:
        assert texts.decode(tokens).startswith(whole)
        assert not any(one in whole for one in stop)


@pytest.mark.parametrize("skip", [True, False])
def test_a_stop_string_of_several_tokens_is_held_back_and_cut_off(texts: Texts, skip: bool) -> None:
    special, a, b, c = families.tokenizer().convert_tokens_to_ids(["</s>", "a", "b", "c"])
    for stop, tokens, shown in (
        (["bc"], [a, b, c], "a"),
        (["abc"], [a, b, c], ""),
        (["bc"], [special, a, special, b, c], "a" if skip else "</s>a</s>"),
        (["c"], [special, special, special, c], "" if skip else "</s></s></s>"),
    ):
        growing = Growing(texts, stop, skip_special=skip)
        pieces = [*(growing.add([token]) for token in tokens[:-1]), growing.end(tokens[-1:], "string")]
        assert "".join(pieces) == shown, (stop, tokens)


def test_long_conversations_use_up_no_time_of_others(tmp_path: Path) -> None:
    tokenizer = families.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    made = Texts(tmp_path, 8)
    made._plan._spent = 1e6
    assert made.chat([{"role": "user", "content": "the"}], None, generate=True)
    with pytest.raises(InputError, match="got 9 tokens; shorten"):
        made.refuse_long([1] * 9, "prompt")


def test_tokens_of_one_text_have_names_of_their_own(texts: Texts) -> None:
    names = [texts.name(token) for token in range(families.VOCABULARY)]
    assert len({*names}) == len(names)
    assert {name for name in names if name.startswith("token_id:")}, "bytes of characters"
    ids = texts.encode("the answer", special=False)
    assert texts.lengths(ids)[0] == 0


# --- turns ------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=12),
    leaves=st.sets(st.integers(0, 11)),
    most=st.integers(1, 5),
)
def test_turns_are_in_order_and_never_too_many(sizes: list[int], leaves: set[int], most: int) -> None:
    async def play() -> None:
        turns, begun, open_now = Turns(Limits(most, 100)), list[int](), 0

        async def client(place: int, size: int) -> None:
            nonlocal open_now
            async with turns.taken(size):
                begun.append(place)
                open_now += size
                assert open_now == turns.running
                assert open_now <= most or open_now == size, "a larger one is alone"
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                open_now -= size

        tasks = [asyncio.create_task(client(place, size)) for place, size in enumerate(sizes)]
        await asyncio.sleep(0)
        for place in leaves:
            if place < len(tasks):
                tasks[place].cancel()
        for _ in range(200):  # nothing is waited for but turns
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks)
        assert (turns.running, turns.waiting) == (0, 0)
        assert begun == sorted(begun)

    asyncio.run(play())


def test_a_request_behind_a_full_queue_is_refused() -> None:
    async def play() -> None:
        turns = Turns(Limits(1, 1))
        async with turns.taken(1):
            waiting = asyncio.create_task(turns.taken(1).__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match="queue of 1"):
                await turns.taken(1).__aenter__()
        await waiting
        assert turns.running == 1

    asyncio.run(play())


# --- releases ---------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 1), st.booleans()), max_size=12))
def test_requests_spend_at_most_what_is_granted(asked: list[tuple[int, float, bool]]) -> None:
    """Each spends a share of its most, or fails. At every moment, spent and reserved tokens are granted."""

    async def play() -> None:
        spending, granted = Spending(), 0
        spending.granted = 0

        def more() -> None:
            nonlocal granted
            assert spending.spent + spending.held <= granted
            granted = max(granted, spending.spent + spending.held + spending.wanted)
            asyncio.get_running_loop().call_soon(spending.grant, granted)

        spending.short = more

        async def request(most: int, share: float, fails: bool) -> None:
            async with spending.reserved(most) as complete:
                assert spending.spent + spending.held <= granted
                await asyncio.sleep(0)
                if fails:
                    raise InputError("the client left")
                complete.append(int(most * share))
                await asyncio.sleep(0)  # the end of a stream is sent

        await asyncio.gather(*(request(*one) for one in asked), return_exceptions=True)
        spent = sum(most if fails else int(most * share) for most, share, fails in asked)
        assert (spending.spent, spending.held) == (spent, 0)
        assert spending.answered == sum(not fails for _, _, fails in asked)
        assert spent <= granted

    asyncio.run(play())


class FakeProcess:
    """An engine process that does nothing until it ends."""

    facts = {"context": 64}  # noqa: RUF012 - as the process answers
    alive: int = 0
    most: int = 0

    def __init__(self, folder: str) -> None:
        self.folder, self.over = folder, asyncio.Event()
        FakeProcess.alive += 1
        FakeProcess.most = max(FakeProcess.most, FakeProcess.alive)

    @property
    def running(self) -> bool:
        return not self.over.is_set()

    async def ended(self) -> None:
        await self.over.wait()

    async def close(self) -> None:
        self._end()

    async def kill(self) -> None:
        self._end()

    def _end(self) -> None:
        if self.running:
            FakeProcess.alive -= 1
            self.over.set()


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Models]]:
    """Makes models whose processes are fakes; afterwards none is left."""
    families.tokenizer().save_pretrained(tmp_path)

    async def start(settings: dict[str, Any]) -> FakeProcess:
        await asyncio.sleep(0)
        if settings["broken"]:
            raise JobFailedError("broken weights")
        return FakeProcess(settings["folder"])

    monkeypatch.setattr(EngineProcess, "start", start)
    monkeypatch.setattr(engines, "_AGAIN", (0.0,))
    FakeProcess.alive = FakeProcess.most = 0
    settings = {"broken": False}
    yield lambda check=None: (Models(settings, check or _agree), settings)
    assert FakeProcess.alive == 0


async def _agree(served: Served) -> None:
    pass


def release(number: int, folder: Path) -> Release:
    return Release(f"prod@{number}", f"sha256:{number}", lambda: folder)


def played(play: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(play())  # type: ignore[arg-type]


async def until(condition: Callable[[], Any]) -> None:
    """Wait for a state."""
    async with asyncio.timeout(300):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_request_keeps_the_model_with_which_it_began(models: Any, tmp_path: Path) -> None:
    async def play() -> None:
        made, _ = models()
        with pytest.raises(EngineLostError, match="is being loaded"):
            await made.lease().__aenter__()
        await made.use(release(1, tmp_path))
        async with made.lease() as first:
            await made.use(release(2, tmp_path))
            async with made.lease() as second:
                assert (first.release.name, second.release.name) == ("prod@1", "prod@2")
                third = asyncio.create_task(made.use(release(3, tmp_path)))
                for _ in range(100):
                    await asyncio.sleep(0.001)
                assert not third.done(), "it waits, so that two models are in memory"
                assert (first.engine.running, FakeProcess.alive) == (True, 2)
        await third
        await until(lambda: len(made.loaded) == 1)
        assert [one.release.name for one in made.loaded] == ["prod@3"]
        assert (FakeProcess.most, made.switches, made.trouble) == (2, 3, "")
        await made.close()

    played(play)


def test_a_rollback_takes_back_a_model_that_still_answers(models: Any, tmp_path: Path) -> None:
    async def play() -> None:
        made, _ = models()
        await made.use(release(1, tmp_path))
        async with made.lease() as first:
            engine = first.engine
            await made.use(release(2, tmp_path))
            for _ in range(100):  # the end of the former model begins, and waits for its request
                await asyncio.sleep(0)
            await made.use(release(1, tmp_path))
            async with made.lease() as now:
                assert now is first
        await until(lambda: len(made.loaded) == 1)
        assert [one.release.name for one in made.loaded] == ["prod@1"]
        assert (first.engine is engine, engine.running, made.restarts) == (True, True, 0)
        await made.close()

    played(play)


def test_a_release_that_fails_leaves_the_one_before_it(models: Any, tmp_path: Path) -> None:
    async def refuse(served: Served) -> None:
        if served.release.name == "prod@2":
            raise IntegrityError("other log-probabilities")

    async def play() -> None:
        made, settings = models(refuse)
        await made.use(release(1, tmp_path))
        for _ in range(3):
            with pytest.raises(IntegrityError, match="other log-probabilities"):
                await made.use(release(2, tmp_path))
        settings["broken"] = True
        with pytest.raises(JobFailedError, match="broken weights"):
            await made.use(release(3, tmp_path))
        with pytest.raises(InputError, match="needs a tokenizer"):
            await made.use(release(4, tmp_path / "empty"))
        assert FakeProcess.alive == 1
        async with made.lease() as served:
            assert served.release.name == "prod@1"
        await made.close()

    played(play)


def test_an_engine_that_ends_is_started_again_and_requests_wait_for_it(models: Any, tmp_path: Path) -> None:
    async def play() -> None:
        made, settings = models()
        await made.use(release(1, tmp_path))
        before = made.served.engine
        settings["broken"] = True
        before._end()
        await until(lambda: "broken weights" in made.trouble)
        waiting = asyncio.create_task(made.lease().__aenter__())
        await asyncio.sleep(0)
        assert not waiting.done()
        settings["broken"] = False
        served = await waiting
        assert served.engine is not before
        assert served.engine.running
        assert made.restarts >= 1
        served.requests -= 1
        served.idle.set()
        await made.close()

    played(play)


def test_an_engine_that_starts_again_while_its_model_leaves_is_ended(models: Any, tmp_path: Path) -> None:
    async def play() -> None:
        made, _ = models()
        await made.use(release(1, tmp_path))
        async with made.lease() as first:
            switch = asyncio.create_task(made.use(release(2, tmp_path)))
            await asyncio.sleep(0)
            first.engine._end()
            await switch
        await until(lambda: FakeProcess.alive == len(made.loaded) == 1)
        await made.close()

    played(play)


def test_an_error_of_the_machine_does_not_end_the_restarts(
    models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def play() -> None:
        made, _ = models()
        await made.use(release(1, tmp_path))
        before = EngineProcess.start

        async def full(settings: dict[str, Any]) -> FakeProcess:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(EngineProcess, "start", full)
        made.served.engine._end()
        await until(lambda: "No space left" in made.trouble)
        monkeypatch.setattr(EngineProcess, "start", before)
        await until(lambda: made.served.engine.running and not made.trouble)
        await made.close()

    played(play)


@pytest.mark.parametrize(
    ("dtypes", "apart", "served"),
    [
        (("float32", "float32"), [0.0, 9e-4] + [0.0] * 20, True),
        (("float32", "float32"), [2e-3] + [0.0] * 99, False),
        (("float32", "float32"), [5e-4] * 5, False),
        (("float32", "float32"), [float("nan"), 0.0], False),
        (("float32", "float32"), [0.0, float("nan")], False),
        (("float32", "bfloat16"), [0.3] + [0.01] * 20, True),
        (("bfloat16", "bfloat16"), [0.1] * 5, False),
        (("bfloat16", "bfloat16"), [0.6] + [0.0] * 99, False),
    ],
)
def test_a_release_must_have_the_recorded_log_probabilities(
    dtypes: tuple[str, str], apart: list[float], served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = {"texts": [[1] * (len(apart) + 1)], "logprobs": [[-1.0] * len(apart)], "dtype": dtypes[0]}
    monkeypatch.setattr(service, "recorded_logprobs", lambda workspace, digest: recorded)

    async def score(asked: dict[str, list[int]], top: int) -> dict[str, Any]:
        return {name: SimpleNamespace(logprobs=[-1.0 - one for one in apart]) for name in asked}

    engine = SimpleNamespace(score=score, facts={"dtype": dtypes[1], "context": 64})
    model = Served(release(1, Path()), SimpleNamespace(), engine)  # type: ignore[arg-type]
    mine = SimpleNamespace(_how=SimpleNamespace(limits=Limits()), _workspace=None)
    check = service._Service._check(mine, model)  # type: ignore[arg-type]
    if served:
        asyncio.run(check)
        assert model.compared == pytest.approx(max(apart))
    else:
        with pytest.raises(IntegrityError, match="it is not served"):
            asyncio.run(check)


def test_adapters_of_another_form_are_refused_with_their_form(tmp_path: Path) -> None:
    for rank in (8, 4):
        write_adapter(families.build(f"qwen3-lora{rank}"), tmp_path / str(rank))
    model = adopt_module(families.build("qwen3-lora8"))
    named = {"one": tmp_path / "8", "two": tmp_path / "4"}
    with pytest.raises(InputError, match=r"adapter two: must have the rank 8, the scale 2 .* got rank 4"):
        keep(model, NativeRollout(model), tmp_path / "8", named)


# --- the engine's orders ----------------------------------------------------------------------------------------------


def orders(*given_orders: dict[str, Any], rollout: RolloutEngine) -> list[dict[str, Any]]:
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    for one in given_orders:
        lines.put(json.dumps(one) + "\n")
    lines.put(END)
    return [dict(one) for one in Serving(rollout).answers(lines)]


def generation(name: str, limit: int = 4, **changes: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": limit, "greedy": True}
    return {"id": name, "tokens": [1, 2], "key": 0, "sampling": sampling, "limit": limit, **changes}


def test_an_engine_answers_every_order_once_and_a_bad_one_harms_no_other() -> None:
    rollout = ScriptedRollout(lambda prompt, sample: range(10, 30), pace=1, context_length=64)
    found = orders(
        {"generate": [generation("a"), generation("b", 6)], "stream": True},
        {"generate": [generation("c", 3)]},
        {"generate": [generation("a")]},
        {"generate": [generation("d", 63)]},
        {"generate": [generation("e", 0)]},
        {"generate": [generation("f", 40)]},
        {"abort": ["f", "unknown"]},
        rollout=rollout,
    )
    failed = {name: (wrong, "unique" in message) for one in found for name, message, wrong in one.get("failed", ())}
    assert failed == {"a": (True, True), "d": (True, False), "e": (True, False)}
    done = {name: by for one in found for name, _, _, by in one.get("done", ())}
    assert done == {"a": "truncated", "b": "truncated", "c": "truncated", "f": "aborted"}
    tokens: dict[str, list[int]] = {}
    for one in found:
        for name, some, *_ in (*one.get("deltas", ()), *one.get("done", ())):
            tokens.setdefault(name, []).extend(some)
    assert tokens["a"] == [10, 11, 12, 13]
    assert tokens["b"] == list(range(10, 16))
    assert {name for one in found for name, *_ in one.get("deltas", ())} == {"a", "b"}


def test_texts_of_different_orders_are_never_scored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """So an order has the same scores in any company; a long order is scored in packs of bounded size."""
    rollout = ScriptedRollout(lambda prompt, sample: range(10, 30), pace=1, context_length=8192)
    packs: list[list[int]] = []

    def score(texts: Any, top: int, policy: str = "") -> Any:
        packs.append([len(text) for text in texts])
        raise InputError("no scores")

    monkeypatch.setattr(rollout, "score", score)
    many = {f"a{at}": [1] * 3000 for at in range(5)}
    found = orders(
        {"score": {"texts": many, "top": 0, "policy": ""}},
        {"score": {"texts": {"b": [1, 2], "c": [3]}, "top": 0, "policy": ""}},
        rollout=rollout,
    )
    assert packs == [[3000, 3000], [3000, 3000], [3000], [2, 1]]
    assert {name for one in found for name, *_ in one["failed"]} == {*many, "b", "c"}


@pytest.mark.parametrize("engine", ["native", "module"])
def test_a_request_with_logits_that_are_not_finite_fails_alone(engine: str) -> None:
    """Other requests get the tokens that they get alone, also in a stream that has begun; scores fail alone too."""

    def opened() -> RolloutEngine:
        config = InitModelConfig(hidden_size=16, intermediate_size=16, layers=1, context_length=64)
        module = initial_model(config, character_tokenizer(config.characters), 0)
        with torch.no_grad():
            module.model.embed_tokens.weight = torch.nn.Parameter(
                module.model.embed_tokens.weight.clone()
            )  # not the head's
            module.model.embed_tokens.weight[5] = torch.nan
        model = adopt_module(module)
        return open_rollout(model, None) if engine == "native" else ModuleRollout(model)

    def tokens(found: list[dict[str, Any]]) -> dict[str, list[int]]:
        said: dict[str, list[int]] = {}
        for one in found:
            for name, some, *_ in (*one.get("deltas", ()), *one.get("done", ())):
                said.setdefault(name, []).extend(some)
        return said

    sampling = {"max_new_tokens": 40, "greedy": True, "ignore_eos": True}
    good = [generation(name, 40, tokens=[1, first], sampling=sampling) for first, name in enumerate("abc", 2)]
    score = {"score": {"texts": {"scored": [1, 2, 3]}, "top": 0, "policy": ""}}
    whole = {"generate": [generation("whole", 40, tokens=[1, 6], sampling=sampling)]}
    alone = tokens(orders({"generate": good, "stream": True}, whole, rollout=opened()))
    assert {len(some) for some in alone.values()} == {40}
    rollout, lines = opened(), queue.SimpleQueue[str]()
    lines.put(json.dumps({"generate": good, "stream": True}) + "\n")
    answers, found = Serving(rollout).answers(lines), []
    while not any(one.get("deltas") for one in found):
        found.append(next(answers))
    for order in (
        whole,
        {"generate": [generation("bad", 40, tokens=[1, 5], sampling=sampling)]},
        {"score": {"texts": {"worse": [1, 5, 2]}, "top": 0, "policy": ""}},
        score,
    ):
        lines.put(json.dumps(order) + "\n")
    lines.put(END)
    found += answers
    failed = {name: (message, wrong) for one in found for name, message, wrong in one.get("failed", ())}
    assert failed == {
        "bad": ("policy logits must be finite, got NaN or infinity while sampling; the policy has diverged", False),
        "worse": ("policy logits must be finite, got NaN or infinity while scoring; the policy has diverged", False),
    }
    assert [name for one in found for name, *_ in one.get("scored", ())] == ["scored"]
    assert tokens(found) == alone
    assert {name for one in found for name, *_ in one.get("deltas", ())} == {"a", "b", "c"}


@pytest.mark.parametrize("length", [6, 1])
def test_a_stream_that_came_again_differently_fails(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 and on CUDA, other company can change tokens; one that does not stream is answered as a whole."""
    steps = list[int]()

    def answer(prompt: Any, sample: int) -> range:
        return range(10, 16) if len(steps) < 3 else range(20, 20 + length)

    rollout = ScriptedRollout(answer, pace=1, context_length=64)
    step = rollout._step

    def stepped() -> None:
        steps.append(1)
        if len(steps) == 3:
            raise NotFiniteError.of("sampling", ["bad"])
        step()

    monkeypatch.setattr(rollout, "_step", stepped)
    found = orders(
        {"generate": [generation("streams", 6)], "stream": True},
        {"generate": [generation("whole", length), generation("bad")]},
        rollout=rollout,
    )
    failed = {name: message for one in found for name, message, _ in one.get("failed", ())}
    assert failed.keys() == {"streams", "bad"}
    assert "its first tokens differ from those sent; repeat the request" in failed["streams"]
    assert [tokens for one in found for name, tokens, _ in one.get("deltas", ())] == [[10], [11]]
    done = {name: tokens for one in found for name, tokens, *_ in one.get("done", ()) if name == "whole"}
    assert done == {"whole": list(range(20, 20 + length))}


def test_an_error_of_logits_crosses_processes() -> None:
    error = NotFiniteError.of("sampling", ["a", "b"])
    other = pickle.loads(pickle.dumps(error))  # noqa: S301 - its own bytes
    assert (str(other), other.ids) == (str(error), {"a", "b"})


def test_an_engine_that_cannot_score_says_so_and_goes_on() -> None:
    rollout = ScriptedRollout(lambda prompt, sample: range(10, 30), context_length=64)
    found = orders(
        {"score": {"texts": {"s": [1, 2]}, "top": 0, "policy": ""}},
        {"generate": [generation("a")]},
        rollout=rollout,
    )
    [failed] = [name for one in found for name, message, _ in one.get("failed", ()) if "neither score" in message]
    assert failed == "s"
    assert [name for one in found for name, *_ in one.get("done", ())] == ["a"]


# --- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": "x", "seed": 2**70}, "seed"),
        ({"prompt": "x", "seed": True}, "seed"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "temperature": 1e-40}, "temperature: must be 0 or at least 1e-06, got 1e-40"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "x", "n": 0}, "n"),
        ({"prompt": "x", "stop": [""]}, "stop"),
        ({"prompt": "x", "stop": 5}, "stop"),
        ({"prompt": "x", "stream_options": {"other": True}}, "stream_options.other"),
        ({"prompt": [[1, -2]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "x", "logit_bias": {"5": 1}}, "logit_bias"),
    ],
)
def test_a_field_that_is_wrong_is_named(texts: Texts, body: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        asked_completion(body, "id", 0, texts)


def test_fields_that_describe_a_caller_and_empty_fields_are_accepted(texts: Texts) -> None:
    asked = asked_completion(
        {"prompt": ["the", "a"], "user": "ann", "metadata": {"a": 1}, "stop": None, "best_of": 1, "n": 3},
        "id", 7, texts,
    )  # fmt: skip
    assert (asked.choices, asked.limit, asked.stop, asked.top) == (6, 16, (), None)
    assert asked.sampling["seed"] != asked_completion({"prompt": "the", "seed": 8}, "id", 7, texts).sampling["seed"]
