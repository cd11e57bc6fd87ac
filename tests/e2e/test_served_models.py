"""A released model that answers: equal to `sample` and to transformers, followed through releases, killed, refused."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from served_model import ServedModel, children, serving
from transformers import AutoModelForCausalLM, AutoTokenizer
from workbench import Reference, Workbench

pytestmark = pytest.mark.slow
MODEL = "tiny/sft"
PLAIN: dict[str, Any] = {"skip_special_tokens": False}  # as `sample` prints responses
WHOLE = {**PLAIN, "max_tokens": 20, "ignore_eos": True}
PROMPTS = ["Q: 31\nA:", "Q: 402\nA:", "Q: 7\nA:"]


@pytest.fixture(scope="module")
def folder(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    """A copy of the released run for the tests of this file that change nothing."""
    bench = reference.bench.copy(tmp_path_factory.mktemp("served") / "bench")
    yield bench
    bench.clean()


@pytest.fixture(scope="module")
def served(folder: Workbench) -> Iterator[ServedModel]:
    """A model of the run, whose responses differ."""
    with serving(folder, MODEL) as made:
        yield made


@pytest.fixture(scope="module")
def exported(folder: Workbench) -> Path:
    """Its files."""
    folder.run("export", MODEL, "exported")
    return folder.folder / "exported"


def sampled(folder: Workbench, *words: str) -> list[str]:
    """The texts of `posttrain sample`."""
    found = folder.run("sample", MODEL, *PROMPTS, "--text", "--max-new-tokens", "20", "-o", "json", *words).json
    return [answer["text"] for answer in found["answers"]]


@pytest.mark.journey
def test_it_answers_as_sample_does(served: ServedModel, folder: Workbench) -> None:
    assert served.texts(PROMPTS, max_tokens=20, **PLAIN) == sampled(folder, "--temperature", "0")
    drawn = sampled(folder, "--temperature", "0.8", "-n", "2", "--seed", "7")
    assert served.texts(PROMPTS, max_tokens=20, temperature=0.8, n=2, seed=7, **PLAIN) == drawn
    assert len(set(drawn)) > 3
    one = served.complete(
        PROMPTS[0], max_tokens=20, temperature=0.8, logprobs=2, return_token_ids=True, seed=7, **PLAIN
    )
    [choice] = one["choices"]
    again = served.complete(choice["prompt_token_ids"], max_tokens=20, temperature=0.8, seed=7, **PLAIN)
    assert again["choices"][0]["text"] == choice["text"] == drawn[0]
    pieces = served.stream(
        "/v1/completions", {"prompt": PROMPTS, "max_tokens": 20, "temperature": 0.8, "seed": 7, "n": 2, **PLAIN}
    )
    joined = ["".join(p["choices"][0]["text"] for p in pieces if p["choices"][0]["index"] == at) for at in range(6)]
    assert joined == drawn
    assert len(pieces) > 12, "tokens come one by one"


def test_a_chat_is_rendered_by_the_models_template(served: ServedModel, folder: Workbench, exported: Path) -> None:
    asked = {"messages": [{"role": "user", "content": [{"type": "text", "text": "31"}]}], "temperature": 0}
    status, _, found = served.ask(
        "/v1/chat/completions", {**asked, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    )
    assert status == 200, found
    [choice] = found["choices"]
    said = folder.run("sample", MODEL, "31", "--chat", "--max-new-tokens", "12", "-o", "json").json["answers"][0]
    assert choice["message"] == {"role": "assistant", "content": said["text"], "refusal": None}
    assert choice["finish_reason"] == ("length" if said["truncated"] else "stop")
    tokenizer = AutoTokenizer.from_pretrained(exported)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "31"}], add_generation_prompt=True)
    assert found["usage"]["prompt_tokens"] == len(prompt["input_ids"] if not isinstance(prompt, list) else prompt)
    for entry in choice["logprobs"]["content"]:
        assert entry["top_logprobs"][0] == {name: entry[name] for name in ("token", "logprob", "bytes")}
    pieces = served.stream(
        "/v1/chat/completions", {**asked, "max_tokens": 12, "stream_options": {"include_usage": True}}
    )
    assert pieces[-1]["usage"] == found["usage"]
    assert pieces[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(piece["choices"][0]["delta"]["content"] for piece in pieces[:-1]) == said["text"]


def test_echo_has_every_token_of_the_prompt_and_exactly_those_asked_for(served: ServedModel, exported: Path) -> None:
    """The log-probabilities are those of a float64 model, and the tokens those of transformers."""
    tokenizer = AutoTokenizer.from_pretrained(exported)
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in (*PROMPTS, "A: 1\n" * 8)]
    asked = [ids[0].tolist() for ids in prompts]
    for most in (0, 1, 5):
        found = served.complete(asked, max_tokens=most, echo=True, logprobs=1)
        for ids, choice in zip(prompts, found["choices"], strict=True):
            said, drawn = choice["logprobs"], ids
            while drawn.shape[1] < ids.shape[1] + most:  # greedy, also after an end of sequence
                drawn = torch.cat([drawn, model(drawn).logits[:, -1].argmax(-1, keepdim=True)], 1)
            scores = model(drawn).logits.log_softmax(-1)[0, :-1]
            wanted = scores.gather(1, drawn[0, 1:, None])[:, 0].tolist()
            assert said["tokens"] == tokenizer.convert_ids_to_tokens(drawn[0].tolist())
            assert said["token_logprobs"][0] is None
            assert np.abs(np.array(said["token_logprobs"][1:]) - wanted).max() < 1e-5
            for token, value, top in zip(
                said["tokens"][1:], said["token_logprobs"][1:], said["top_logprobs"][1:], strict=True
            ):
                assert top[token] == value <= max(top.values())
            assert choice["text"].startswith(tokenizer.decode(ids[0]))
    assert found["usage"] == {"prompt_tokens": sum(map(len, asked)), "completion_tokens": 20,
                              "total_tokens": sum(map(len, asked)) + 20}  # fmt: skip


def test_a_stop_string_ends_a_response_and_is_cut_off(served: ServedModel) -> None:
    [whole] = served.texts(PROMPTS[0], **WHOLE)
    stop = whole[4:6]
    found = served.complete(PROMPTS[0], stop=[stop, "no such text"], **WHOLE)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (whole[: whole.index(stop)], "stop")
    pieces = served.stream("/v1/completions", {"prompt": PROMPTS[0], "temperature": 0, "stop": stop, **WHOLE})
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole[: whole.index(stop)]


def test_token_ids_in_and_out(served: ServedModel, exported: Path) -> None:
    ids = AutoTokenizer.from_pretrained(exported)(PROMPTS[0]).input_ids
    params = {"max_tokens": 9, "temperature": 0.7, "seed": 3, "logprobs": 0, "prompt_logprobs": 0}
    status, _, found = served.ask("/inference/v1/generate", {"token_ids": ids, "sampling_params": params})
    assert status == 200, found
    [choice] = found["choices"]
    drawn = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert len(choice["token_ids"]) == len(drawn) <= 9
    assert all(value <= 0 for value in drawn)
    assert [next(iter(one)) for one in choice["prompt_logprobs"][1:]] == list(map(str, ids[1:]))
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    scores = (model(torch.tensor([ids + choice["token_ids"]])).logits[0, len(ids) - 1 : -1] / 0.7).log_softmax(-1)
    wanted = scores.gather(1, torch.tensor(choice["token_ids"])[:, None])[:, 0].tolist()
    assert np.abs(np.array(drawn) - wanted).max() < 1e-5, "the log-probabilities of the sampling, at its temperature"


def test_the_likeliest_tokens_of_a_prompt(served: ServedModel, exported: Path) -> None:
    ids = AutoTokenizer.from_pretrained(exported)(PROMPTS[0]).input_ids
    [choice] = served.complete(ids, max_tokens=1, prompt_logprobs=7, logprobs=2)["choices"]
    first, *rows = choice["prompt_logprobs"]
    assert first is None
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    for row, wanted, own in zip(rows, scores, ids[1:], strict=False):
        found = {int(token): one["logprob"] for token, one in row.items()}
        assert found.keys() == {*wanted.topk(7).indices.tolist(), own}
        assert all(abs(value - float(wanted[token])) < 1e-5 for token, value in found.items())
    assert len(choice["logprobs"]["top_logprobs"][0]) == 2
    [other] = served.complete(ids, max_tokens=3, prompt_logprobs=7, logprobs=2)["choices"]
    assert [row.keys() for row in other["prompt_logprobs"][1:]] == [row.keys() for row in rows]
    assert all(len(row) in (2, 3) for row in other["logprobs"]["top_logprobs"])


BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 2, "echo": True}, 400, "prompt_logprobs: needs echo: false"),
    ("/v1/completions", {"prompt": "x", "prompt_logprobs": 129}, 400, "prompt_logprobs"),
    ("/v1/completions", {"promt": "x"}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "colour": 1}, 400, "colour"),
    ("/v1/completions", {"prompt": ""}, 400, "at least one token"),
    ("/v1/completions", {"prompt": []}, 400, "at least one token"),
    ("/v1/completions", {"prompt": [[]]}, 400, "at least one token"),
    ("/v1/completions", {"prompt": [10**6]}, 400, "tokens must be in"),
    ("/v1/completions", {"prompt": [-1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1.5]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 96}, 400, "the context has 96 tokens"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ("/v1/completions", {"prompt": "x", "n": 100_000}, 400, "n"),
    ("/v1/completions", {"prompt": ["x"] * 2000}, 400, "1024"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 17}, 400, "16 strings"),
    ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "name tiny/sft"),
    ("/v1/completions", {"prompt": "x", "logprobs": 50}, 400, "logprobs"),
    ("/v1/completions", b"{", 400, "JSON"),
    ("/v1/completions", b"[" * 100_000, 400, "JSON"),
    ("/v1/completions", b"\xff", 400, "JSON"),
    ("/v1/completions", [1], 400, "object"),
    ("/v1/completions", b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413, "bytes"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "JSON"),
    ("/v1/completions", b'{"prompt": "x", "stream_options": {"\\ud800": true}}', 400, "JSON"),
    ("/v1/completions", {"prompt": [1, True]}, 400, "whole numbers from 0, got True"),
    ("/v1/completions", {"prompt": [1.5] * 90}, 400, "whole numbers from 0, got 1.5"),
    ("/v1/completions", {"prompt": [5] * 10**6}, 400, "got 1000000 tokens"),
    ("/v1/completions", {"prompt": "x" * 10**6}, 400, "got 1000000 characters"),
    ("/v1/completions", {"prompt": [[]] * 10**6}, 400, "1024"),
    ("/v1/completions", {"prompt": [[5] * 80] * 1024, "echo": True, "logprobs": 20, "max_tokens": 1}, 400, "in all"),
    ("/v1/completions", {"prompt": ["x"] * 64, "n": 16, "logprobs": 20, "max_tokens": 90}, 400, "in all"),
    ("/v1/completions", {"prompt": "x", "temperature": 1e-40}, 400, "temperature: must be 0 or at least 1e-06"),
    ("/v1/completions", {"prompt": "x", "max_tokens": True}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, 400, "best_of: is not implemented, got '3'; leave it out"),
    ("/v1/completions/", {"prompt": "x"}, 404, "is not a route"),
    ("/v1/completions", None, 405, "another method"),
    ("/v1/models/other", None, 404, "GET /v1/models"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"content": "x"}]}, 400, "role"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "type text"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "must be text"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "must be text, got None"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "must be text"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2},
        400,
        "logprobs: true",
    ),
    ("/inference/v1/generate", {"token_ids": []}, 400, "token_ids"),
    ("/inference/v1/generate", {"token_ids": "abc"}, 400, "token_ids: must be token ids, got 'abc'"),
    ("/v1/embeddings", {"input": "x"}, 404, "is not a route"),
]


def test_a_bad_request_gets_one_line_and_the_right_status(served: ServedModel) -> None:
    for path, body, status, words in BAD:
        found = served.ask(path, body)
        message = found[2]["error"]["message"]
        assert (found[0], words in message, "\n" in message) == (status, True, False), (path, str(body)[:80], message)
    assert served.texts("Q: 31\nA:", max_tokens=4), "and the next one an answer"
    assert served.ask("/health")[2]["status"] == "serving"
    counted = served.ask("/metrics")[2]
    assert 'posttrain_served_requests_total{route="/v1/completions",status="400"}' in counted
    [entry] = served.ask("/v1/models")[2]["data"]
    assert served.ask(f"/v1/models/{MODEL}")[2] == entry
    assert entry["id"] == MODEL


def test_a_client_that_leaves_frees_its_turn(folder: Workbench) -> None:
    with serving(folder, "prod", "--concurrency", "1", "--queue", "1") as alone:
        long = json.dumps({"prompt": "Q", "max_tokens": 90, "n": 256, "ignore_eos": True}).encode()
        clients = []
        (engine,) = children(alone.process)
        os.kill(engine, signal.SIGSTOP)  # so that no answer ends before somebody has looked
        for count in ("running 256.0", "waiting 1.0"):
            clients.append(http.client.HTTPConnection(alone.host))
            clients[-1].request("POST", "/v1/completions", long)
            folder.wait(count, lambda count=count: f"posttrain_served_{count}" in alone.ask("/metrics")[2])
        status, headers, found = alone.ask("/v1/completions", {"prompt": "Q"})
        assert (status, headers.get("retry-after")) == (429, "1"), found
        os.kill(engine, signal.SIGCONT)
        for client in clients:
            client.close()
        assert alone.texts("Q", max_tokens=3)


@pytest.mark.journey
def test_it_follows_the_channel_through_releases_and_rollbacks_under_load(bench: Workbench) -> None:
    """No request fails, and every answer is that of the model whose digest it names."""
    with serving(bench, "prod") as served:
        wrong: list[Any] = []
        answers: dict[str, set[str]] = {}
        over = threading.Event()

        def client() -> None:
            while not over.is_set():
                asked = {"prompt": PROMPTS[0], "temperature": 0, "logprobs": 0, **WHOLE}
                status, _, found = served.ask("/v1/completions", asked)
                if status != 200:
                    wrong.append(found)
                    return
                answers.setdefault(found["system_fingerprint"], set()).add(str(found["choices"][0]["logprobs"]))

        threads = [threading.Thread(target=client) for _ in range(8)]
        for thread in threads:
            thread.start()
        bench.run("run", "run.yaml", "--seed", "6")
        for back in (1, 2, 1, 2):
            live = bench.run("get", "prod", "-o", "json").json["live"]
            bench.wait("the live release", lambda live=live: live in answers and _digest(served) == live)
            bench.run("rollback", "prod", "--to", str(back), "--lift-quarantine", "test")
        over.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert sorted(map(len, answers.values())) == [1, 1], answers
        assert len(set.union(*answers.values())) == 2, "the two models answer differently"
        assert len(children(served.process)) <= 2
        found = served.ask("/health")[2]
        assert 0 <= found["compared"] < 1e-3, "its evaluation recorded the log-probabilities of fixed texts"
        assert served.end() == 0


@pytest.mark.journey
def test_an_engine_and_a_server_that_are_killed(bench: Workbench) -> None:
    with serving(bench, "prod") as served:
        expected = served.texts(PROMPTS, max_tokens=20)
        [engine] = children(served.process)
        os.kill(engine, signal.SIGKILL)
        assert served.texts(PROMPTS, max_tokens=20) == expected, "the request waits for the next engine"
        [engine] = children(served.process)
        served.process.kill()
        bench.wait("the end of the engine", lambda: not os.path.exists(f"/proc/{engine}"))
    with serving(bench, "prod") as served:
        assert served.texts(PROMPTS, max_tokens=20) == expected
        late = threading.Thread(
            target=served.texts, args=(PROMPTS,), kwargs={"max_tokens": 80, "ignore_eos": True, "n": 99}
        )
        late.start()
        bench.wait("a running request", lambda: "running 297.0" in served.ask("/metrics")[2])
        assert served.end() == 0
        late.join()


def test_keys(bench: Workbench) -> None:
    key = bench.run("token", "issue", "service:bot", "--channel", "prod").out.split()[-1]
    assert "calls channel prod" in bench.run("token", "ls").out
    assert "no channel" in bench.run("token", "issue", "service:bot", "--channel", "prd", code=None).err
    with serving(bench, "prod", "--keys") as served:
        asked = {"prompt": "Q", "max_tokens": 2}
        assert served.ask("/v1/completions", asked)[0] == 401
        assert served.ask("/v1/completions", asked, key="posttrain_" + "x" * 43)[0] == 401
        assert served.ask("/v1/completions", asked, key=key)[0] == 200
        assert served.ask("/v1/models", key="wrong")[0] == 401
        assert served.ask("/health")[0] == 200
    with serving(bench, "tiny/sft", "--keys") as served:
        status, _, found = served.ask("/v1/completions", asked, key=key)
        assert (status, "is for channel prod" in found["error"]["message"]) == (403, True)


def test_what_cannot_be_served_ends_with_one_line(bench: Workbench, tmp_path: Path) -> None:
    bench.run("export", MODEL, "broken")
    tensors = load_file(bench.folder / "broken" / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, bench.folder / "broken" / "model.safetensors", metadata={"format": "pt"})
    bench.run("asset", "add", "model:broken", "broken")
    for words, said in (
        (("prod", "--host", "0.0.0.0"), "add --keys"),
        (("prod", "--host", "0.0.0.0", "--keys"), "TLS"),
        (("prod", "--dtype", "float16"), "--dtype: 'float16' is not one of 'auto', 'float32', 'bfloat16'"),
        (("prod", "--context", "97"), "--context must be at most 96"),
        (("model:broken",), "must be finite, got NaN or infinity in model.norm.weight"),
        (("nosuch",), "no channel"),
        (("prod", "--adapter", "prod=tiny/sft"), "must not have the name of the served model"),
    ):
        ended = bench.run("serve-model", *words, "--port", "0", code=None)
        assert (ended.code, said in ended.err, ended.err.count("\n")) == (2, True, 1), ended.err


def test_files_that_change_under_a_served_folder_are_not_served(bench: Workbench) -> None:
    """A digest is named only for the weights that have it."""
    bench.run("export", MODEL, "folder")
    with serving(bench, "./folder") as served:
        assert served.texts(PROMPTS[0], max_tokens=4)
        weights = bench.folder / "folder" / "model.safetensors"
        tensors = {name: one + 0.1 for name, one in load_file(weights).items()}
        weights.unlink()
        save_file(tensors, weights, metadata={"format": "pt"})
        [engine] = children(served.process)
        os.kill(engine, signal.SIGKILL)
        bench.wait("the refusal", lambda: "must not change while" in served.ask("/health")[2]["trouble"])
        assert served.ask("/health")[0] == 503
        assert served.end() == 0


def test_a_model_in_bfloat16_and_under_other_names(bench: Workbench) -> None:
    """It is compared within the tolerance of its dtype, and commands find it whatever its name in requests is."""
    with serving(bench, "channel:prod", "--dtype", "bfloat16", "--name", "other") as served:
        found = served.ask("/health")[2]
        assert (found["status"], found["model"], 0 < found["compared"] < 0.5) == ("serving", "other", True)
        for name in ("other", "channel:prod", found["release"], found["digest"]):
            assert len(served.complete(PROMPTS[0], model=name, logprobs=1, **WHOLE)["choices"]) == 1
        assert "served at" in bench.run("chat", "prod", "hi").err
    for word in ("prod@1", "channel:prod"):
        assert bench.run("chat", word, "hi", "-o", "json").json[0]["model"] == word


def test_two_servers_of_a_channel_are_known(bench: Workbench) -> None:
    with serving(bench, "prod") as first:
        with serving(bench, "prod") as second:
            assert second.url in bench.run("chat", "prod", "hi").err
            assert second.end() == 0
        assert f"served at {first.url}" in bench.run("chat", "prod", "hi").err
        first.process.kill()
    assert "loading prod" in bench.run("chat", "prod", "hi").err


def _digest(served: ServedModel) -> str:
    return str(served.ask("/health")[2]["digest"])
