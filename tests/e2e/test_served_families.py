"""Natively decoded families, one that is not, and adapters by name: tokens, texts and log-probabilities."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from served_model import ServedModel, serving
from test_adapted_runs import adapted
from transformers import AutoModelForCausalLM
from workbench import Workbench

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "contract"))  # the tiny models of the families
import families

pytestmark = pytest.mark.slow
PROMPTS = [[5, 9, 30, 31], [1, 7], [20, 21, 22, 23, 24, 25, 26, 27], [40]]


@pytest.mark.parametrize("family", [*families.NATIVE, "gpt2"])
def test_a_served_family_is_the_one_of_transformers(family: str, tmp_path: Path) -> None:
    bench, tokenizer = Workbench(tmp_path / "bench"), families.tokenizer()
    bench.folder.mkdir()
    module = families.build(family)
    module.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    bench.run("init")
    bench.run("asset", "add", "model:family", str(tmp_path / "model"))
    exact = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float64)
    with serving(bench, "model:family") as served:
        _compare_with_sample(bench, served)
        _compare_echo(served, exact)
        asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "return_token_ids": True}
        found = served.complete(PROMPTS, logprobs=2, **asked)
        for prompt, choice in zip(PROMPTS, found["choices"], strict=True):
            ids = torch.tensor([prompt])
            drawn = exact.generate(ids, max_new_tokens=40, do_sample=False)[0, len(prompt) :].tolist()
            assert choice["token_ids"] == drawn
            ended = drawn[-1] == families.EOS
            assert choice["finish_reason"] == ("stop" if ended else "length")
            assert choice["text"] == tokenizer.decode(drawn, skip_special_tokens=True)
            scores = exact(torch.tensor([prompt + drawn])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            wanted = scores.gather(1, torch.tensor(drawn)[:, None])[:, 0].tolist()
            said = choice["logprobs"]
            assert np.abs(np.array(said["token_logprobs"]) - wanted).max() < 1e-5
            assert len({*said["tokens"]}) == len({*drawn}), "different tokens have different names"
            for top, values in zip(said["top_logprobs"], scores.topk(2).values.tolist(), strict=True):
                assert np.abs(np.array(sorted(top.values(), reverse=True)[:2]) - values).max() < 1e-5
        for skip in (True, False):  # characters of several tokens, and special tokens
            body = {"prompt": PROMPTS, "temperature": 1.5, "seed": 3, "n": 3, "max_tokens": 60, "ignore_eos": True}
            whole = [one["text"] for one in served.complete(**body, skip_special_tokens=skip)["choices"]]
            pieces = served.stream("/v1/completions", {**body, "skip_special_tokens": skip})
            joined = [""] * len(whole)
            for piece in pieces:
                joined[piece["choices"][0]["index"]] += piece["choices"][0]["text"]
            assert joined == whole
            assert any("�" in text or "é" in text for text in whole), "some characters are of several tokens"
        assert served.ask("/health")[2]["compared"] is None, "no evaluation recorded anything"
        assert served.end() == 0


TEXTS = ["the answer", "abcabc", "é 7> the"]


def _compare_with_sample(bench: Workbench, served: ServedModel) -> None:
    """Greedy responses are those of `posttrain sample`."""
    words = ("--text", "--temperature", "0", "--max-new-tokens", "40", "-o", "json")
    found = bench.run("sample", "model:family", *TEXTS, *words).json["answers"]
    assert served.texts(TEXTS, max_tokens=40, skip_special_tokens=False) == [one["text"] for one in found]
    assert any(len(one["text"]) > 20 for one in found)


def _compare_echo(served: ServedModel, exact: Any) -> None:
    """The log-probabilities of prompts and responses are those of the model in float64."""
    for prompt, choice in zip(PROMPTS, served.complete(
        PROMPTS, max_tokens=20, echo=True, logprobs=1, return_token_ids=True
    )["choices"], strict=True):  # fmt: skip
        assert choice["prompt_token_ids"] == prompt
        whole = torch.tensor([prompt + choice["token_ids"]])
        scores = exact(whole).logits[0, :-1].log_softmax(-1)
        wanted = scores.gather(1, whole[0, 1:, None])[:, 0].tolist()
        first, *said = choice["logprobs"]["token_logprobs"]
        assert (first, len(said)) == (None, len(prompt) + 19)
        assert np.abs(np.array(said) - wanted).max() < 1e-5


def test_adapters_of_one_base_are_served_by_name(template: Workbench, tmp_path: Path) -> None:
    """Each answers as it does alone, also beside the others, with its own digest and log-probabilities."""
    bench = template.copy(tmp_path / "named")
    adapted(bench)
    bench.run("run", "run.yaml")
    whole = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 1, "echo": True}
    alone: dict[str, Any] = {}
    for name, model in (("sft", "tiny/sft"), ("grpo", "tiny/grpo"), ("base", "model:tiny")):
        with serving(bench, model) as served:
            alone[name] = served.complete("Q: 31\nA:", **whole)
    words = ("--adapter", "sft=tiny/sft", "--adapter", "grpo=tiny/grpo")
    with serving(bench, "model:tiny", *words) as served:
        known = {one["id"]: one["digest"] for one in served.ask("/v1/models")[2]["data"]}
        assert known == {"model:tiny": alone["base"]["system_fingerprint"],
                         **{name: alone[name]["system_fingerprint"] for name in ("sft", "grpo")}}  # fmt: skip
        with ThreadPoolExecutor(6) as clients:
            names = ["sft", "grpo", "model:tiny"] * 8
            answers = list(clients.map(lambda name: served.complete("Q: 31\nA:", model=name, **whole), names))
    for name, answer in zip(names, answers, strict=True):
        wanted = alone[name if name in alone else "base"]
        assert answer["model"] == name
        assert answer["system_fingerprint"] == wanted["system_fingerprint"]
        assert answer["choices"] == wanted["choices"]
    assert len({str(one["choices"]) for one in alone.values()}) == 3
    refused = bench.run("serve-model", "tiny/grpo", "--adapter", "base=model:tiny", code=None)
    assert (refused.code, "no adapter" in refused.err) == (2, True)
