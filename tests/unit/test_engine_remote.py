"""A role on another server: what it predicts equals the model's own predictions, and wrong answers are refused."""

from __future__ import annotations

import json
import math
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_engine_distill import TEACHER, config, recipe
from test_engine_recipes import TINY, TOKENIZER, quiet

from posttrain.domain.errors import InfrastructureError, InputError, StoppedError
from posttrain.domain.roles import keys_of_servers
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.config import DataflowConfig
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import initial_model
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.logprobs import predict
from posttrain.engine.roles.remote import RemoteSource
from posttrain.engine.roles.training import FrozenWorker
from posttrain.engine.rollout.decoding import prompt_logprobs
from posttrain.planner.residency import resident
from posttrain.planner.shape import Shape

KEY = "secret-key-of-this-server"
Answer = Callable[[str, dict[str, Any]], tuple[int, Any]]
DOCUMENTS = [
    Document((1, 7, 8), (9, 10, 2)),
    Document((1, 9), ()),
    Document((1, 7, 9, 8), (9, 8, 7, 7, 11), sampled=(True, True, False, False, True)),  # two turns
    Document((1,), (12,)),
]


class StandIn:
    """A server with the model `big`, in the form of vLLM or of SGLang."""

    def __init__(self, model: LanguageModel, owner: str) -> None:
        self._model = model
        self.listed: Any = {"data": [{"id": "big", "owned_by": owner, "max_model_len": 16, "root": "here"}]}
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.keys: list[str | None] = []
        self.fingerprint: str | None = None
        self.change: Answer = lambda path, answer: (200, answer)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path.endswith("/models"):
            return (200, self.listed) if path == "/v1/models" else (404, {"detail": "Not Found"})
        text = body.get("prompt", body.get("text", body.get("input_ids")))
        tokens = TOKENIZER.encode(text) if isinstance(text, str) else text
        if path == "/generate":
            return 200, {"meta_info": self._sglang(tokens, body["logprob_start_len"], body.get("top_logprobs_num", 0))}
        width = body.get("prompt_logprobs", 0)
        rows = [
            None,
            *({str(t): {"logprob": v, "rank": 1} for t, v in one.items()} for one in self._rows(tokens, width)),
        ]
        choice = {"prompt_logprobs": rows, "prompt_token_ids": tokens}
        return 200, {"choices": [choice], "system_fingerprint": self.fingerprint}

    def _sglang(self, tokens: list[int], start: int, width: int) -> dict[str, Any]:
        rows = [{}, *self._rows(tokens, width)][start:]
        own = [
            [None if place == 0 else row[t], t, None]
            for place, (t, row) in enumerate(zip(tokens[start:], rows, strict=True))
        ]
        tops = [[[v, t, None] for t, v in row.items()][:width] for row in rows]
        return {"input_token_logprobs": own, "input_top_logprobs": [None, *tops[1:]]}

    def _rows(self, tokens: list[int], width: int) -> list[dict[int, float]]:
        [found] = prompt_logprobs(self._model, [tokens], width)
        rows = zip(
            found.top_tokens[1:].tolist(),
            found.top_logprobs[1:].tolist(),
            tokens[1:],
            found.logprobs[1:].tolist(),
            strict=True,
        )
        return [{**dict(zip(ids, values, strict=True)), own: value} for ids, values, own, value in rows]


@contextmanager
def serving(stand_in: StandIn) -> Iterator[str]:
    """The URL of a server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
            stand_in.asked.append((self.path, body))
            stand_in.keys.append(self.headers.get("authorization"))
            status, answer = stand_in.answer(self.path, body)
            if not self.path.endswith("/models"):
                status, answer = stand_in.change(self.path, answer)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data) + 37 * data.endswith(b"CUT")))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def worker(url: str, **more: Any) -> FrozenWorker:
    source = RemoteSource("teacher", url, "big", KEY, **{"patience": 0.0, **more})
    return FrozenWorker(RankContext("main", 0, 1, "cpu"), source, micro_batch_tokens=64, vocabulary=TEACHER.vocab_size)


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_it_predicts_what_the_model_predicts(owner: str) -> None:
    batch, stand_in = TokenBatch.pack(DOCUMENTS), StandIn(TEACHER, owner)
    here = FrozenWorker(RankContext("main", 0, 1, "cpu"), TEACHER, micro_batch_tokens=64)
    with serving(stand_in) as url:
        there = worker(url)
        assert there.predicts() == {"logprobs", "topk"}
        assert there.context_length() == 15
        rest = there.sleep
        assert (there.resident_bytes(), rest(), there.fallbacks()) == (0, 0, {})
        found, wanted = there.hold(batch, 4), here.hold(batch, 4)
        filled = there.fill(batch, "own", "logprobs").column("own")
    assert found.counts == wanted.counts == (3, 0, 3, 1)
    assert torch.equal(found.held.ids, wanted.held.ids)
    torch.testing.assert_close(found.held.logprobs, wanted.held.logprobs, atol=1e-6, rtol=0)
    own = predict(TEACHER, batch, {"logprobs"}).of("logprobs").detach() * batch.response_mask
    torch.testing.assert_close(filled, own, atol=1e-6, rtol=0)
    assert set(stand_in.keys) == {"Bearer secret-key-of-this-server"}
    sent = [body for path, body in stand_in.asked if "models" not in path]
    if owner == "sglang":
        assert {body["logprob_start_len"] for body in sent} == {2, 3, 0}, "answers begin with the response"


@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_student_learns_the_same_from_it(owner: str) -> None:
    made = recipe(config())
    made.step(0, quiet(0))
    with serving(StandIn(TEACHER, owner)) as url:
        far = recipe(config(teacher={"url": url, "model": "big"}), taught_by=RemoteSource("teacher", url, "big"))
        far.step(0, quiet(0))
    own, other = (one.roles.made.each(_weights)[0] for one in (made, far))
    for name, value in own.items():
        torch.testing.assert_close(other[name], value, atol=1e-6, rtol=0)


def _weights(worker: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in worker.engine.model.module.named_parameters()}


def _in_rows(change: Callable[[list[Any]], Any]) -> Answer:
    def changed(path: str, answer: Any) -> tuple[int, Any]:
        change(answer["choices"][0]["prompt_logprobs"])
        return 200, answer

    return changed


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_in_rows(list.pop), "got 2 rows for 3 tokens"),
        (_in_rows(lambda rows: rows.insert(1, rows[1])), "got 4 rows for 3 tokens"),
        (_in_rows(lambda rows: rows[-1].clear()), "a row without its own token 2"),
        (
            _in_rows(lambda rows: rows[-1].update({"900": rows[-1].pop(next(t for t in rows[-1] if t != "2"))})),
            "got 3 likeliest tokens of the student's vocabulary (25) instead of 4",
        ),
        (_in_rows(lambda rows: [row.update({"99999": {"logprob": -1}}) for row in rows[1:]]), "probabilities of"),
        (_in_rows(lambda rows: rows[-1]["2"].update(logprob=math.nan)), "a log-probability of nan"),
        (_in_rows(lambda rows: rows[-1]["2"].update(logprob=-math.inf)), "a log-probability of -inf"),
        (_in_rows(lambda rows: rows[-1]["2"].update(logprob=10**400)), "OverflowError"),
        (_in_rows(lambda rows: rows[-1]["2"].update(logprob=f"{KEY} \x1b[31m")), "string to float: '[key] "),
        (lambda path, answer: (200, b"[" * 100_000), "RecursionError"),
        (lambda path, answer: (404, {"detail": "Not Found"}), "with status 404: Not Found"),
        (lambda path, answer: (307, b""), "with status 307:"),
        (_in_rows(lambda rows: rows[-1]["2"].update(logprob="x")), "must answer prompt_logprobs of each token"),
        (lambda path, answer: (200, {"choices": []}), "must answer choices, as vLLM, SGLang and Posttrain do"),
        (lambda path, answer: (200, [1]), "must answer an object"),
        (lambda path, answer: (200, b"<html>"), "must answer JSON"),
        (
            lambda path, answer: (400, {"error": {"message": "no\nmore than 20\tsecret-key-of-this-server"}}),
            "refused /v1/completions with status 400: no more than 20 [key]",
        ),
        (lambda path, answer: (401, b"no"), "refused /v1/completions with status 401: no; its key is refused"),
    ],
)  # fmt: skip
def test_a_wrong_answer_is_one_line(change: Answer, told: str) -> None:
    stand_in = StandIn(TEACHER, "vllm")
    stand_in.change = change
    with serving(stand_in) as url, pytest.raises(InputError) as raised:
        worker(url).hold(TokenBatch.pack(DOCUMENTS[:1]), 4)
    line = str(raised.value)
    assert line.startswith(f"teacher at {url} ")
    assert told in line
    assert "\n" not in line
    assert "secret-key" not in line


def test_a_failing_server_is_asked_again_for_as_long_as_it_may_be_away() -> None:
    stand_in, failed = StandIn(TEACHER, "vllm"), list[int]()

    def twice(path: str, answer: Any) -> tuple[int, Any]:
        failed.append(503 if len(failed) % 2 else 429)
        return (failed[-1], {}) if len(failed) < 3 else (200, answer)

    stand_in.change = twice
    batch = TokenBatch.pack(DOCUMENTS[:1])
    with serving(stand_in) as url:
        assert worker(url, patience=60.0).hold(batch, 4).counts == (3,)
        stand_in.change = lambda path, answer: (500, {"error": {"message": "engine died"}})
        one = worker(url)
        with pytest.raises(InfrastructureError, match=r"did not answer for 0 s \(status 500: engine died\); check"):
            one.hold(batch, 4)
    with pytest.raises(InfrastructureError, match=r"did not answer for 0 s .*refused"):
        one.hold(batch, 4)
    assert failed[:3] == [429, 503, 429]


def test_another_model_in_the_middle_of_a_stage_is_noticed() -> None:
    stand_in, batch = StandIn(TEACHER, "vllm"), TokenBatch.pack(DOCUMENTS[:1])
    with serving(stand_in) as url:
        one = worker(url)
        stand_in.fingerprint = "sha256:a"
        one.hold(batch, 2)
        one.hold(batch, 2)
        stand_in.fingerprint = "sha256:b"
        with pytest.raises(InputError, match=r"must stay the same model during a stage, got sha256:b after sha256:a"):
            one.hold(batch, 2)


def test_the_tokens_of_texts_are_compared() -> None:
    for owner in ("vllm", "sglang"):
        with serving(StandIn(TEACHER, owner)) as url:
            found = RemoteSource("teacher", url, "big").open()
            found.refuse_other_tokens(TOKENIZER.encode, ["12", "", "3>"])
            with pytest.raises(InputError, match=r"tokenizes '12' differently \(from token 1 on\)"):
                found.refuse_other_tokens(lambda text: TOKENIZER.encode(text)[:1], ["12"])


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"data": [{"id": "small", "max_model_len": 9}]}, "must serve the model big, got small; correct `model`"),
        ({"data": [{"id": "a\nb"}, {"id": KEY}]}, "must serve the model big, got a b, [key]; correct"),
        ({"data": [{"id": "big"}]}, "must report max_model_len of big, as vLLM, SGLang and Posttrain do, got None"),
        ({"data": [{"id": "big", "max_model_len": True}]}, "must report max_model_len of big"),
        ({"detail": 3}, "must answer a list of models"),
    ],
)
def test_a_server_without_the_model_is_refused(entry: Any, told: str) -> None:
    stand_in = StandIn(TEACHER, "vllm")
    stand_in.listed = entry
    with serving(stand_in) as url, pytest.raises(InputError) as raised:
        worker(url)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_first_error_ends_the_requests_that_still_run_and_is_the_one_that_is_raised() -> None:
    stand_in, over, begun = StandIn(TEACHER, "vllm"), threading.Event(), threading.Event()
    late = list[str]()

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, stand_in.listed
        if len(body["prompt"]) == 2:  # the last document
            begun.wait(120)
            return 200, (400, {"error": {"message": "too short"}})
        begun.set()
        if not over.wait(60):
            late.append(path)
        return 200, (200, {})

    stand_in.answer = answer  # type: ignore[method-assign]
    stand_in.change = lambda path, answer: answer
    with serving(stand_in) as url:
        one = worker(url, patience=60.0)
        with pytest.raises(InputError, match="refused /v1/completions with status 400: too short"):
            one.hold(TokenBatch.pack(DOCUMENTS), 4)
        assert not late, "the others were not waited for"
        over.set()


def test_waiting_ends_when_a_stop_is_requested() -> None:
    told = list[str]()
    source = RemoteSource("teacher", "http://127.0.0.1:9/v1", "big", tell=told.append, stopping=lambda: bool(told))
    with pytest.raises(StoppedError):
        source.open()
    assert len(told) == 1
    assert told[0].startswith("teacher at http://127.0.0.1:9/v1 does not answer (")


def test_a_server_that_loads_its_model_is_waited_for() -> None:
    stand_in = StandIn(TEACHER, "vllm")
    whole, stand_in.listed = stand_in.listed, {"data": []}
    with serving(stand_in) as url:
        with pytest.raises(InfrastructureError, match=r"did not answer for 0 s \(it serves no model yet\)"):
            worker(url)
        threading.Timer(0.3, lambda: setattr(stand_in, "listed", whole)).start()
        assert worker(url, patience=60.0).context_length() == 15
        stand_in.listed = {"data": [{"id": "large", "max_model_len": 20}, {"id": "lora", "parent": "large"}]}
        alone = RemoteSource("teacher", url, "model").open()
        assert (alone.model, alone.context_length) == ("large", 19), "the only one that is served"
        assert RemoteSource("teacher", url, "lora").open().context_length == 19


def test_a_model_that_rewards_call_is_looked_for() -> None:
    """Its server may be any that answers in OpenAI's form: it need not list its models, or report a context."""
    stand_in = StandIn(TEACHER, "someone")
    with serving(stand_in) as url:
        stand_in.listed = {"data": [{"id": name} for name in ("b", "a", *"cdefghij")]}
        assert RemoteSource("models.judge", url, "c").find(0) == "c"
        with pytest.raises(InputError, match=r"must serve the model big, got a, b, c, d, e, f, g, h and 2 more; corr"):
            RemoteSource("models.judge", url, "big").find(0)
        stand_in.listed = {"data": [{"id": "one"}]}
        assert RemoteSource("models.judge", url, "model").find(0) == "one", "the only one that is served"
        assert RemoteSource("models.judge", f"{url}/elsewhere", "any").find(0) == "any", "it lists none"
    with pytest.raises(InfrastructureError, match=r"models.judge at http://127.0.0.1:9/v1 did not answer for 0 s"):
        RemoteSource("models.judge", "http://127.0.0.1:9/v1", "any").find(0)


def test_an_answer_that_is_cut_off_is_asked_for_again() -> None:
    stand_in, cut = StandIn(TEACHER, "vllm"), list[str]()

    def once(path: str, answer: Any) -> tuple[int, Any]:
        cut.append(path)
        return 200, json.dumps(answer).encode()[:-40] + b"CUT" if len(cut) == 1 else answer

    stand_in.change = once
    with serving(stand_in) as url:
        assert worker(url, patience=60.0).hold(TokenBatch.pack(DOCUMENTS), 4).counts == (3, 0, 3, 1)
        assert len(cut) == 4


def test_another_model_after_an_outage_is_noticed() -> None:
    stand_in, batch = StandIn(TEACHER, "sglang"), TokenBatch.pack(DOCUMENTS[:1])
    with serving(stand_in) as url:
        one = RemoteSource("teacher", url, "big", patience=60.0).open()
        assert one.identity == "from here"
        assert one.source.open().identity == one.identity

        def down(path: str, answer: Any) -> tuple[int, Any]:
            stand_in.listed = {"data": [{**stand_in.listed["data"][0], "root": "elsewhere"}]}
            return 503, {}

        stand_in.change = down
        with pytest.raises(
            InputError, match="must stay the same model during a stage, got from elsewhere after from here"
        ):
            one.hold(batch, 2, None)
        with pytest.raises(
            InputError, match="must stay the same model during a stage, got from elsewhere after from here"
        ):
            one.source.open()


@pytest.mark.parametrize("key", ["with space", "line\n", "naïve", 'quo"te', "back\\slash"])
def test_a_key_that_no_request_can_have_is_never_shown(key: str) -> None:
    with pytest.raises(InputError) as raised:
        RemoteSource("teacher", "http://h/v1", "big", key)
    assert "the key of teacher must have letters, digits and" in str(raised.value)
    assert key not in str(raised.value)


def test_limits_of_a_server_appear_before_anything_is_trained() -> None:
    stand_in = StandIn(TEACHER, "vllm")
    with serving(stand_in) as url:
        one = RemoteSource("teacher", url, "big").open()
        one.probe(9, 4)
        one.probe(900, 4)
        assert [len(body["prompt"]) for path, body in stand_in.asked if "models" not in path] == [9, 15]
        stand_in.change = lambda path, answer: (400, {"error": {"message": "at most 3"}})
        with pytest.raises(InputError, match="at most 3"):
            one.probe(9, 4)
    for url in ("http://a..b/v1", "https://127.0.0.1:1/v1"):
        with pytest.raises((InputError, InfrastructureError)) as raised:
            RemoteSource("teacher", url, "big", patience=0.0).open()
        assert f"teacher at {url} " in str(raised.value)


def test_a_declared_role_may_be_there_too() -> None:
    there = {"url": "https://h/v1", "model": "big", "key": "TEACHER_KEY"}
    given = {"data": "d", "recipe": "flow:Flow", "steps": 3, "roles": {"tutor": {"model": there}, "reference": {}}}
    made = DataflowConfig.model_validate(given)
    assert {role.name: (role.model, role.url) for role in made.roles()} == {
        "policy": ("model", ""), "tutor": ("", "https://h/v1"), "reference": ("model", ""), "rollout": ("model", ""),
    }  # fmt: skip
    assert set(made.inputs()) == {"model", "data", "recipe"}
    said = made.model_dump(mode="json")
    assert DataflowConfig.model_validate(said) == made
    assert keys_of_servers(said) == {"TEACHER_KEY"}
    for change, told in (({"trained": True}, "needs head: language"), ({"head": "score"}, "needs head: language")):
        with pytest.raises(ValidationError, match=told):
            DataflowConfig.model_validate({**given, "roles": {"tutor": {"model": there, **change}}})
    with pytest.raises(ValidationError, match="temperature must be 1 with tutor at a url"):
        DataflowConfig.model_validate({**given, "temperature": 0.5})


def test_the_objects_of_one_answer_are_held_at_a_time() -> None:
    """Rows in Python's objects are several times as large as the answers, of which 16 may arrive together."""
    width, length = 64, 151
    tops = {str(token): {"logprob": -9.0 - token / 99, "rank": token, "decoded_token": "x"} for token in range(width)}
    data = json.dumps({"choices": [{"prompt_logprobs": [None, *[tops] * (length - 1)]}]}).encode()
    stand_in, all_asked = StandIn(TEACHER, "vllm"), threading.Barrier(16)
    stand_in.listed["data"][0]["max_model_len"] = length + 1

    def answer(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path != "/v1/models":
            all_asked.wait(60.0)
        return 200, stand_in.listed if path == "/v1/models" else data

    stand_in.answer = answer  # type: ignore[method-assign]
    with serving(stand_in) as url:
        model = RemoteSource("teacher", url, "big").open()
        tracemalloc.start()
        try:
            one = json.loads(data)
            objects = tracemalloc.get_traced_memory()[0] - len(data)
            del one
            tracemalloc.reset_peak()
            model.hold(TokenBatch.pack([Document((1,), (2,) * (length - 1))] * 16), width, None)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert objects > 2 * len(data)
    assert peak < 32 * len(data) + 3 * objects


def test_it_takes_memory_for_its_rows_only() -> None:
    apart = {"policy": {"ranks": 1}, "teacher": {"ranks": 2}}
    given = {"prompts_per_step": 100, "max_new_tokens": 1000, "top_k": 64, "placement": apart}
    shape = Shape.of_config(initial_model(TINY, TOKENIZER, 0).config.to_dict())
    assert shape is not None
    shapes = {"policy": shape, "rollout": shape}
    load = config(**given, teacher={"url": "http://h/v1"}).load("distill")
    assert load.pools["teacher"].ranks == 2
    here = resident(config(**given).load("distill"), {**shapes, "teacher": shape})
    there = resident(load, shapes)
    assert there.total("teacher", "teacher", "teacher") == 100 * 1000 * 64 * 8
    parts = {held.part for held in there.held if held.role == "teacher"}
    assert parts == {"rows"}
    assert {held.part for held in here.held if held.role == "teacher"} > parts
    policy = [[held for held in found.held if held.role == "policy"] for found in (here, there)]
    assert policy[0] == policy[1]
