"""Publishing weights from one pool to another: what arrives, what it takes, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import families
import numpy as np
import published_ranks
import pytest
import torch
from held_bytes import HeldBytes
from torch import Tensor

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.algorithms.objectives import SupervisedObjective, Totals
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.backends.inline import InlineBackend
from posttrain.engine.groups.port import RankContext
from posttrain.engine.groups.worker_group import ResourcePool
from posttrain.engine.loop.publication import Alias, Roles, transport
from posttrain.engine.models.files import ModelSource
from posttrain.engine.models.language_model import LanguageModel, adopt_module
from posttrain.engine.models.sharding import layout_of
from posttrain.engine.roles.training import TrainWorker
from posttrain.engine.rollout.decoding import prompt_logprobs
from posttrain.engine.rollout.port import PromptBatch, Proof, SamplingParams
from posttrain.engine.rollout.worker import EngineError, RolloutWorker
from posttrain.engine.settings import OptimizerConfig, RuntimeConfig
from posttrain.engine.weights import stream
from posttrain.engine.weights.stream import AdapterOnly, Bucket, PolicyVersion, carried
from posttrain.planner import residency

BATCH = TokenBatch.pack([Document([5, 9, 3], [7, 8, 2]), Document([4], [6, 6])])
FAST = OptimizerConfig(learning_rate=5e-2, warmup_steps=0)


class Apart:
    """A policy and a rollout in pools of their own, in this process; each reads the model from the same folder."""

    def __init__(self, folder: Path, family: str, dtype: str) -> None:
        families.build(family).save_pretrained(folder)
        source = ModelSource(folder, dtype)
        pools = [ResourcePool(InlineBackend(pool=name)) for name in ("policy", "rollout")]
        policy = pools[0].start("policy", TrainWorker, source, FAST, RuntimeConfig(), steps=9, seed=0)
        rollout = pools[1].start("rollout", RolloutWorker, source)
        self.roles = Roles({"policy": policy}, rollout=rollout)
        self.policy: TrainWorker = policy.one(lambda worker: worker)
        self.rollout: RolloutWorker = rollout.one(lambda worker: worker)
        self.step = 0

    def learn(self) -> None:
        self.policy.update(BATCH, SupervisedObjective(Totals.of(BATCH)), step=self.step)

    def publish(self) -> None:
        self.step += 1
        self.roles.publish(PolicyVersion(0, self.step))

    def decoded(self) -> dict[str, Tensor]:
        return {name: view.clone() for name, view in self.rollout._engine.attest(()).views or ()}

    def trained(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.policy.engine.model.module.named_parameters()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


CASES = [(family, dtype) for family in ("qwen3", "llama", "gpt2") for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("family", "dtype"), CASES)
@pytest.mark.parametrize("limit", [1 << 26, 1000])
def test_what_was_trained_is_decoded_with(
    family: str, dtype: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one bucket and in many; tied (qwen3, gpt2) and untied heads, fused and the module's own."""
    monkeypatch.setattr(stream, "BUCKET_BYTES", limit)
    apart = Apart(tmp_path, family, dtype)
    apart.publish()
    before = apart.decoded()
    for _ in range(2):
        apart.learn()
        assert same(apart.decoded(), before), "nothing moves before it is published"
        apart.publish()
        assert same(apart.decoded(), apart.trained())
        assert not same(apart.decoded(), before)
        before = apart.decoded()


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2"])
def test_what_an_engine_derives_of_its_weights_is_derived_anew(family: str, tmp_path: Path) -> None:
    """Scaled norms, say, are no tensor of the model, so nobody attests them: they must not outlive a publication."""
    apart = Apart(tmp_path, family, "float32")
    sampling = SamplingParams(6, seed=3, ignore_eos=True)
    said = lambda worker: worker.generate(PromptBatch(((5, 9, 3), (4,)), (7, 8)), sampling, 4).trajectories  # noqa: E731
    said(apart.rollout)
    for _ in range(3):
        apart.learn()
    apart.publish()
    context = RankContext()
    context.lend(apart.policy.engine.model)
    fresh = said(RolloutWorker(context))
    for one, two in zip(said(apart.rollout), fresh, strict=True):
        assert one.response.tolist() == two.response.tolist()
        assert one.segments[-1].logprobs.tolist() == two.segments[-1].logprobs.tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_without_signal_raises_no_alarm(dtype: str, tmp_path: Path) -> None:
    apart = Apart(tmp_path, "qwen3", dtype)
    apart.learn()
    apart.publish()
    apart.publish()
    apart.publish()
    assert apart.rollout._version == PolicyVersion(0, 3)


def flip(tensor: Tensor) -> None:
    """The lowest bit of one element in the middle, in place."""
    tensor.view(-1)[tensor.numel() // 2 :][:1].view(torch.uint8)[0] ^= 1


def in_transit(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = TrainWorker.bucket

    def altered(worker: TrainWorker) -> Bucket:
        found = honest(worker)
        if found.data is not None:
            flip(found.data[: found.pieces[0].size])
        return found

    monkeypatch.setattr(TrainWorker, "bucket", altered)


def in_a_fused_buffer(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it arrived: the decoder's buffer is no longer the module's memory."""
    engine: Any = apart.rollout._engine
    first, *others = engine._weights.layers
    qkv = replace(first.qkv, weight=first.qkv.weight.clone())
    engine._weights = replace(engine._weights, layers=(replace(first, qkv=qkv), *others))
    honest = RolloutWorker.attest

    def attest(worker: RolloutWorker) -> Any:
        qkv.weight.copy_(first.qkv.weight)
        flip(qkv.weight)
        return honest(worker)

    monkeypatch.setattr(RolloutWorker, "attest", attest)


def in_a_tied_head(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head that the decoder multiplies by is a copy of the embedding, in which one bit is another."""
    engine: Any = apart.rollout._engine
    honest = RolloutWorker.attest

    def attest(worker: RolloutWorker) -> Any:
        head = engine._weights.embedding.clone()
        flip(head)
        engine._weights = replace(engine._weights, head=replace(engine._weights.head, weight=head))
        return honest(worker)

    monkeypatch.setattr(RolloutWorker, "attest", attest)


def in_a_stale_head(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed copy of the head that was made when the engine was opened, and that nobody brings up to date."""
    engine: Any = apart.rollout._engine
    stale = replace(engine._weights.head, weight=engine._weights.embedding.clone())
    engine._weights = replace(engine._weights, head=stale)


def of_which_one_bucket_is_lost(apart: Apart, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BUCKET_BYTES", 4000)
    apart.policy._source._limit = 4000
    honest, taken = RolloutWorker.take, list[int]()

    def take(worker: RolloutWorker, arriving: Sequence[Any]) -> None:
        taken.append(1)
        if len(taken) != 2:
            honest(worker, arriving)

    monkeypatch.setattr(RolloutWorker, "take", take)


WRONGS = {
    "altered": [in_transit, in_a_fused_buffer, in_a_tied_head, in_a_stale_head, of_which_one_bucket_is_lost],
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("wrong", WRONGS["altered"], ids=lambda wrong: wrong.__name__)
def test_weights_that_differ_are_refused(
    wrong: Callable[[Apart, pytest.MonkeyPatch], None], dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = Apart(tmp_path, "qwen3", dtype)
    apart.publish()
    wrong(apart, monkeypatch)
    apart.learn()
    with pytest.raises(IntegrityError) as caught:
        apart.publish()
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith("rollout rank 0 must decode with policy version 0.2 (")
    assert f", {len(apart.trained())} tensors), got" in said
    assert said.endswith("the weights were altered on the way; resume from the last checkpoint")
    assert apart.rollout._version == PolicyVersion(0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_skipped_update_is_an_alarm(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's weights changed, and the engine's did not."""
    apart = Apart(tmp_path, "qwen3", dtype)
    apart.publish()
    monkeypatch.setattr(RolloutWorker, "take", lambda worker, arriving: None)
    apart.publish()  # nothing was trained, so nothing is missing
    apart.learn()
    with pytest.raises(IntegrityError, match=r"the weights have not changed since version 0\.2: an update was skipped"):
        apart.publish()


def test_another_model_is_refused_before_anything_moves(tmp_path: Path) -> None:
    apart = Apart(tmp_path / "one", "qwen3", "float32")
    families.build("llama").save_pretrained(tmp_path / "other")
    pool = ResourcePool(InlineBackend(pool="rollout"))
    other = pool.start("rollout", RolloutWorker, ModelSource(tmp_path / "other", "float32"))
    before = {name: view.clone() for name, view in other.one(lambda worker: worker)._engine.attest(()).views or ()}
    with pytest.raises(
        IntegrityError,
        match=r"published weights must match the reader's model: .* (has shape .*, expected .*|is not in that model); "
        "give both roles the same model",
    ):
        replace(apart.roles, rollout=other).publish(PolicyVersion(0, 1))
    assert same(before, dict(other.one(lambda worker: worker)._engine.attest(()).views or ()))


def test_the_readers_type_is_the_declared_one(tmp_path: Path) -> None:
    """A float32 policy and a bfloat16 rollout: rounded once, by the sender, and attested after that."""
    families.build("qwen3").save_pretrained(tmp_path)
    start = lambda pool, *words, **more: ResourcePool(InlineBackend(pool=pool)).start(pool, *words, **more)  # noqa: E731
    policy = start("policy", TrainWorker, ModelSource(tmp_path, "float32"), FAST, RuntimeConfig(), steps=9, seed=0)
    rollout = start("rollout", RolloutWorker, ModelSource(tmp_path, "bfloat16"))
    policy.one(TrainWorker.update, BATCH, SupervisedObjective(Totals.of(BATCH)), step=0)
    Roles({"policy": policy}, rollout=rollout).publish(PolicyVersion(0, 1))
    held = dict(policy.one(lambda worker: worker).engine.model.module.named_parameters())
    for name, view in rollout.one(lambda worker: worker)._engine.attest(()).views:
        assert torch.equal(view, held[name].bfloat16())


class TestAdapters:
    def frozen(self, folder: Path) -> Apart:
        """A policy of which only the norms learn, as an adapter would; the rollout has the base from the folder."""
        apart = Apart(folder, "qwen3", "float32")
        model = apart.policy.engine.model
        for name, parameter in model.module.named_parameters():
            parameter.requires_grad_("norm" in name)
        pool = ResourcePool(InlineBackend(pool="policy"))
        policy = pool.start("policy", TrainWorker, model, FAST, RuntimeConfig(), steps=9, seed=0)
        apart.roles = replace(apart.roles, learners={"policy": policy})
        apart.policy = policy.one(lambda worker: worker)
        return apart

    def test_only_what_learns_travels_and_all_is_attested(self, tmp_path: Path) -> None:
        apart = self.frozen(tmp_path)
        carried_names = set()
        expected, count = apart.policy.attest(layout_of(apart.policy.engine.model.module))
        for _ in range(count):
            carried_names |= {piece.name for piece in apart.policy.bucket().pieces}
        assert carried_names == {name for name in apart.trained() if "norm" in name}
        assert expected.parts.keys() == apart.trained().keys()
        apart.learn()
        apart.publish()
        assert same(apart.decoded(), apart.trained())

    def test_another_base_at_the_reader_is_refused(self, tmp_path: Path) -> None:
        apart = self.frozen(tmp_path)
        flip(dict(apart.rollout._engine.attest(()).views or ())["model.layers.1.mlp.down_proj.weight"])
        with pytest.raises(IntegrityError, match=r"1 tensors differ, first model\.layers\.1\.mlp\.down_proj"):
            apart.publish()

    @pytest.mark.parametrize(("trained", "frozen"), [(12, 0), (0, 12)])
    def test_none_is_there(self, trained: int, frozen: int) -> None:
        with pytest.raises(InputError, match=f"got {trained} trained and {frozen} frozen tensors; publish every"):
            AdapterOnly(trained, frozen)

    def test_every_tensor_travels_where_every_one_learns(self) -> None:
        assert carried(families.build("qwen3")) is None


def test_the_planner_counts_on_buckets_of_that_size() -> None:
    assert residency.BUCKET_BYTES == stream.BUCKET_BYTES


def test_no_more_than_a_bucket_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process sender and reader hold the same one."""
    limit = 1 << 12
    monkeypatch.setattr(stream, "BUCKET_BYTES", limit)
    apart = Apart(tmp_path, "qwen3", "float32")
    size = sum(p.numel() * p.element_size() for p in apart.trained().values())
    assert size > 16 * limit
    layout = apart.rollout.layout()
    _, count = apart.policy.attest(layout)
    assert count >= size // limit
    with HeldBytes() as held:
        for _ in range(count):
            apart.roles.sampler.each(RolloutWorker.take, apart.roles.made.each_stored(TrainWorker.bucket))
    assert 0 < held.peak <= limit
    assert held.now == 0


@pytest.mark.slow
def test_from_rank_to_rank_beside_the_shards(tmp_path: Path) -> None:
    """Two processes, each with a shard of the policy and a rollout with a copy; see `published_ranks`."""
    command = [sys.executable, published_ranks.__file__]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=500) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(err for _, err in said)
    for out, _ in said:
        assert out.splitlines()[-1] == "held"


class Says:
    """An engine that says other things of the tensors that it decodes with."""

    def __init__(self, engine: Any, views: Callable[[Any], Any]) -> None:
        self._engine, self._views = engine, views

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def attest(self, challenge: Any) -> Proof:
        return Proof(self._views(self._engine.attest(challenge).views))


def test_an_engine_beside_its_policy_that_reads_elsewhere_is_refused(tmp_path: Path) -> None:
    """An alias carries nothing; before it says that a version samples it looks at what it decodes with."""
    families.build("qwen3").save_pretrained(tmp_path)
    pool = ResourcePool(InlineBackend())
    source = ModelSource(tmp_path, "float32")
    policy = pool.start("policy", TrainWorker, source, FAST, RuntimeConfig(), steps=9, seed=0)
    rollout = pool.start("rollout", RolloutWorker, source)
    way = transport(policy, rollout)
    assert isinstance(way, Alias)
    way.publish(PolicyVersion(0, 1))
    worker: Any = rollout.one(lambda worker: worker)
    (name, first), *rest = worker._engine.attest(()).views
    stale = first.detach().clone()
    worker._engine = Says(worker._engine, lambda views: [(name, stale), *rest])
    way.publish(PolicyVersion(0, 2))
    flip(stale)
    with pytest.raises(
        IntegrityError,
        match=rf"rollout rank 0 must decode with the policy's weights, got 1 tensors that are not version "
        rf"0\.3's: {name}; reopen the rollout engine",
    ):
        way.publish(PolicyVersion(0, 3))
    assert worker._version == PolicyVersion(0, 2)


class Proves:
    """An engine that exposes no tensors, and answers a challenge with the scores of a model."""

    def __init__(self, engine: Any, model: LanguageModel | None) -> None:
        self._engine, self._model = engine, model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def attest(self, challenge: Any) -> Proof:
        if self._model is None:
            raise InputError("it has no weights")
        return Proof(logprobs=[one.logprobs for one in prompt_logprobs(self._model, challenge, 0)])


TEXTS = ((5, 9, 3, 7, 8, 2, 5), (4, 6, 6, 4), (11, 3, 12, 6, 9, 11))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stale", [False, True])
def test_an_engine_that_exposes_no_tensors_is_probed(dtype: str, stale: bool, tmp_path: Path) -> None:
    apart = Apart(tmp_path, "qwen3", dtype)
    apart.roles.prober.texts = TEXTS
    worker: Any = apart.rollout
    own = adopt_module(deepcopy(worker._module) if stale else worker._module)
    worker._engine = Proves(worker._engine, own)
    apart.step += 1
    assert apart.roles.publish(PolicyVersion(0, 1)) == "undecided", "there is no version before"
    assert apart.roles.publish(PolicyVersion(0, 2)) == "undecided", "nothing was learned"
    apart.learn()
    if not stale:
        assert apart.roles.publish(PolicyVersion(0, 3)) == "probe"
        return
    with pytest.raises(IntegrityError) as caught:
        apart.roles.publish(PolicyVersion(0, 3))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(
        "rollout rank 0 must decode with policy version 0.3, got log-probabilities nearer version 0.2: "
    )


def test_weights_that_differ_on_the_way_to_a_probed_engine_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the digest of the tensors from which it takes its weights: the versions are equal, so no probe helps."""
    apart = Apart(tmp_path, "qwen3", "float32")
    apart.roles.prober.texts = TEXTS
    worker: Any = apart.rollout
    worker._engine = Proves(worker._engine, adopt_module(worker._module))
    apart.publish()
    in_transit(apart, monkeypatch)
    with pytest.raises(IntegrityError, match="the weights were altered on the way; resume from the last checkpoint"):
        apart.publish()


def test_an_engine_of_its_own_pool_that_can_prove_nothing_is_refused(tmp_path: Path) -> None:
    apart = Apart(tmp_path, "qwen3", "float32")
    worker: Any = apart.rollout
    native = worker._engine
    worker._engine = Proves(native, None)
    with pytest.raises(
        InputError,
        match=r"it has no weights",
    ):
        apart.publish()
    worker._engine = Proves(native, adopt_module(worker._module))
    with pytest.raises(InputError, match=r"batch"):
        apart.publish()


@pytest.mark.parametrize("values", [[[0.0, float("nan"), -1.0]], [[0.0, -1.0]], [[0.0, -1.0, -1.0], [0.0]], []])
def test_an_answer_to_a_challenge_that_is_none_is_one_line(values: list[list[float]], tmp_path: Path) -> None:
    worker: Any = Apart(tmp_path, "qwen3", "float32").rollout
    worker._engine = Proves(worker._engine, None)
    worker._engine.attest = lambda challenge: Proof(logprobs=[np.array(one) for one in values])
    odd = sum(bool(np.isnan(one).any()) for one in values)
    got = f"{sum(map(len, values))} numbers in {len(values)} texts, {odd} of them not finite"
    line = rf"rank 0 must attest with one finite .* for each of 3 tokens in 1 texts, got {got}; fix it$"
    with pytest.raises(EngineError, match=line):
        worker.probe(((5, 9, 3),))
