"""The contract suite of rollout engines itself: for each promise there is an engine that breaks it, and is found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import broken_draws
import broken_rollouts
import broken_weights
import families
import pytest
from torch import Tensor

from posttrain.engine.rollout.backends.module import ModuleRollout
from posttrain.engine.rollout.contract import RolloutEngineContract
from posttrain.engine.rollout.port import InFlight, RolloutEngine

Bites = RolloutEngineContract
ANSWERED = Bites.test_every_generation_is_answered_once_and_as_promised
STOPPED = Bites.test_a_stop_string_ends_a_response_or_is_refused
DRAWN = Bites.test_seed_key_sample_and_token_each_change_what_is_drawn
ENDED = Bites.test_a_response_ends_at_the_first_end_of_sequence_token
WHOLE = Bites.test_log_probabilities_are_of_the_whole_distribution
WARM = Bites.test_log_probabilities_are_at_the_temperature
SHOWN = Bites.test_what_it_shows_is_what_it_decodes_with
PROVEN = Bites.test_a_proof_is_of_the_weights_of_now
FINITE = Bites.test_logits_that_are_not_finite_end_the_job
PAUSED = Bites.test_weights_that_are_read_in_place_change_while_it_is_paused
BEGUN = Bites.test_what_has_begun_goes_on_as_an_update_says
GOES_ON = Bites.test_a_session_goes_on_as_its_whole_context_would
FREED = Bites.test_released_and_updated_sessions_are_read_again
SCORED = Bites.test_a_score_disturbs_no_work_and_reads_the_weights_of_now
BROKEN: list[tuple[type[broken_rollouts.Honest], Callable[[Any], None], str]] = [
    (broken_rollouts.Lossy, ANSWERED, "1 generations were not answered"),
    (broken_rollouts.Twice, ANSWERED, "was answered twice"),
    (broken_rollouts.Elsewhere, ANSWERED, "continues another prompt"),
    (broken_rollouts.Chatty, ANSWERED, r"has \d+ tokens"),
    (broken_rollouts.Certain, ANSWERED, "log-probabilities above 0"),
    (broken_rollouts.Cutting, ANSWERED, "was cut before its limit"),
    (broken_rollouts.Forgetful, ANSWERED, "a counter decreased"),
    (broken_rollouts.Sociable, Bites.test_company_and_order_change_nothing, "became another response"),
    (broken_rollouts.Deaf, Bites.test_a_limit_is_kept, "is another response"),
    (broken_rollouts.Unstoppable, STOPPED, "must report whether a stop string ended it"),
    (broken_rollouts.Headlong, STOPPED, "must report whether a stop string ended it"),
    (broken_rollouts.Stubborn, Bites.test_what_is_aborted_completes_with_what_it_has, "generations were not answered"),
    (broken_rollouts.Restless, Bites.test_a_paused_engine_computes_nothing_and_goes_on, "a paused engine answered"),
    (broken_rollouts.Outdated, Bites.test_an_update_is_on_every_answer_after_it, r"was sampled by \('0.1',\), not 0.2"),
    (broken_rollouts.Obliging, Bites.test_what_cannot_be_answered_is_refused_as_a_whole, "was not refused"),
    (
        broken_rollouts.Repeating,
        Bites.test_progress_is_a_beginning_of_the_answer,
        "are not the beginning of its answer",
    ),
    (broken_rollouts.Erasing, Bites.test_an_aborted_response_keeps_what_it_has, r"had \d+ tokens .* its answer has 0"),
    (broken_rollouts.Rereading, GOES_ON, "must not read again what they hold: at most 32 tokens, got"),
    (broken_rollouts.Smudging, GOES_ON, "became another response"),
    (broken_rollouts.Smudging, Bites.test_an_aborted_turn_goes_on, "became another response"),
    (broken_rollouts.Sociable, Bites.test_sessions_are_the_same_in_any_company_and_order, "became another response"),
    (broken_rollouts.Trusting, Bites.test_a_context_that_was_rewritten_is_read_as_a_whole, "became another response"),
    (broken_rollouts.Clinging, FREED, "after release, sessions must be read again"),
    (broken_rollouts.Stale, FREED, "after update, sessions must be read again"),
    (broken_rollouts.Sharing, Bites.test_a_session_has_one_unanswered_generation, "of a session were accepted"),
    (broken_rollouts.Shifted, Bites.test_scores_are_the_log_probabilities_of_sampling, "must have no log-probability"),
    (broken_rollouts.Distracted, SCORED, "a score depends on other work"),
    (broken_rollouts.Anyone, Bites.test_each_policy_answers_with_its_own_version, "that is not served was accepted"),
    (broken_draws.Sure, DRAWN, "another seed must change the tokens drawn"),
    (broken_draws.Seedless, DRAWN, "another seed must change the tokens drawn"),
    (broken_draws.Keyless, DRAWN, "another key must change the tokens drawn"),
    (broken_draws.Unanimous, DRAWN, "another sample must change the tokens drawn"),
    (broken_draws.Stuck, DRAWN, "every token must have its own random number"),
    (broken_draws.HalfDeaf, ENDED, r"must end at the first of \[2, 17\]"),
    (broken_draws.Unending, ENDED, "no response ended by itself"),
    (broken_draws.Brief, ENDED, "must ignore end tokens and have 30 tokens"),
    (broken_draws.Clipping, ENDED, "must end at the first of"),
    (broken_draws.Renormalised, WHOLE, r"at temperature 1\.0 with {'top_k': 2}, got some that differ"),
    (broken_draws.Cold, WHOLE, r"at temperature 1\.5 with {'greedy': True}, got some that differ"),
    (broken_draws.Lukewarm, WARM, r"must differ by \S+ at temperature 1\.5"),
    (broken_draws.Generous, Bites.test_truncated_draws_are_among_the_likely_tokens, "only likely tokens may be drawn"),
    (broken_weights.Undaunted, FINITE, "logits that are not finite must end in JobFailedError, got 4 answers"),
    (broken_weights.Copying, SHOWN, r"exposes model\.embed_tokens\.weight, but its answers do not change"),
    (broken_weights.Unfusing, SHOWN, r"exposes model\.layers\.1\.mlp\.up_proj\.weight, but its answers do not change"),
    (broken_weights.Frozen, SHOWN, r"exposes model\.norm\.weight, but its answers do not change"),
    (broken_weights.Keeping, PROVEN, "a proof must be of all weights that are there, but is"),
    (broken_weights.Halfway, PROVEN, "a proof must be of all weights that are there, but is"),
    (broken_weights.Unrelated, PROVEN, "a proof must change with the weights"),
    (broken_weights.Undefined, PROVEN, "must have finite log-probabilities, got"),
    (broken_weights.Curt, PROVEN, "must have a number for each token"),
    (broken_weights.Imitating, PROVEN, "must be of the weights that sample"),
    (broken_weights.Hasty, PAUSED, "was accepted by an engine that was not paused"),
    (broken_weights.Anybody, PAUSED, "of a policy that is not served was accepted"),
    (broken_weights.Lenient, BEGUN, "must be finished by the version that began it"),
    (broken_weights.Lazy, BEGUN, "old tokens must be computed again"),
    (broken_weights.Diligent, BEGUN, "keys and values of the old weights must be kept"),
    (broken_weights.Claiming, BEGUN, r"a begun response must report 0\.1 as its first version"),
    (broken_weights.Nostalgic, BEGUN, "has tokens attributed to 0.1 that 0.1 would not sample"),
]


class _Suite(RolloutEngineContract):
    __test__ = False
    limit = 9
    ends = broken_rollouts.ENDS

    def __init__(self, engine: type[broken_rollouts.Honest]) -> None:
        self._engine = engine

    def open_engine(self) -> RolloutEngine:
        return cast(RolloutEngine, self._engine())

    def held(self) -> Sequence[Tensor]:
        return [parameter.detach() for parameter in broken_rollouts.model().module.parameters()]

    def says(self, tokens: Sequence[int]) -> str | None:
        return str(families.tokenizer().decode(list(tokens), skip_special_tokens=False))


@pytest.mark.parametrize(("engine", "promise", "line"), BROKEN, ids=lambda one: getattr(one, "__name__", ""))
def test_an_engine_that_breaks_a_promise_is_found(
    engine: type[broken_rollouts.Honest], promise: Callable[[Any], None], line: str
) -> None:
    promise(_Suite(broken_rollouts.Honest))
    with pytest.raises(AssertionError, match=line):
        promise(_Suite(engine))


def test_every_promise_of_the_suite_is_broken_by_somebody() -> None:
    promises = {name for name in dir(RolloutEngineContract) if name.startswith("test_")}
    broken = {promise.__name__ for _, promise, _ in BROKEN}
    assert promises - broken == {"test_an_idle_engine_answers_at_once"}, "which only a wait of minutes could break"


def test_an_engine_that_exposes_no_tensors_may_keep_every_promise() -> None:
    PROVEN(_Suite(broken_weights.Hidden))


class Batched(broken_weights.Hasty):
    """What has begun is always finished."""

    def __init__(self) -> None:
        self._module = self._inner = ModuleRollout(broken_rollouts.model())  # type: ignore[assignment]

    def update(self, policy: str, version: str, *, in_flight: InFlight = "finish") -> None:
        while self._module._rows:  # type: ignore[attr-defined]
            self._module._step()  # type: ignore[attr-defined]
        super().update(policy, version, in_flight=in_flight)


@pytest.mark.parametrize("promise", [SHOWN, FINITE, PAUSED, BEGUN])
def test_an_engine_with_weights_of_its_own_may_be_updated_at_any_time(promise: Callable[[Any], None]) -> None:
    suite = _Suite(Batched)
    suite.in_place = False
    promise(suite)


def test_an_engine_with_weights_of_its_own_finishes_with_them() -> None:
    suite = _Suite(broken_weights.Overtaken)
    suite.in_place = False
    with pytest.raises(AssertionError, match="must be finished by the version that began it"):
        BEGUN(suite)


def test_tensors_that_no_answer_depends_on_are_named() -> None:
    suite = _Suite(broken_weights.Frozen)
    suite.unheard = ("model.norm.weight",)
    SHOWN(suite)
