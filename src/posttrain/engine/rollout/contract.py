"""What the port promises, as tests that an engine of anybody's can run against itself.

In a test file of yours::

    class TestMyEngine(RolloutEngineContract):
        def open_engine(self) -> RolloutEngine:
            return MyEngine(...)
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial

import numpy as np

from posttrain.engine.rollout.contract_bench import WAIT, refuses, require, same
from posttrain.engine.rollout.contract_draws import DrawContract
from posttrain.engine.rollout.contract_weights import WeightContract
from posttrain.engine.rollout.port import Completion, Generation, SamplingParams
from posttrain.engine.samples import Trajectory


class RolloutEngineContract(DrawContract, WeightContract):
    """Subclass it, give `open_engine`; pytest collects the tests. What else can be given is at the top of `Bench`.

    The engine's policy may be anything that speaks about the tokens in `prompts` and does not end at once. The suite
    changes weights where the engine shows them, and gives them back.
    """

    def test_every_generation_is_answered_once_and_as_promised(self) -> None:
        """Prompt, length, log-probabilities, status; what is counted grows."""
        engine = self.open_engine()
        before = dict(engine.counts())
        work = self.work()
        engine.submit(work)
        found = self.drain(engine, len(work))
        grown = engine.counts()
        require(before.keys() == grown.keys(), f"it counted {sorted(before)} and then {sorted(grown)}")
        require(all(grown[name] >= count for name, count in before.items()), "what it counted became less")
        for asked in work:
            answer = found[asked.id]
            require(tuple(answer.prompt.tolist()) == asked.tokens, f"{asked.id} continues another prompt")
            require(1 <= answer.generated <= asked.limit, f"{asked.id} has {answer.generated} tokens")
            require(bool(np.isfinite(answer.logprobs).all()), f"{asked.id} has log-probabilities that are no numbers")
            require(bool((answer.logprobs <= 1e-3).all()), f"{asked.id} has log-probabilities above 0")
            require(answer.status in ("ok", "truncated"), f"{asked.id} ended as {answer.status}")
            if answer.status == "truncated":
                require(answer.generated == asked.limit, f"{asked.id} was cut before its limit")

    def test_company_and_order_change_nothing(self) -> None:
        """The same generations, backwards and in two parts."""
        engine = self.open_engine()
        work = self.work()
        engine.submit(work)
        together = self.drain(engine, len(work))
        engine.submit(work[: len(work) // 2][::-1])
        apart = self.drain(engine, len(work) // 2)
        engine.submit(work[len(work) // 2 :][::-1])
        apart |= self.drain(engine, len(work) - len(work) // 2)
        for name, answer in together.items():
            same(name, answer, apart[name], self.tolerance)

    def test_a_limit_is_kept(self) -> None:
        """A shorter limit gives the beginning of the same response."""
        engine = self.open_engine()
        work = self.work(samples=1)
        engine.submit(work)
        whole = self.drain(engine, len(work))
        short = [Generation(g.id, g.tokens, g.key, g.sampling, 2, g.sample) for g in work]
        engine.submit(short)
        for name, answer in self.drain(engine, len(work)).items():
            kept = min(2, whole[name].generated)
            require(answer.response.tolist() == whole[name].response.tolist()[:kept], f"{name} is another response")

    def test_a_stop_string_ends_a_response_or_is_refused(self) -> None:
        """With the token that completes it, in company that has none; what was sampled is what it would have been."""
        engine = self.open_engine()
        work = self.work()
        if self.says([]) is None:
            asked = self.work(samples=1, mark="stop ", stop=("a",))
            require(refuses(partial(engine.submit, [*work, *asked])), "stop strings were not refused")
            return
        engine.submit(work)
        whole = self.drain(engine, len(work))
        stop = self._occurring(list(whole.values()))
        asked = self.work(mark="stop ", stop=stop)
        engine.submit([generation for both in zip(work, asked, strict=True) for generation in both])
        found = self.drain(engine, len(work) + len(asked))
        for name, answer in whole.items():
            same(name, answer, found[name], self.tolerance)
            self._ends_at_string(name, answer, found[f"stop {name}"], stop)
        require(any(found[one.id].stopped for one in asked), f"no response ended at {stop!r}")

    def _occurring(self, answers: Sequence[Trajectory]) -> tuple[str, ...]:
        """Two strings out of what was said, one of them short."""
        texts = [self.says(answer.response.tolist()[:-1]) or "" for answer in answers]
        longest = sorted((text.strip("\ufffd") for text in texts), key=len)[-1]
        parts = [longest[len(longest) // 3 :][:2], longest[len(longest) // 2 :][:4]]
        found = tuple(part for part in parts if part and "\ufffd" not in part)
        require(bool(found), f"no text in {longest!r}; give a policy that says some")
        return found

    def _ends_at_string(self, name: str, whole: Trajectory, found: Trajectory, stop: tuple[str, ...]) -> None:
        tokens: list[int] = whole.response.tolist()
        texts = [self.says(tokens[:end]) or "" for end in range(1, len(tokens) + 1 - whole.closed)]
        end = next((at for at, text in enumerate(texts, start=1) if any(one in text for one in stop)), None)
        require(found.stopped == (end is not None), f"{name} must say whether a string ended it")
        require(found.response.tolist() == tokens[:end], f"{name} did not end at the first of {stop!r}")
        apart = float(np.abs(found.logprobs - whole.logprobs[:end]).max(initial=0.0))
        require(apart <= self.tolerance, f"the log-probabilities of {name} differ by {apart:g}")
        wanted = whole.status if end is None else "ok"
        require(found.status == wanted, f"{name} must have ended as {wanted}, got {found.status}")

    def test_what_is_aborted_completes_with_what_it_has(self) -> None:
        """An aborted response is the beginning of what it would have been; the others go on."""
        engine = self.open_engine()
        work = self.work()
        engine.submit(work)
        whole = self.drain(engine, len(work))
        engine.submit(work)
        aborted = {generation.id for generation in work[::2]}
        engine.abort([*aborted, "nobody"])
        found = self.drain(engine, len(work))
        for name, answer in found.items():
            if name in aborted and answer.status == "aborted":
                beginning = whole[name].response.tolist()[: answer.generated]
                require(answer.response.tolist() == beginning, f"{name} is not the beginning of its response")
            else:
                same(name, answer, whole[name], self.tolerance)
        engine.submit(work)  # ids are free again
        self.drain(engine, len(work))

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
        """The version of each sampled segment."""
        engine = self.open_engine()
        for version in ("0.1", "0.2"):
            engine.pause()
            engine.update("", version)
            engine.resume()
            work = self.work()
            engine.submit(work)
            for name, answer in self.drain(engine, len(work)).items():
                require(answer.versions == (version,), f"{name} was sampled by {answer.versions}, not {version}")

    def test_what_cannot_be_answered_is_refused_as_a_whole(self) -> None:
        """An id twice, a context that is too small, a policy that nobody serves: nothing of it is taken."""
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
        """However long one is willing to wait."""
        engine = self.open_engine()
        found: list[list[Completion]] = []
        asking = threading.Thread(target=lambda: found.append(list(engine.completed(WAIT))), daemon=True)
        asking.start()
        asking.join(WAIT / 2)
        require(found == [[]], "an idle engine waited for work")
