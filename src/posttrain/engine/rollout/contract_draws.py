"""What the port promises of draws: what decides them, what their log-probabilities are of, where responses end.

The suite has no model to compare with. It holds what an engine says in one way against what it says in another: after
the same tokens, the same token has the same log-probability at a temperature, however it was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations
from math import exp
from typing import Any

from posttrain.engine.rollout.contract_bench import Bench, require
from posttrain.engine.rollout.port import Generation, RolloutEngine, SamplingParams

Seen = dict[tuple[int, ...], dict[int, float]]  # after these tokens: log-probability of each that was drawn

_WARM = 1.5
_LEVEL = 1e4  # so high a temperature that a token tells its random number, whatever the policy thinks
_FEW = 4  # tokens of responses that are looked at token by token: later ones seldom follow the same
_ONE_IN = 100  # differences that are this many roundings or more can be told from none
_TRUNCATIONS: tuple[dict[str, Any], ...] = ({"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.5})


class DrawContract(Bench):
    """The tests of draws."""

    def test_seed_key_sample_and_token_each_change_what_is_drawn(self) -> None:
        """Of one prompt, at a temperature at which nothing but chance decides."""
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
            require(found[name] != found["it"], f"another {name} must change what is drawn, got the same {found[name]}")
        repeats = all(len(set(tokens)) == 1 for tokens in found.values())
        require(not repeats, f"every token must have a random number of its own, got {found['it']}")

    def test_a_response_ends_at_the_first_end_of_sequence_token(self) -> None:
        """Or, where that is asked for, at its limit alone; until then it says the same."""
        engine = self.open_engine()
        whole = self.ask(engine, self.work(limit=self.long, ignore_eos=True))
        for name, answer in whole.items():
            kept = answer.generated == self.long and answer.truncated
            got = f"{answer.generated} tokens that ended as {answer.status}"
            require(kept, f"{name} must ignore what ends it and have {self.long} tokens, got {got}")
        found = self.ask(engine, self.work(limit=self.long))
        last = {int(answer.response[-1]) for answer in found.values() if answer.status == "ok" and answer.generated}
        require(bool(last), "no response ended by itself; give a policy that ends some, or a larger `long`")
        ends = {*self.ends, *last}
        for name, answer in found.items():
            tokens: list[int] = whole[name].response.tolist()
            end = next((at for at, token in enumerate(tokens, start=1) if token in ends), None)
            wanted, status = tokens[:end], "truncated" if end is None else "ok"
            got = f"{answer.generated} tokens that ended as {answer.status}"
            held = answer.response.tolist() == wanted and answer.status == status
            require(held, f"{name} must end at the first of {sorted(ends)}, after {len(wanted)} tokens, got {got}")

    def test_log_probabilities_are_of_the_whole_distribution(self) -> None:
        """Greedy or not, truncated or not, at two temperatures."""
        engine = self.open_engine()
        for temperature in (1.0, _WARM):
            seen = self._seen(engine, temperature=temperature)
            for way in ({"greedy": True}, *_TRUNCATIONS):
                drawn = self._seen(engine, temperature=temperature, **way)
                pairs = list(_both(seen, drawn))
                require(bool(pairs), f"no token was drawn with {way} and without; give a policy that is surer")
                apart = max(abs(one[token] - other[token]) for one, other, tokens in pairs for token in tokens)
                require(
                    apart <= self.rounding,
                    f"log-probabilities must be of the whole distribution at temperature {temperature} with {way}, "
                    f"got some that differ by {apart:g}",
                )
                for context, tokens in drawn.items():
                    seen.setdefault(context, {}).update(tokens)

    def test_log_probabilities_are_at_the_temperature(self) -> None:
        """Of two tokens, their difference is that of the logits, divided by it."""
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
                    f"for they do by {logits:g} at 1, got {found:g}",
                )
        require(told > 0, "no two tokens were drawn at both temperatures; give a policy that is less sure")

    def test_truncated_draws_are_among_the_likely_tokens(self) -> None:
        """By the log-probabilities themselves: what was drawn after the same tokens."""
        if not self.draws:
            return
        engine = self.open_engine()
        for way in _TRUNCATIONS:
            for tokens in self._seen(engine, **way).values():
                shares = sorted(map(exp, tokens.values()))
                before = sum(shares[1:])  # what is likelier than the last that was kept
                held = (
                    len(shares) <= way.get("top_k", len(shares))
                    and before < way.get("top_p", 1.0) + self.rounding
                    and shares[0] >= way.get("min_p", 0.0) * shares[-1] - self.rounding
                )
                require(held, f"with {way} only likely tokens may be drawn, got tokens of {shares}")

    def _seen(self, engine: RolloutEngine, **sampling: Any) -> Seen:
        """What eight samples of every prompt said."""
        found: Seen = {}
        for answer in self.ask(engine, self.work(samples=8, limit=min(self.limit, _FEW), **sampling)).values():
            before: tuple[int, ...] = tuple(answer.prompt.tolist())
            for token, logprob in zip(answer.response.tolist(), answer.logprobs.tolist(), strict=True):
                found.setdefault(before, {})[token] = logprob
                before = (*before, token)
        return found


def _both(one: Seen, other: Seen) -> Iterator[tuple[Mapping[int, float], Mapping[int, float], list[int]]]:
    """Where both drew the same tokens after the same: what each says, and which they are."""
    for context, mine in one.items():
        tokens = sorted(mine.keys() & other.get(context, {}).keys())
        if tokens:
            yield mine, other[context], tokens
