"""Value and reward models of every family: packed they give what transformers gives for one padded document."""

from __future__ import annotations

import copy
import json
from functools import cache
from pathlib import Path

import families
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertLMHeadModel,
    LlamaForSequenceClassification,
    LlamaModel,
)

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models.files import load_model, load_scalar_model, save_model
from posttrain.engine.models.language_model import (
    ScalarModel,
    adopt_classifier,
    put_scalar_head,
    sequence_scores,
    token_values,
)
from posttrain.pacing.balance import micro_batches

SHAPES = [(5, 9), (3, 2), (11, 9), (1, 1), (4, 20), (2, 12), (7, 7), (3, 0)]  # prompt and response tokens


def make_documents(seed: int = 0) -> list[Document]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda count: torch.randint(3, families.VOCABULARY, (count,), generator=generator).tolist()  # noqa: E731
    return [Document(draw(prompt), draw(response)) for prompt, response in SHAPES]


DOCUMENTS = make_documents()


def with_head(module: ScalarModel, seed: int = 0) -> ScalarModel:
    """A head that says something: the one made here is all zeros."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        module.head.weight.copy_(torch.randn(module.head.weight.shape, generator=generator))
    return module


@cache
def scalar(family: str) -> ScalarModel:
    return with_head(adopt_classifier(put_scalar_head(families.build(family))))


@cache
def reference(family: str, tmp: str) -> torch.nn.Module:
    """The same model as transformers loads it from disk, with its own eager attention."""
    save_model(scalar(family), None, Path(tmp) / family)
    return AutoModelForSequenceClassification.from_pretrained(Path(tmp) / family, attn_implementation="eager")


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("scalar"))


def hidden_scalars(module: torch.nn.Module, document: Document) -> Tensor:
    """The head on every token of one document, by plain autograd."""
    ids = torch.tensor([*document.prompt, *document.response])[None]
    hidden = module.base_model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return module.score(hidden)[0, :, 0]


@pytest.mark.parametrize("family", families.FAMILIES)
class TestEveryFamily:
    def test_scores_are_those_of_transformers(self, family: str, disk: str) -> None:
        """Single inputs, padded on the right with the padding token that transformers then looks past."""
        found = sequence_scores(scalar(family), TokenBatch.pack(DOCUMENTS))
        module = reference(family, disk)
        assert module.config.num_labels == 1
        for document, score in zip(DOCUMENTS, found, strict=True):
            ids = [*document.prompt, *document.response]
            padded = torch.tensor([ids + [0] * 5])
            mask = torch.tensor([[1] * len(ids) + [0] * 5])
            expected = module(input_ids=padded, attention_mask=mask).logits[0, 0]
            torch.testing.assert_close(score, expected, atol=1e-5, rtol=1e-5)
        assert scalar(family).packing == "packed"

    def test_values_and_gradients_are_those_of_the_documents_one_by_one(self, family: str, disk: str) -> None:
        model, module = scalar(family), reference(family, disk)
        batch = TokenBatch.pack(DOCUMENTS)
        values = token_values(model, batch)
        parts = []
        for document in DOCUMENTS:
            prompt, response = len(document.prompt), len(document.response)
            each = hidden_scalars(module, document)
            parts += [torch.zeros(prompt), each[prompt - 1 : prompt - 1 + response]]
        expected = torch.cat(parts)
        assert values.dtype == torch.float32
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)
        assert values[~batch.response_mask].abs().max() == 0
        # the head's and the embedding's gradients: what the loss touches first, and last
        names = ["score.weight", next(n for n, p in module.named_parameters() if p.ndim == 2)]
        for name in names:
            found = torch.autograd.grad(values.square().sum(), model.module.get_parameter(name), retain_graph=True)[0]
            wanted = torch.autograd.grad(expected.square().sum(), module.get_parameter(name), retain_graph=True)[0]
            scale = float(wanted.abs().max())
            torch.testing.assert_close(found / scale, wanted / scale, atol=1e-5, rtol=0)

    def test_a_language_model_gets_a_head_of_zeros(self, family: str, tmp_path: Path) -> None:
        families.build(family).save_pretrained(tmp_path / "lm")
        before = torch.get_rng_state()
        model = load_scalar_model(tmp_path / "lm")
        assert torch.equal(before, torch.get_rng_state())
        assert torch.equal(model.head.weight, torch.zeros_like(model.head.weight))
        assert sequence_scores(model, TokenBatch.pack(DOCUMENTS)).abs().max() == 0
        language = dict(families.build(family).base_model.named_parameters())
        for name, weight in model.module.base_model.named_parameters():
            assert torch.equal(weight, language[name])

    def test_what_is_saved_comes_back(self, family: str, tmp_path: Path) -> None:
        batch = TokenBatch.pack(DOCUMENTS)
        save_model(scalar(family), None, tmp_path / "first")
        loaded = load_scalar_model(tmp_path / "first")
        save_model(loaded, None, tmp_path / "second")
        assert torch.equal(sequence_scores(loaded, batch), sequence_scores(scalar(family), batch))
        for file in (tmp_path / "first").iterdir():
            assert file.read_bytes() == (tmp_path / "second" / file.name).read_bytes()
        assert "posttrain" not in (tmp_path / "first" / "config.json").read_text()

    def test_a_document_does_not_see_the_others(self, family: str) -> None:
        others = make_documents(seed=1)
        mixed = [*others[:4], DOCUMENTS[4], *others[5:]]
        with torch.no_grad():
            kept, changed = (sequence_scores(scalar(family), TokenBatch.pack(d)) for d in (DOCUMENTS, mixed))
        assert torch.equal(kept[4], changed[4])
        assert not torch.allclose(kept[:4], changed[:4], atol=1e-3)


def test_micro_batches_change_nothing() -> None:
    batch = TokenBatch.pack(DOCUMENTS)
    batch = batch.with_columns(whole=token_values(scalar("qwen3"), batch))
    for budget in (1, 25):
        for shard in micro_batches(batch.lengths, batch.lengths, budget):
            part = batch.select(shard)
            found = token_values(scalar("qwen3"), part)
            torch.testing.assert_close(found, part.column("whole"), atol=1e-5, rtol=1e-5)


def test_a_hole_has_no_value_and_the_token_after_it_does() -> None:
    """Observation tokens are nobody's decision; what was decided after them saw them."""
    whole = TokenBatch.pack([DOCUMENTS[0]])
    mask = whole.response_mask.clone()
    mask[7:9] = False
    holed = TokenBatch(whole.tokens, whole.positions, whole.lengths, mask)
    values = token_values(scalar("qwen3"), holed)
    torch.testing.assert_close(values, token_values(scalar("qwen3"), whole) * mask, atol=1e-6, rtol=0)
    assert values[9] != 0


def test_without_documents_or_responses_everybody_still_takes_part() -> None:
    """Trap 15: a dummy runs through the model and gives every parameter a gradient of zero; nothing runs nowhere."""
    model = scalar("qwen3")
    values = token_values(model, TokenBatch.pack(DOCUMENTS).dummy())
    model.module.zero_grad()
    values.sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.module.parameters()]
    model.module.zero_grad()
    assert values.tolist() == [0] * 4
    assert all(g is not None and g.abs().max() == 0 for g in gradients)
    empty = TokenBatch.pack(DOCUMENTS).select([])
    assert token_values(model, empty).shape == sequence_scores(model, empty).shape == (0,)


def test_the_head_computes_in_float32(tmp_path: Path) -> None:
    save_model(scalar("qwen3"), None, tmp_path)
    model = load_scalar_model(tmp_path, dtype="bfloat16")
    batch = TokenBatch.pack(DOCUMENTS)
    scores = sequence_scores(model, batch)
    assert (model.head.weight.dtype, scores.dtype) == (torch.bfloat16, torch.float32)
    assert not torch.equal(scores, scores.bfloat16().float())
    torch.testing.assert_close(scores, sequence_scores(scalar("qwen3"), batch), atol=0.5, rtol=0.1)


def test_padding_that_ends_sequences_is_not_padding(tmp_path: Path) -> None:
    """transformers would look past the end of sequence and score the token before it."""
    module = families.build("qwen3")
    module.config.pad_token_id = module.config.eos_token_id = families.EOS
    model = with_head(adopt_classifier(put_scalar_head(module)))
    save_model(model, None, tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ended = Document((5, 6), (7, families.EOS))
    ids = torch.tensor([[5, 6, 7, families.EOS]])
    torch.testing.assert_close(
        loaded(ids).logits[0], sequence_scores(model, TokenBatch.pack([ended])), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="no padding token"):
        loaded(ids.repeat(2, 1))


class ForgetsThePlan(LlamaModel):
    """A backbone that does not hand unknown arguments to its attention."""

    def forward(self, *args: object, packing_plan: object = None, **kwargs: object) -> object:
        return super().forward(*args, **kwargs)


def test_a_model_that_cannot_pack_is_padded_and_right() -> None:
    source = scalar("llama").module
    module = LlamaForSequenceClassification(copy.deepcopy(source.config))
    module.model = ForgetsThePlan(module.config)
    module.load_state_dict(source.state_dict())
    model = adopt_classifier(module)
    assert model.packing == "padded"
    batch = TokenBatch.pack(DOCUMENTS)
    for read in (token_values, sequence_scores):
        torch.testing.assert_close(read(model, batch), read(scalar("llama"), batch), atol=1e-5, rtol=1e-5)


def test_what_cannot_score_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"is not a model folder: it has no config\.json"):
        load_scalar_model(tmp_path / "nowhere")
    config = BertConfig(
        vocab_size=61, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, is_decoder=True
    )
    with pytest.raises(InputError, match=r"BertLMHeadModel cannot score: the form of its .* Bert.* is not supported"):
        put_scalar_head(BertLMHeadModel(config))
    module = copy.deepcopy(scalar("llama").module)
    module.score = torch.nn.Linear(32, 2, bias=False)
    module.config.num_labels = 2
    module.save_pretrained(tmp_path / "two")
    with pytest.raises(
        InputError, match=r"LlamaForSequenceClassification must score by one linear layer .*\(num_labels 1\)"
    ):
        load_scalar_model(tmp_path / "two")
    with pytest.raises(InputError, match="context of 96 tokens, got 100"):
        sequence_scores(scalar("qwen3"), TokenBatch.pack([Document([1] * 90, [2] * 10)]))


def test_a_classifier_is_no_language_model_and_missing_weights_are_not_invented(tmp_path: Path) -> None:
    save_model(scalar("qwen3"), None, tmp_path / "reward")
    with pytest.raises(InputError, match="must be a causal language model, got a sequence classifier; name another"):
        load_model(tmp_path / "reward")
    families.build("llama").save_pretrained(tmp_path / "lm")  # its backbone under a classifier's name: no head there
    config = json.loads((tmp_path / "lm" / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
    (tmp_path / "lm" / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"must be complete, but score\.weight is missing"):
        load_scalar_model(tmp_path / "lm")
    (tmp_path / "lm" / "config.json").write_text("{oops")
    with pytest.raises(InputError, match=r"must have a readable config\.json"):
        load_scalar_model(tmp_path / "lm")
