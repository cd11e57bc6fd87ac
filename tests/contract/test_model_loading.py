"""Models and tokenizers on disk: what is written is reproducible, what is read is safe."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import families
import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer, models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.models.files import load_model, load_tokenizer, save_model
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.models.logprobs import token_logprobs
from posttrain.engine.rollout.port import SamplingParams
from posttrain.engine.rollout.worker import generate, open_rollout

BATCH = TokenBatch.pack([Document((5, 6, 7), (8, 9)), Document((4,), (11, 12, 2))])


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<s>", "</s>", "a", "b"])}
    inner = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def digests(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_model_comes_back_as_it_was(family: str, tmp_path: Path) -> None:
    model = adopt_module(families.build(family))
    save_model(model, make_tokenizer(), tmp_path)
    loaded = load_model(tmp_path)
    assert type(loaded.module) is type(model.module)
    assert not loaded.module.training
    assert torch.equal(token_logprobs(loaded, BATCH), token_logprobs(model, BATCH))
    assert load_tokenizer(tmp_path).eos_token == "</s>"
    assert "posttrain" not in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_the_same_weights_give_the_same_bytes(family: str, tmp_path: Path) -> None:
    first, second = (adopt_module(families.build(family)) for _ in range(2))
    engine = open_rollout(second)  # lays the weights into shared buffers
    generate(engine, [[3, 4]], samples=1, sampling=SamplingParams(max_new_tokens=2))
    for name, model in (("a", first), ("b", second)):
        save_model(model, make_tokenizer(), tmp_path / name)
    save_model(load_model(tmp_path / "a"), load_tokenizer(tmp_path / "a"), tmp_path / "c")
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert digests(tmp_path / "a") == digests(tmp_path / "c")
    tied = families.build(family).config.tie_word_embeddings
    with safe_open(tmp_path / "b" / "model.safetensors", "pt") as written:
        assert ("lm_head.weight" in written.keys()) == (not tied)  # noqa: SIM118 - it is no mapping


def test_a_decoder_reads_weights_that_are_loaded_in_place() -> None:
    model, other = adopt_module(families.build("qwen3")), adopt_module(families.build("qwen3", seed=1))
    engine = open_rollout(other)
    other.module.load_state_dict(model.module.state_dict())
    assert torch.equal(token_logprobs(other, BATCH), token_logprobs(model, BATCH))
    greedy = SamplingParams(max_new_tokens=8, greedy=True)
    sampled = [generate(e, [[3, 4]], samples=1, sampling=greedy)[0] for e in (engine, open_rollout(model))]
    assert sampled[0].response.tolist() == sampled[1].response.tolist()
    assert sampled[0].logprobs.tolist() == sampled[1].logprobs.tolist()


def test_bfloat16_is_loaded_as_such(tmp_path: Path) -> None:
    save_model(adopt_module(families.build("qwen3")), None, tmp_path)
    model = load_model(tmp_path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert token_logprobs(model, BATCH).dtype == torch.float32
    out = generate(open_rollout(model), [[3, 4, 5]], samples=2, sampling=SamplingParams(max_new_tokens=6))
    assert len(out) == 2


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"is not a model folder: it has no config\.json"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(NotFoundError, match=r"tokenizer folder .* does not exist"):
        load_tokenizer(tmp_path / "nowhere")
    save_model(adopt_module(families.build("llama")), None, tmp_path)
    with pytest.raises(InputError, match=r"dtype must be one of .* got 'int3'"):
        load_model(tmp_path, dtype="int3")
    with pytest.raises(InputError, match=r"tokenizer in .* cannot be loaded"):
        load_tokenizer(tmp_path)
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="no CUDA device"):
            load_model(tmp_path, device="cuda")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    model = families.build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"must be \*\.safetensors, got pytorch_model\.bin"):
        load_model(tmp_path)


def test_code_in_the_folder_is_not_run(tmp_path: Path) -> None:
    save_model(adopt_module(families.build("llama")), None, tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(tmp_path)
    assert not marker.exists()


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    save_model(adopt_module(families.build("llama")), None, tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="cannot be loaded"):
        load_model(tmp_path)
