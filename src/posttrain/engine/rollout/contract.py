"""The contract of rollout engines, as tests for any engine.

In a test file::

    class TestMyEngine(RolloutEngineContract):
        def open_engine(self) -> RolloutEngine:
            return MyEngine(...)

Draws: the tests check what determines a draw, which distribution the log-probabilities belong to, and where responses
end. They have no reference model. They compare results that an engine returns along two paths: after the same tokens,
the same token has the same log-probability at a given temperature, however it was drawn.

Weights: the tests check which weights an engine reads, when weights may change, and how begun responses continue. They
change the tensors that an engine exposes, in place, and restore them. For an engine that exposes no tensors, they
change `Bench.held` and compare the engine's proof with that of a new engine; without `held`, they can check only the
reported versions, and that the engine samples with the log-probabilities of its proof.

`contract_turns` has `Bench`, the members that a subclass defines and the helpers that query an engine, and the tests of
partial answers, sessions, scores and policies.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations
from math import exp
from typing import Any

import numpy as np
import torch
from torch import Tensor

from posttrain.domain.errors import JobFailedError
from posttrain.engine.rollout.contract_turns import (
    APART,
    WAIT,
    Bench,
    PolicyContract,
    ScoreContract,
    SessionContract,
    StreamContract,
    refuses,
    require,
    same,
)
from posttrain.engine.rollout.port import Completion, Generation, InFlight, RolloutEngine, SamplingParams
from posttrain.engine.samples import Trajectory

Seen = dict[tuple[int, ...], dict[int, float]]  # context → drawn token → its log-probability
_WARM = 1.5
_LEVEL = 1e4  # a temperature so high that the random number alone decides the token
_FEW = 4  # tokens per response that are compared one by one: later tokens seldom share their context


_ONE_IN = 100  # differences of at least this many roundings count as nonzero


_TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5})


_OLD, _NEW = "0.1", "0.2"


_FINISH: InFlight = "finish"


_GOING_ON: tuple[InFlight, ...] = ("recompute", "keep_kv")


class DrawContract(Bench):
    """The tests of draws."""

    def test_seed_key_sample_and_token_each_change_what_is_drawn(self) -> None:
        """Tested with one prompt, at a temperature so high that the random number alone decides the token."""
        if not self.draws:
            return
        engine = self.open_engine()
        params = SamplingParams(self.limit, temperature=_LEVEL, seed=7, ignore_eos=True)
        first = Generation("it", self.prompts[0], 100, params, self.limit)
        others = {
            "seed": replace(first, id="seed", sampling=replace(params, seed=8)),
            "key": replace(first, id="key", key=101),
            "sample": replace(first, id="sample", sample=1),
        }
        found = {name: answer.response.tolist() for name, answer in self.ask(engine, [first, *others.values()]).items()}
        for name in others:
            require(found[name] != found["it"], f"another {name} must change the tokens drawn, got {found[name]}")
        repeats = all(len(set(tokens)) == 1 for tokens in found.values())
        require(not repeats, f"every token must have its own random number, got {found['it']}")

    def test_a_response_ends_at_the_first_end_of_sequence_token(self) -> None:
        """With `ignore_eos` a response ends only at its limit, with the same tokens as before up to the end token."""
        engine = self.open_engine()
        whole = self.ask(engine, self.work(limit=self.long, ignore_eos=True))
        for name, answer in whole.items():
            kept = answer.generated == self.long and answer.truncated
            got = f"{answer.generated} tokens that ended as {answer.status}"
            require(kept, f"{name} must ignore end tokens and have {self.long} tokens, got {got}")
        found = self.ask(engine, self.work(limit=self.long))
        last = {int(answer.response[-1]) for answer in found.values() if answer.status == "ok" and answer.generated}
        require(bool(last), "no response ended by itself; use a policy that ends some responses, or a larger `long`")
        ends = {*self.ends, *last}
        for name, answer in found.items():
            tokens: list[int] = whole[name].response.tolist()
            end = next((at for at, token in enumerate(tokens, start=1) if token in ends), None)
            wanted, status = tokens[:end], "truncated" if end is None else "ok"
            got = f"{answer.generated} tokens that ended as {answer.status}"
            held = answer.response.tolist() == wanted and answer.status == status
            require(held, f"{name} must end at the first of {sorted(ends)}, after {len(wanted)} tokens, got {got}")

    def test_log_probabilities_are_of_the_whole_distribution(self) -> None:
        """Tested for greedy, sampled and truncated draws, at two temperatures."""
        engine = self.open_engine()
        for temperature in (1.0, _WARM):
            seen = self._seen(engine, temperature=temperature)
            for way in ({"greedy": True}, *_TRUNCATIONS):
                drawn = self._seen(engine, temperature=temperature, **way)
                pairs = list(_both(seen, drawn))
                alike = f"no token was drawn both with {way} and without"
                require(bool(pairs), f"{alike}; use a policy with a more concentrated distribution")
                apart = max(abs(one[token] - other[token]) for one, other, tokens in pairs for token in tokens)
                require(
                    apart <= self.rounding,
                    f"log-probabilities must be of the whole distribution at temperature {temperature} with {way}, "
                    f"got some that differ by {apart:g}",
                )
                for context, tokens in drawn.items():
                    seen.setdefault(context, {}).update(tokens)

    def test_log_probabilities_are_at_the_temperature(self) -> None:
        """The log-probabilities of two tokens differ by the difference of their logits divided by the temperature."""
        if not self.draws:
            return
        engine = self.open_engine()
        plain, warm = self._seen(engine), self._seen(engine, temperature=_WARM)
        told = 0
        for one, other, tokens in _both(plain, warm):
            for left, right in combinations(tokens, 2):
                logits, found = one[left] - one[right], other[left] - other[right]
                told += abs(logits) >= _ONE_IN * self.rounding
                require(
                    abs(found - logits / _WARM) <= 4 * self.rounding,
                    f"two log-probabilities must differ by {logits / _WARM:g} at temperature {_WARM}, "
                    f"because they differ by {logits:g} at 1, got {found:g}",
                )
        few = "no two tokens were drawn at both temperatures"
        require(told > 0, f"{few}; use a policy with a less concentrated distribution")

    def test_truncated_draws_are_among_the_likely_tokens(self) -> None:
        """Tested with the log-probabilities of tokens that were drawn after the same context."""
        if not self.draws:
            return
        engine = self.open_engine()
        for way in _TRUNCATIONS:
            for tokens in self._seen(engine, **way).values():
                shares = sorted(map(exp, tokens.values()))
                before = sum(shares[1:])  # probability of the tokens likelier than the least likely drawn token
                held = (
                    len(shares) <= way.get("top_k", len(shares))
                    and before < way.get("top_p", 1.0) + self.rounding
                    and shares[0] >= way.get("min_p", 0.0) * shares[-1] - self.rounding
                )
                require(held, f"with {way} only likely tokens may be drawn, got tokens of {shares}")

    def _seen(self, engine: RolloutEngine, **sampling: Any) -> Seen:
        """Return the tokens and log-probabilities of eight samples of every prompt."""
        found: Seen = {}
        for answer in self.ask(engine, self.work(samples=8, limit=min(self.limit, _FEW), **sampling)).values():
            before: tuple[int, ...] = tuple(answer.prompt.tolist())
            for token, logprob in zip(answer.response.tolist(), answer.logprobs.tolist(), strict=True):
                found.setdefault(before, {})[token] = logprob
                before = (*before, token)
        return found


def _both(one: Seen, other: Seen) -> Iterator[tuple[Mapping[int, float], Mapping[int, float], list[int]]]:
    """For every context in `one` and `other`, yield the log-probabilities in each, and the tokens drawn in both."""
    for context, mine in one.items():
        tokens = sorted(mine.keys() & other.get(context, {}).keys())
        if tokens:
            yield mine, other[context], tokens


class WeightContract(Bench):
    """The tests of weights."""

    def shown(self, engine: RolloutEngine) -> list[tuple[str, Tensor]]:
        """Return the tensors that can be changed in place, each memory address once."""
        views = engine.attest(()).views if self.in_place and self.scores else None
        places = {(held.data_ptr(), held.shape, held.stride()): (name, held) for name, held in views or ()}
        return list(places.values())

    def test_what_it_shows_is_what_it_decodes_with(self) -> None:
        """Changing one tensor changes the answers, and restoring the tensor restores the answers."""
        engine = self.open_engine()
        work = self.work(samples=1, greedy=True)
        before = self.ask(engine, work)
        for name, held in self.shown(engine):
            if name in self.unheard:
                continue
            with changed([held], _noisy):
                self.tell(engine, _NEW)
                found = self.ask(engine, work)
            heard = any(_differ(before[asked], answer, self.tolerance) for asked, answer in found.items())
            require(heard, f"the engine exposes {name}, but its answers do not change when {name} changes")
        self.tell(engine, _OLD)
        for asked, answer in self.ask(engine, work).items():
            same(asked, before[asked], answer, self.tolerance)

    def test_a_proof_is_of_the_weights_of_now(self) -> None:
        """A proof by log-probabilities: those of sampling, and those of an engine that is opened with these weights."""
        engine = self.open_engine()
        if not self.scores or engine.attest(()).views is not None:
            return
        self.tell(engine, _OLD)
        before = self._proven(engine)
        if not (held := self.held()):
            return
        with changed(held, _noisy):
            self.tell(engine, _NEW)
            found, fresh = self._proven(engine), self._proven(self.open_engine())
        apart, moved = (max(abs(a - b) for a, b in zip(found, other, strict=True)) for other in (fresh, before))
        require(apart <= self.rounding, f"a proof must be of all weights that are there, but is {apart:g} off")
        require(moved > self.rounding, f"a proof must change with the weights, but changed by {moved:g}")

    def _proven(self, engine: RolloutEngine) -> list[float]:
        """Return the log-probabilities of the prompts in a proof, after checking the proof."""
        work = self.work(samples=1, greedy=True)
        answers = self.ask(engine, work)
        texts = [(*asked.tokens, *answers[asked.id].response.tolist()) for asked in work]
        found = [np.asarray(one) for one in engine.attest(texts).logprobs]
        lengths = [one.shape for one in found]
        require(
            lengths == [(len(text),) for text in texts], f"a proof must have a number for each token, got {lengths}"
        )
        for asked, one in zip(work, found, strict=True):
            require(bool(np.isfinite(one[1:]).all()), f"a proof must have finite log-probabilities, got {one.tolist()}")
            apart = float(np.abs(one[len(asked.tokens) :] - answers[asked.id].logprobs).max())
            require(apart <= APART, f"a proof must be of the weights that sample, but differs by {apart:g}")
        told = engine.attest([(*prompt, prompt[0]) for prompt in self.prompts]).logprobs
        return [float(value) for one in told for value in one[1:]]

    def test_logits_that_are_not_finite_end_the_job(self) -> None:
        """Tested for every way to choose tokens."""
        for sampling in ({}, {"greedy": True}, {"top_k": 2}):
            engine = self.open_engine()
            shown = [held for _, held in self.shown(engine)]
            if not shown:
                return
            with changed(shown, lambda held: torch.full_like(held, torch.nan)):
                self.tell(engine, _NEW)
                said = _answered(partial(self.ask, engine, self.work(samples=1, **sampling)))
            require(said is None, f"logits that are not finite must end in JobFailedError, got {said} answers")

    def test_weights_that_are_read_in_place_change_while_it_is_paused(self) -> None:
        """Other updates, even of a policy that the engine does not serve, are rejected and change nothing."""
        engine = self.open_engine()
        self.tell(engine, _OLD)
        if self.in_place:
            require(
                refuses(partial(engine.update, "", _NEW)), "an update was accepted by an engine that was not paused"
            )
        engine.pause()
        require(
            refuses(partial(engine.update, "opponent", _NEW)), "an update of a policy that is not served was accepted"
        )
        engine.resume()
        for name, answer in self.ask(engine, self.work(samples=1)).items():
            require(answer.versions == (_OLD,), f"{name} was sampled by {answer.versions} after a rejected update")

    def test_what_has_begun_goes_on_as_an_update_says(self) -> None:
        """Begun responses continue under new weights, and their earlier tokens may be recomputed.

        An engine that answers whole batches has no begun responses.
        """
        for in_flight in _GOING_ON if self.in_place else (_FINISH, *_GOING_ON):
            engine = self.open_engine()
            self.tell(engine, _OLD)
            work = self.work(samples=1, limit=self.long, greedy=True, ignore_eos=True)
            whole = self.ask(engine, work)
            left = self._begin(engine, work)
            refused = self.in_place and refuses(partial(engine.update, "", _NEW))
            shown = [held for _, held in self.shown(engine)]
            with changed(shown, _noisy):
                engine.update("", _NEW, in_flight=in_flight)
                engine.resume()
                found = self.drain(engine, len(left))
                finished = in_flight == _FINISH or (self.in_place and not refused)
                for asked in left:
                    self._goes_on(asked.id, whole[asked.id], found[asked.id], finished=finished)
                begun = [answer for answer in found.values() if answer.versions[0] == _OLD]
                require(bool(begun) or not refused, f"a begun response must report {_OLD} as its first version")
                if shown:
                    self._reads_again(engine, begun, in_flight)

    def _begin(self, engine: RolloutEngine, work: Sequence[Generation]) -> list[Generation]:
        """Pause after a short response has been answered; return the remaining work."""
        short = Generation("short", self.prompts[0], 99, work[0].sampling, 1)
        engine.submit([short, *work])
        answered: set[str] = set()
        while short.id not in answered:
            done = engine.completed(WAIT)
            require(bool(done), "a response of one token was not answered")
            answered |= {completion.id for completion in done}
        engine.pause()
        return [asked for asked in work if asked.id not in answered]

    def _goes_on(self, name: str, whole: Trajectory, found: Trajectory, *, finished: bool) -> None:
        """Check a response that one version began and another continued; `finished`: `in_flight` was "finish"."""
        versions = found.versions
        require(versions in ((_OLD,), (_OLD, _NEW), (_NEW,)), f"{name} was sampled by {versions}")
        require(len(versions) == 1 or not finished, f"{name} must be finished by the version that began it")
        require(found.generated == whole.generated, f"{name} must have {whole.generated} tokens, got {found.generated}")
        old = _said_by(_OLD, found)
        beginning = found.response.tolist()[:old] == whole.response.tolist()[:old]
        require(beginning, f"{name} has tokens attributed to {_OLD} that {_OLD} would not sample")

    def _reads_again(self, engine: RolloutEngine, begun: Sequence[Trajectory], in_flight: InFlight) -> None:
        """Compare the first token under new weights with the first token of a new generation of the same context."""
        both = [answer for answer in begun if _NEW in answer.versions]
        params = self.work(greedy=True, ignore_eos=True)[0].sampling
        apart: list[float] = []
        for place, answer in enumerate(both):
            old = _said_by(_OLD, answer)
            read = (*answer.prompt.tolist(), *answer.response.tolist()[:old])
            fresh = self.ask(engine, [Generation(f"fresh {place}", read, place, params, 1)])
            (logprob,) = (float(one.logprobs[0]) for one in fresh.values())
            apart.append(abs(logprob - float(answer.logprobs[old])))
        if in_flight == "recompute":
            most = max(apart, default=0.0)
            require(most <= self.rounding, f"old tokens must be computed again, got a log-probability {most:g} away")
        elif self.keeps:  # a preempted response has lost its keys and values
            kept = not apart or max(apart) > self.rounding
            require(kept, "keys and values of the old weights must be kept, got those of the new weights")


@contextmanager
def changed(held: Sequence[Tensor], other: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Change these tensors in place, and restore them at the end of the block."""
    kept = [one.clone() for one in held]
    try:
        _fill(held, [other(one) for one in kept])
        yield
    finally:
        _fill(held, kept)


@torch.no_grad()
def _fill(held: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for one, value in zip(held, values, strict=True):
        one.copy_(value)


def _noisy(held: Tensor) -> Tensor:
    """Return values of similar or larger scale, but not a multiple, because a norm would cancel the factor."""
    noise = torch.randn(held.shape, generator=torch.Generator().manual_seed(held.numel())).to(held)
    return held + noise * (0.1 + held.abs().mean())


def _differ(one: Trajectory, other: Trajectory, tolerance: float) -> bool:
    try:
        same("", one, other, tolerance)
    except AssertionError:
        return True
    return False


def _answered(call: Callable[[], dict[str, Trajectory]]) -> int | None:
    """Return the number of answers; None: the call raised `JobFailedError`."""
    try:
        return len(call())
    except JobFailedError:
        return None


def _said_by(version: str, answer: Trajectory) -> int:
    return sum(len(turn.tokens) for turn in answer.turns if turn.version == version)


class RolloutEngineContract(
    DrawContract, WeightContract, StreamContract, SessionContract, ScoreContract, PolicyContract
):
    """Subclass this class and implement `open_engine`; pytest collects the tests. `Bench` has the other settings.

    The engine's policy may be any model that has the tokens of `prompts` and does not end every response immediately.
    The suite changes the weights that the engine exposes, and restores them.
    """

    def test_every_generation_is_answered_once_and_as_promised(self) -> None:
        """Check prompt, length, log-probabilities and status of the answers; counters never decrease."""
        engine = self.open_engine()
        before = dict(engine.counts())
        work = self.work()
        found = self.ask(engine, work)
        grown = engine.counts()
        require(before.keys() == grown.keys(), f"the counters were {sorted(before)} and then {sorted(grown)}")
        require(all(grown[name] >= count for name, count in before.items()), "a counter decreased")
        for asked in work:
            answer = found[asked.id]
            require(tuple(answer.prompt.tolist()) == asked.tokens, f"{asked.id} continues another prompt")
            require(1 <= answer.generated <= asked.limit, f"{asked.id} has {answer.generated} tokens")
            require(bool(np.isfinite(answer.logprobs).all()), f"{asked.id} has log-probabilities that are not finite")
            require(bool((answer.logprobs <= 1e-3).all()), f"{asked.id} has log-probabilities above 0")
            require(answer.status in ("ok", "truncated"), f"{asked.id} ended as {answer.status}")
            if answer.status == "truncated":
                require(answer.generated == asked.limit, f"{asked.id} was cut before its limit")

    def test_company_and_order_change_nothing(self) -> None:
        """Tested with the same generations in reverse order and in two parts."""
        engine = self.open_engine()
        work = self.work()
        together = self.ask(engine, work)
        half = len(work) // 2
        apart = self.ask(engine, work[:half][::-1]) | self.ask(engine, work[half:][::-1])
        for name, answer in together.items():
            same(name, answer, apart[name], self.tolerance)

    def test_a_limit_is_kept(self) -> None:
        """A shorter limit returns the beginning of the same response."""
        engine = self.open_engine()
        work = self.work(samples=1)
        whole = self.ask(engine, work)
        for name, answer in self.ask(engine, [replace(asked, limit=2) for asked in work]).items():
            kept = min(2, whole[name].generated)
            require(answer.response.tolist() == whole[name].response.tolist()[:kept], f"{name} is another response")

    def test_a_stop_string_ends_a_response_or_is_refused(self) -> None:
        """A response ends with the token that completes the string, even next to responses without stop strings."""
        engine = self.open_engine()
        work = self.work()
        if self.says([]) is None:
            asked = self.work(samples=1, mark="stop ", stop=("a",))
            require(refuses(partial(engine.submit, [*work, *asked])), "stop strings were not refused")
            return
        whole = self.ask(engine, work)
        stop = self._occurring(list(whole.values()))
        asked = self.work(mark="stop ", stop=stop)
        found = self.ask(engine, [generation for both in zip(work, asked, strict=True) for generation in both])
        for name, answer in whole.items():
            same(name, answer, found[name], self.tolerance)
            self._ends_at_string(name, answer, found[f"stop {name}"], stop)
        require(any(found[one.id].stopped for one in asked), f"no response ended at {stop!r}")

    def _occurring(self, answers: Sequence[Trajectory]) -> tuple[str, ...]:
        """Return two strings that occur in responses; one is short."""
        texts = [self.says(answer.response.tolist()[:-1]) or "" for answer in answers]
        longest = sorted((text.strip("\ufffd") for text in texts), key=len)[-1]
        parts = [longest[len(longest) // 3 :][:2], longest[len(longest) // 2 :][:4]]
        found = tuple(part for part in parts if part and "\ufffd" not in part)
        require(bool(found), f"no text in {longest!r}; use a policy that writes text")
        return found

    def _ends_at_string(self, name: str, whole: Trajectory, found: Trajectory, stop: tuple[str, ...]) -> None:
        tokens: list[int] = whole.response.tolist()
        texts = [self.says(tokens[:end]) or "" for end in range(1, len(tokens) + 1 - whole.closed)]
        end = next((at for at, text in enumerate(texts, start=1) if any(one in text for one in stop)), None)
        require(found.stopped == (end is not None), f"{name} must report whether a stop string ended it")
        require(found.response.tolist() == tokens[:end], f"{name} did not end at the first of {stop!r}")
        apart = float(np.abs(found.logprobs - whole.logprobs[:end]).max(initial=0.0))
        require(apart <= self.tolerance, f"the log-probabilities of {name} differ by {apart:g}")
        wanted = whole.status if end is None else "ok"
        require(found.status == wanted, f"{name} must have ended as {wanted}, got {found.status}")

    def test_what_is_aborted_completes_with_what_it_has(self) -> None:
        """An aborted response is a beginning of the whole response; the other responses continue."""
        engine = self.open_engine()
        work = self.work()
        whole = self.ask(engine, work)
        engine.submit(work)
        aborted = {generation.id for generation in work[::2]}
        engine.abort([*aborted, "nobody"])
        for name, answer in self.drain(engine, len(work)).items():
            if name in aborted and answer.status == "aborted":
                beginning = whole[name].response.tolist()[: answer.generated]
                require(answer.response.tolist() == beginning, f"{name} is not the beginning of its response")
            else:
                same(name, answer, whole[name], self.tolerance)
        self.ask(engine, work)  # the ids can be used again

    def test_a_paused_engine_computes_nothing_and_goes_on(self) -> None:
        """Pause before the first token."""
        engine = self.open_engine()
        work = self.work()
        engine.pause()
        engine.submit(work)
        require(engine.completed(0) == [], "a paused engine answered")
        engine.resume()
        self.drain(engine, len(work))

    def test_an_update_is_on_every_answer_after_it(self) -> None:
        """Check the version of each sampled segment."""
        engine = self.open_engine()
        for version in ("0.1", "0.2"):
            self.tell(engine, version)
            for name, answer in self.ask(engine, self.work()).items():
                require(answer.versions == (version,), f"{name} was sampled by {answer.versions}, not {version}")

    def test_what_cannot_be_answered_is_refused_as_a_whole(self) -> None:
        """With a repeated id, too small a context or an unserved policy, none of the work is accepted."""
        engine = self.open_engine()
        good = self.work(samples=1)
        first = good[0]
        long = SamplingParams(engine.context_length)
        bad = [
            Generation(first.id, first.tokens, 0, first.sampling, 1),
            Generation("long", first.tokens, 0, long, engine.context_length),
            Generation("other", first.tokens, 0, first.sampling, 1, policy="opponent"),
        ]
        for wrong in bad:
            require(refuses(partial(engine.submit, [*good, wrong])), f"{wrong.id} was not refused")
        engine.submit(good)
        require(refuses(partial(engine.submit, [first])), "an id in work was taken again")
        self.drain(engine, len(good))

    def test_an_idle_engine_answers_at_once(self) -> None:
        """Tested with a long timeout."""
        engine = self.open_engine()
        found: list[list[Completion]] = []
        asking = threading.Thread(target=lambda: found.append(list(engine.completed(WAIT))), daemon=True)
        asking.start()
        asking.join(WAIT / 2)
        require(found == [[]], "an idle engine waited for work")
