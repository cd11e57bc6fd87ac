"""The contract of rollout engines: partial answers, sessions of several turns, scores of given texts, and policies."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from posttrain.domain.errors import InputError
from posttrain.engine.rollout.port import Delta, Generation, RolloutEngine, SamplingParams
from posttrain.engine.samples import Trajectory

WAIT = 300.0  # seconds to wait for the next answer before the engine counts as hung
APART = 1e-3  # allowed difference between the log-probabilities of sampling and of scoring
_ROUNDING = 1e-4  # allowed difference of a log-probability between two paths of computation


class Bench:
    """The test bench of an engine; derive test classes from `contract.RolloutEngineContract`."""

    prompts: Sequence[tuple[int, ...]] = ((5, 4, 3), (7, 8), (9,), (4, 4, 6, 5, 8, 9, 7))
    limit = 7
    long = 30  # tokens of a response that still runs when a one-token response has been answered
    tolerance = 1e-4  # allowed difference of a log-probability between batches; 0: bit-identical
    ends: Collection[int] = ()  # end-of-sequence tokens of the policy; tokens that end responses are added
    draws = True  # False: responses do not depend on random numbers, as in a script
    in_place = True  # whether weights change where the engine reads them; False: the engine loads each version
    turns = 3  # further turns of a session
    streams = True  # whether `progress` returns tokens before their answer
    scores = True  # whether the engine has weights, to score texts with and to attest
    keeps = True  # whether the engine can keep keys and values of old weights (`keep_kv`)
    others: Sequence[str] = ()  # policies that the engine serves in addition to the one in training
    unheard: Collection[str] = ()  # tensors without effect on the answers to `prompts`, e.g. unused experts

    def held(self) -> Sequence[Tensor]:
        """Return the tensors from which engines that expose none take their weights when opened and at an update."""
        return ()

    def open_engine(self) -> RolloutEngine:
        """Return a new engine, idle and not paused.

        Raises:
            NotImplementedError: always; a subclass implements it.
        """
        raise NotImplementedError

    def says(self, tokens: Sequence[int]) -> str | None:
        """Return the text that the engine's tokenizer decodes, special tokens included.

        None: the engine has no tokenizer and rejects stop strings. Some response should have at least two characters.
        """
        return None

    @property
    def rounding(self) -> float:
        """The allowed difference of a log-probability between two paths of computation."""
        return max(self.tolerance, _ROUNDING)

    def work(self, samples: int = 3, mark: str = "", limit: int | None = None, **sampling: Any) -> list[Generation]:
        """Return every prompt `samples` times, with these fields of `SamplingParams`."""
        tokens = limit or self.limit
        params = SamplingParams(tokens, **{"seed": 7, **sampling})
        return [
            Generation(f"{mark}{key}.{sample}", prompt, 100 + key, params, tokens, sample)
            for key, prompt in enumerate(self.prompts)
            for sample in range(samples)
        ]

    def drain(self, engine: RolloutEngine, count: int) -> dict[str, Trajectory]:
        """Return the next `count` answers; no generation may be answered twice."""
        found: dict[str, Trajectory] = {}
        while len(found) < count:
            done = engine.completed(WAIT)
            require(bool(done), f"{count - len(found)} generations were not answered")
            for completion in done:
                require(completion.id not in found, f"{completion.id} was answered twice")
                found[completion.id] = completion.trajectory
        require(engine.completed(0) == [], "the engine returned more completions than requests")
        return found

    def ask(self, engine: RolloutEngine, work: Sequence[Generation]) -> dict[str, Trajectory]:
        """Submit all the work of an idle engine and return its answers."""
        engine.submit(work)
        return self.drain(engine, len(work))

    def first_tokens(self, engine: RolloutEngine) -> list[Delta]:
        """Return the first progress of submitted work that no answer has."""
        end = time.monotonic() + WAIT
        while not (found := engine.progress()):
            answered = engine.completed(0.0)
            slow = "completed(0.0) must return after about one token of each response, but it returned whole answers"
            require(not answered, f"{slow}; set `streams` to False if the engine cannot")
            require(time.monotonic() < end, f"no progress within {WAIT:g} s")
        return found

    def tell(self, engine: RolloutEngine, version: str) -> None:
        """Make an idle engine sample with this version from now on."""
        engine.pause()
        engine.update("", version)
        engine.resume()


def require(holds: bool, otherwise: str) -> None:
    """Require a condition; `otherwise` is the error message.

    Raises:
        AssertionError: the condition does not hold.
    """
    if not holds:
        raise AssertionError(otherwise)


def refuses(call: Callable[[], object]) -> bool:
    """Return whether the call raises `InputError`."""
    try:
        call()
    except InputError:
        return True
    return False


def same(name: str, one: Trajectory, other: Trajectory, tolerance: float) -> None:
    """Require that two answers are the same response.

    Raises:
        AssertionError: tokens, status or log-probabilities differ.
    """
    require(one.response.tolist() == other.response.tolist(), f"{name} became another response")
    apart = float(np.abs(one.logprobs - other.logprobs).max(initial=0.0))
    require(apart <= tolerance, f"the log-probabilities of {name} differ by {apart:g}, allowed {tolerance:g}")
    require(one.status == other.status, f"{name} ended as {one.status} and as {other.status}")


_OBSERVED = (6, 4, 9)  # tokens that an environment answers with
_READ = "prefilled_tokens", "preemptions"


class StreamContract(Bench):
    """The tests of progress and of aborted responses."""

    def test_progress_is_a_beginning_of_the_answer(self) -> None:
        """Every token comes once: in a delta, or only in the answer."""
        engine = self.open_engine()
        work = self.work(limit=self.long, ignore_eos=True)
        engine.submit(work)
        told: dict[str, list[Delta]] = {}
        found: dict[str, Trajectory] = {}
        while len(found) < len(work):
            found |= {done.id: done.trajectory for done in engine.completed(0.0)}
            for delta in engine.progress():
                require(len(delta.tokens) > 0, f"{delta.id} has a delta without tokens")
                require(delta.id not in found, f"{delta.id} has progress after its answer")
                told.setdefault(delta.id, []).append(delta)
        require(bool(told) or not self.streams, "no generation had progress before its answer")
        for name, deltas in told.items():
            tokens = [token for delta in deltas for token in delta.tokens.tolist()]
            logprobs = [value for delta in deltas for value in delta.logprobs.tolist()]
            whole = found[name]
            beginning = whole.response.tolist()[: len(tokens)] == tokens
            require(beginning, f"the deltas of {name} are not the beginning of its answer")
            require(whole.logprobs.tolist()[: len(tokens)] == logprobs, f"{name} has other log-probabilities in deltas")

    def test_an_aborted_response_keeps_what_it_has(self) -> None:
        """Abort after some tokens; the answer has them, and the rest of the work is not disturbed."""
        if not self.streams:
            return
        engine = self.open_engine()
        work = self.work(samples=1, limit=self.long, ignore_eos=True)
        whole = self.ask(engine, work)
        engine.submit(work)
        begun = self.first_tokens(engine)
        name = begun[0].id
        engine.abort([name])
        found = self.drain(engine, len(work))
        partly = found[name]
        require(partly.status == "aborted", f"{name} was aborted, but ended as {partly.status}")
        had = f"{name} had {len(begun[0].tokens)} tokens when it was aborted, but its answer has {partly.generated}"
        require(len(begun[0].tokens) <= partly.generated < self.long, had)
        beginning = partly.response.tolist() == whole[name].response.tolist()[: partly.generated]
        require(beginning, f"{name} is not the beginning of its response")
        for other in found.keys() - {name}:
            same(other, whole[other], found[other], self.tolerance)


class SessionContract(Bench):
    """The tests of sessions."""

    def test_a_session_goes_on_as_its_whole_context_would(self) -> None:
        """A turn in a session equals the same generation without a session; held tokens are not read again."""
        engine = self.open_engine()
        first = self._turn(engine, self._begun())
        for _ in range(self.turns):
            work = [self._next(asked, answer) for asked, answer in first]
            whole = self.ask(self.open_engine(), [replace(asked, session="") for asked in work])
            before = dict(engine.counts())
            first = self._turn(engine, work)
            for asked, answer in first:
                same(asked.session, whole[asked.id], answer, self.rounding)
            added, again = (engine.counts().get(name, 0) - before.get(name, 0) for name in _READ)
            most = len(work) * (len(_OBSERVED) + 1) + again  # of a preempted context, the last token is read again
            read = f"sessions must not read again what they hold: at most {most} tokens, got {added}"
            require(not engine.holds_sessions or 0 < added <= most, read)

    def test_sessions_are_the_same_in_any_company_and_order(self) -> None:
        """The second turns are asked together, and one by one in reverse order, beside other work."""
        together, apart = self.open_engine(), self.open_engine()
        work = [self._next(asked, answer) for asked, answer in self._turn(together, self._begun())]
        self._turn(apart, self._begun())
        found = self.ask(together, work)
        other = self.work(samples=1, mark="beside ", limit=self.long, ignore_eos=True)
        apart.submit(other)
        apart.completed(0.0)
        alone: dict[str, Trajectory] = {}
        for asked in reversed(work):
            apart.submit([asked])
            while asked.id not in alone:
                alone |= {done.id: done.trajectory for done in apart.completed(WAIT)}
        for name, answer in found.items():
            same(name, answer, alone[name], self.tolerance)

    def test_a_context_that_was_rewritten_is_read_as_a_whole(self) -> None:
        """The context does not begin with what the session holds."""
        engine = self.open_engine()
        (asked, answer), *_ = self._turn(engine, self._begun())
        other = replace(self._next(asked, answer), tokens=(8, *answer.response.tolist(), 5))
        alone = self.ask(self.open_engine(), [replace(other, session="")])
        same(other.id, alone[other.id], self.ask(engine, [other])[other.id], self.rounding)

    def test_released_and_updated_sessions_are_read_again(self) -> None:
        """Also, unknown sessions may be released."""
        for free in ("release", "update"):
            engine = self.open_engine()
            turns = self._turn(engine, self._begun())
            if free == "release":
                engine.release([*(asked.session for asked, _ in turns), "unknown"])
            else:
                self.tell(engine, "0.2")
            work = [self._next(asked, answer) for asked, answer in turns]
            before = engine.counts().get("prefilled_tokens", 0)
            whole = self.ask(self.open_engine(), [replace(asked, session="") for asked in work])
            for name, answer in self.ask(engine, work).items():
                same(name, whole[name], answer, self.tolerance)
            added = engine.counts().get("prefilled_tokens", 0) - before
            least = sum(len(set(asked.tokens)) > 0 for asked in work)
            read = f"after {free}, sessions must be read again, got {added} tokens"
            require(not engine.holds_sessions or added > least * (len(_OBSERVED) + 1), read)

    def test_an_aborted_turn_goes_on(self) -> None:
        """The next turn continues the partial response."""
        engine = self.open_engine()
        engine.submit(self._begun(self.long))
        if self.streams:
            self.first_tokens(engine)
        engine.abort([asked.id for asked in self._begun()])
        found = self.drain(engine, len(self._begun()))
        work = [self._next(asked, found[asked.id]) for asked in self._begun(self.long)]
        whole = self.ask(self.open_engine(), [replace(asked, session="") for asked in work])
        for name, answer in self.ask(engine, work).items():
            same(name, whole[name], answer, self.rounding)

    def test_a_session_has_one_unanswered_generation(self) -> None:
        """A second one is refused, in one call and in two."""
        engine = self.open_engine()
        first = self._begun()[0]
        second = replace(first, id="second")
        require(refuses(partial(engine.submit, [first, second])), "two generations of a session were accepted together")
        engine.submit([first])
        require(refuses(partial(engine.submit, [second])), "a second generation of a session was accepted")
        self.drain(engine, 1)

    def _begun(self, limit: int = 0) -> list[Generation]:
        """Return a first turn for every prompt, each in a session."""
        work = self.work(samples=2, limit=limit or self.limit, ignore_eos=True)
        return [replace(asked, session=f"session {asked.id}") for asked in work]

    def _turn(self, engine: RolloutEngine, work: Sequence[Generation]) -> list[tuple[Generation, Trajectory]]:
        found = self.ask(engine, work)
        return [(asked, found[asked.id]) for asked in work]

    def _next(self, asked: Generation, answer: Trajectory) -> Generation:
        """Return the next turn of a session, after an observation."""
        tokens = (*asked.tokens, *answer.response.tolist(), *_OBSERVED)
        params = replace(asked.sampling, seed=asked.sampling.seed + 1, max_new_tokens=self.limit)
        return replace(asked, tokens=tokens, sampling=params, limit=self.limit)


class ScoreContract(Bench):
    """The tests of scores of given texts."""

    def test_scores_are_the_log_probabilities_of_sampling(self) -> None:
        """Also, the likeliest token is the one that greedy sampling draws, and a token has one float."""
        engine = self.open_engine()
        if not self.scores:
            require(refuses(lambda: self._score(engine, [(5,)], 0)), "an engine without weights scored a text")
            return
        work = self.work(samples=2, greedy=True)
        told = self.ask(engine, work)
        answers = [(asked, told[asked.id]) for asked in work]
        texts = [(*asked.tokens, *answer.response.tolist()) for asked, answer in answers]
        for (asked, answer), text, found in zip(answers, texts, engine.score(texts, top=3), strict=True):
            begin = len(asked.tokens)
            shapes = found.logprobs.shape, found.top_tokens.shape, found.top_logprobs.shape
            require(shapes == ((len(text),), (len(text), 3), (len(text), 3)), f"the scores of a text have {shapes}")
            none = np.isnan(found.logprobs[0]) and (found.top_tokens[0] == -1).all()
            require(bool(none), "the first token of a text must have no log-probability")
            apart = float(np.abs(found.logprobs[begin:] - answer.logprobs).max())
            require(apart <= APART, f"scores and sampling differ by {apart:g}")
            likeliest = found.top_tokens[begin:, 0].tolist() == answer.response.tolist()
            require(likeliest, "the likeliest token must be the one that greedy sampling draws")
            require(bool((found.top_logprobs[1:, 0] == found.top_logprobs[1:].max(1)).all()), "the likeliest is first")
            repeated = bool((found.top_logprobs[begin:, 0] == found.logprobs[begin:]).all())
            require(repeated, "a token must have the same log-probability among the likeliest as in the text")

    def test_a_score_disturbs_no_work_and_reads_the_weights_of_now(self) -> None:
        """Tested beside responses in progress, and with texts that cannot be scored."""
        if not self.scores:
            return
        engine = self.open_engine()
        work = self.work(limit=self.long)
        whole = self.ask(engine, work)
        text = (5, 4, 3, 8)
        alone = self._score(engine, [text], 0)
        engine.submit(work)
        early = {done.id: done.trajectory for done in engine.completed(0.0)}
        beside = self._score(engine, [text], 0)
        require(bool(np.array_equal(alone, beside, equal_nan=True)), "a score depends on other work")
        for bad, top in (
            ([()], 0),
            ([(5,) * (engine.context_length + 1)], 0),
            ([text], -1),
            ([text], 2**31),
            ([(2**30,)], 0),
            ([(-1,)], 0),
        ):
            require(refuses(partial(self._score, engine, bad, top)), f"{len(bad[0])} tokens, top {top}, were scored")
        for name, answer in (early | self.drain(engine, len(work) - len(early))).items():
            same(name, whole[name], answer, self.tolerance)

    def _score(self, engine: RolloutEngine, texts: Sequence[Sequence[int]], top: int) -> list[float]:
        return [value for found in engine.score(texts, top) for value in found.logprobs.tolist()]


class PolicyContract(Bench):
    """The tests of policies beside the one in training."""

    def test_each_policy_answers_with_its_own_version(self) -> None:
        """An update of one policy does not change the others; policies that are not served are refused."""
        engine = self.open_engine()
        names = ("", *self.others)
        for at, name in enumerate(names):
            engine.pause()
            engine.update(name, f"{at}.1")
            engine.resume()
        work = [
            replace(asked, id=f"{name} {asked.id}", policy=name) for name in names for asked in self.work(samples=1)
        ]
        found = self.ask(engine, work)
        for asked in work:
            versions = (f"{names.index(asked.policy)}.1",)
            got = found[asked.id].versions
            require(got == versions, f"policy {asked.policy or '(in training)'} answered as {got}, not {versions}")
        stranger = replace(work[0], id="stranger", policy="stranger")
        require(refuses(partial(engine.submit, [stranger])), "a policy that is not served was accepted")
