"""Attestation by a probe: verdicts by hand, and stages whose rollout exposes no tensors."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mortal_pools import at_the
from test_engine_lag import APART, TOGETHER, recipe, told
from test_engine_replacing import Stage
from test_engine_training import PROMPTS, TINY, TOKENIZER, Desk, stop_after

from posttrain.domain.errors import IntegrityError, JobFailedError
from posttrain.domain.jobs import Span
from posttrain.engine.models.files import ModelSource, initial_model
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.backends.scripted import ScriptedRollout
from posttrain.engine.rollout.port import Proof
from posttrain.engine.rollout.worker import RolloutWorker
from posttrain.engine.weights.probe import Attested, Probe, challenge_of, tolerance, weakest
from posttrain.engine.weights.stream import PolicyVersion

OLD, NEW = PolicyVersion(0, 6), PolicyVersion(0, 7)
NOW = np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0])
FLOAT32, BFLOAT16 = torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps


def probe(moved: float, epsilon: float = FLOAT32, *, first: bool = False) -> Probe:
    """Two versions that differ by `moved` at the second and the fifth of eight places."""
    old = NOW.copy()
    old[[1, 4]] += [moved, -moved]
    return Probe(NEW, NOW, [] if first else [(OLD, old)], tolerance(epsilon))


def engine(moved: float, share: float, noise: float = 0.0) -> Any:
    """What an engine answers that is this share of the way to the old version, and off by `noise` everywhere."""
    found = NOW + noise * np.array([1, -1, 1, -1, 1, 1, -1, -1])
    found[[1, 4]] += share * np.array([moved, -moved])
    return found


VERDICTS: list[tuple[float, float, float, float, Attested | str]] = [
    # moved, epsilon, share, noise; the noise shifts the share by -noise / moved, and its standard error is that of six
    # of eight places without a difference: sqrt(6 / 8) noise / (sqrt(2) moved)
    (0.01, FLOAT32, 0.0, 0.0, "probe"),
    (0.01, FLOAT32, 1.0, 0.0, "nearer version 0.6: 100% of the way to it, with a standard error of 0.0%"),
    (0.01, FLOAT32, 0.4, 0.0, "probe"),
    (0.01, FLOAT32, 0.75, 0.0, "nearer version 0.6: 75% of the way to it"),
    (0.0005, FLOAT32, 1.0, 0.0, "undecided"),  # below 1e-3
    (0.002, FLOAT32, 1.0, 0.0, "nearer version 0.6: 100%"),  # above
    (0.002, FLOAT32, 0.0, 0.05, "undecided"),  # a quantised copy: its own error hides the difference
    (0.2, FLOAT32, 0.0, 0.05, "probe"),
    (0.2, FLOAT32, 1.0, 0.05, "undecided"),  # 0.75 ± 0.15: within four errors of a half
    (0.2, FLOAT32, 1.0, 0.01, "nearer version 0.6: 95% of the way to it, with a standard error of 3.1%"),
    (0.01, BFLOAT16, 1.0, 0.0, "undecided"),  # below 8 epsilons, 0.0625
    (0.05, BFLOAT16, 1.0, 0.03, "undecided"),
    (0.1, BFLOAT16, 0.0, 0.03, "probe"),
    (0.1, BFLOAT16, 1.0, 0.0, "nearer version 0.6: 100%"),
    # the standard deviation of -1 … -8 is sqrt(5.25) = 2.2913: at most a quarter of it, 0.5728, from the version
    (0.01, FLOAT32, 0.0, 0.57, "undecided"),
    (0.01, FLOAT32, 0.0, 0.58, "0.58 nats from it (root mean square over 8 places, at most 0.573)"),
    (0.01, BFLOAT16, 0.0, 0.58, "0.58 nats from it (root mean square over 8 places, at most 0.573)"),
]


@pytest.mark.parametrize(("moved", "epsilon", "share", "noise", "verdict"), VERDICTS)
def test_the_verdict_is_that_of_hand(moved: float, epsilon: float, share: float, noise: float, verdict: str) -> None:
    posed, found = probe(moved, epsilon), engine(moved, share, noise)
    if verdict in ("probe", "undecided"):
        assert posed.verdict("rollout rank 3", found) == verdict
        return
    with pytest.raises(IntegrityError) as caught:
        posed.verdict("rollout rank 3", found)
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("rollout rank 3 must decode with policy version 0.7, got log-probabilities ")
    assert verdict in said
    assert said.endswith("from the last checkpoint")


def test_the_first_version_of_an_attempt_is_undecided_and_must_be_near() -> None:
    assert probe(0.0, first=True).verdict("it", NOW) == "undecided"
    with pytest.raises(IntegrityError, match=r"10 nats from it .* the engine decodes with other weights"):
        probe(0.0, first=True).verdict("it", NOW - 10)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_few_places_are_enough(count: int) -> None:
    now = NOW[:count]
    posed = Probe(NEW, now, [(OLD, now + 0.1)], tolerance(FLOAT32))
    assert posed.verdict("it", now) == "probe"
    with pytest.raises(IntegrityError, match=r"nearer version 0\.6"):
        posed.verdict("it", now + 0.1)


def test_small_steps_add_up_against_an_engine_that_never_loads() -> None:
    """A step moves no place by what rounding explains; forty of them do."""
    dice = np.random.default_rng(0)
    now, step = -dice.gamma(0.6, 2.5, 2047), 0.005 * dice.normal(size=2047)
    versions = [(PolicyVersion(0, at), now + at * step) for at in range(40)]

    def verdict(at: int) -> str:
        try:
            return Probe(*versions[at], [versions[0], versions[at - 1]], tolerance(BFLOAT16)).verdict("it", now)
        except IntegrityError as error:
            return str(error)

    found = [verdict(at) for at in range(1, 40)]
    undecided = found.count("undecided")
    assert found[:undecided] == ["undecided"] * undecided
    assert 5 < undecided < 39
    assert all("nearer version 0.0: 100% of the way to it" in line for line in found[undecided:])


@pytest.mark.parametrize(("error", "step"), [(0.05, 0.005), (0.1, 0.01), (0.2, 0.01), (0.1, 0.1)])
def test_an_honest_engine_that_computes_less_exactly_is_never_refused(error: float, step: float) -> None:
    """60 % of the places are nearly certain, as in a template: neither a step nor the engine's error moves them."""
    sure = torch.arange(1024) < 614
    for seed in range(40):
        dice = torch.Generator().manual_seed(seed)

        def noise(dice: torch.Generator = dice) -> torch.Tensor:
            return torch.randn(1024, 64, generator=dice)

        logits = 2 * noise()
        tokens = torch.distributions.Categorical(logits=logits).sample()
        logits[sure, tokens[sure]] += 14.0
        new = logits + step * noise()
        old, now, found = (
            x.log_softmax(-1)[torch.arange(1024), tokens].double().numpy() for x in (logits, new, new + error * noise())
        )
        assert Probe(NEW, now, [(OLD, old)], tolerance(FLOAT32)).verdict("it", found) in ("undecided", "probe")


def test_a_policy_without_finite_numbers_proves_nothing() -> None:
    now = np.where(NOW == -4, np.nan, NOW)
    with pytest.raises(JobFailedError, match=r"policy version 0\.7 must have finite log-probabilities, got nan in the"):
        Probe(NEW, now, [(OLD, NOW)], tolerance(FLOAT32)).verdict("it", NOW - 5)


def test_tolerances_are_those_of_the_warning_of_a_mismatch() -> None:
    """Of `loop/updates.py`, in docs/adr/0058: 1e-3, 0.06 and 0.008."""
    found = [tolerance(torch.finfo(dtype).eps) for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    assert found == [1e-3, 0.0625, 0.0078125]


def test_a_challenge_is_the_first_prompts_and_bounded() -> None:
    assert challenge_of([(5, 9), (7,)]) == ((5, 9, 5), (7, 7))
    long = challenge_of([(1,) * 1500, (2,) * 1500, (3, 4)])
    assert [len(text) for text in long] == [1501, 547]
    assert challenge_of([(1,) * 2046, (3, 4)]) == ((1,) * 2047,), "one token would have no place"
    assert challenge_of([]) == ()


def test_the_weakest_verdict_is_that_of_a_publication() -> None:
    assert weakest(["exact", "probe"]) == "probe"
    assert weakest(["probe", "undecided", "exact"]) == "undecided"
    assert weakest(["undecided", "none"]) == "none"


# --- stages -----------------------------------------------------------------------------------------------------------


class Hidden:
    """The native engine, without its tensors. A stale one proves, and samples with, those that it was opened with."""

    def __init__(self, model: LanguageModel, *given: Any, stale: bool = False, **words: Any) -> None:
        own = adopt_module(deepcopy(model.module)) if stale else model
        self._engine = NativeRollout(own, *given, **{name: word for name, word in words.items() if name != "name"})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def attest(self, challenge: Any) -> Proof:
        return Proof(logprobs=[one.logprobs for one in self._engine.score(challenge)])


class Stale(Hidden):
    def __init__(self, *given: Any, **words: Any) -> None:
        super().__init__(*given, stale=True, **words)


class Unrelated(Hidden):
    def __init__(self, model: LanguageModel, *given: Any, **words: Any) -> None:
        super().__init__(adopt_module(initial_model(TINY, TOKENIZER, 5)), *given, **words)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("model")
    initial_model(TINY, TOKENIZER, 0).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return ModelSource(folder, "float32")


def opens(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    monkeypatch.setattr("posttrain.engine.rollout.worker.open_rollout", made)


def attested(desk: Desk) -> list[Any]:
    spans = [fact for fact in desk.facts if isinstance(fact, Span) and fact.name == "weights"]
    return [span.attributes.get("attested") for span in spans]


@pytest.mark.parametrize("placement", [TOGETHER, APART], ids=["together", "apart"])
def test_a_stage_with_an_engine_that_exposes_no_tensors_is_attested(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Any
) -> None:
    """With the bits of a stage whose engine does; one whose engine does is not probed."""
    with monkeypatch.context() as patch:
        patch.setattr(RolloutWorker, "probe", lambda *given: pytest.fail("probed"))
        exact = Desk(tmp_path / "exact", recipe(model, placement=placement))
        exact.run()
    opens(monkeypatch, Hidden)
    desk = Desk(tmp_path / "probed", recipe(model, placement=placement))
    desk.run()
    assert attested(exact) == ["exact"] * 6
    assert attested(desk) == ["undecided", *["probe"] * 5]
    assert all(torch.equal(value, exact.weights()[name]) for name, value in desk.weights().items())
    assert told(desk) == told(exact)


@pytest.mark.parametrize("placement", [TOGETHER, APART], ids=["together", "apart"])
@pytest.mark.parametrize(
    ("made", "line"),
    [
        (Stale, r"rollout rank 0 must decode with policy version 0\.1, got log-probabilities nearer version 0\.0: "),
        (Unrelated, r"policy version 0\.0, got log-probabilities \S+ nats from it \(root mean square over \d+ places"),
    ],
)
def test_a_stage_whose_engine_has_other_weights_ends_in_one_line(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Any, line: str, placement: Any
) -> None:
    opens(monkeypatch, made)
    with pytest.raises(IntegrityError, match=line) as caught:
        Desk(tmp_path, recipe(model, placement=placement)).run()
    assert "\n" not in str(caught.value)


def test_an_engine_that_can_prove_nothing_is_seen_in_the_trace(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(monkeypatch, lambda *given, **words: ScriptedRollout(lambda prompt, sample: [9, 8]))
    desk = Desk(tmp_path, recipe(model, placement=TOGETHER, steps=1, mini_batches=1))
    desk.run()
    assert attested(desk) == ["none", "none"]


def test_a_resumed_attempt_begins_undecided(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens(monkeypatch, Hidden)
    whole = Desk(tmp_path / "whole", recipe(model))
    whole.run()
    first = Desk(tmp_path / "cut", recipe(model), orders=stop_after(2))
    first.run()
    rest = Desk(tmp_path / "cut", recipe(model))
    rest.controller.resume(first.latest())
    rest.run()
    assert attested(rest) == ["undecided", *["probe"] * 3]
    assert rest.controller.recipe.roles.prober.texts == challenge_of(prompt.tokens for prompt in PROMPTS)
    assert all(torch.equal(value, whole.weights()[name]) for name, value in rest.weights().items())


@pytest.mark.parametrize(("method", "number"), [("feed", 3), ("feed", 9), ("probe", 2)])
def test_a_replaced_rank_is_probed_too(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    opens(monkeypatch, Hidden)
    plain = Stage(model, tmp_path / "plain", 2, 1).run()
    stage = Stage(model, tmp_path / "replaced", 2, 1)
    stage.backend.fate = at_the(number, method, 1)
    weights, metrics = stage.run()
    assert len(stage.notes) == 1
    assert metrics == plain[1]
    assert all(torch.equal(value, plain[0][name]) for name, value in weights.items())
    assert attested(stage.desk) == ["undecided", *["probe"] * 4]


def test_a_replaced_rank_with_other_weights_ends_the_stage(
    model: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []

    def made(*given: Any, **words: Any) -> Any:
        opened.append((Stale if len(opened) == 2 else Hidden)(*given, **words))
        return opened[-1]

    opens(monkeypatch, made)
    stage = Stage(model, tmp_path, 2, 1)
    stage.backend.fate = at_the(9, "feed", 1)
    with pytest.raises(IntegrityError, match=r"rollout rank 1 must decode with policy version 0\.\d, got log-prob"):
        stage.run()
    assert len(opened) == 3
