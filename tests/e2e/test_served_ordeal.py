"""64 clients and 10,000 requests while a channel is rolled back 20 times; a server that is killed under load."""

from __future__ import annotations

import http.client
import random
import threading
import time
from collections import defaultdict
from typing import Any

import pytest
from served_model import ServedModel, children, serving
from workbench import PATIENCE, Workbench

LOST = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # no client may end early
pytestmark = [pytest.mark.slow, pytest.mark.deep, LOST]
AGAIN = (OSError, http.client.HTTPException, AssertionError, ValueError)  # refused, cut off, or not loaded yet
CLIENTS, REQUESTS, ROLLBACKS = 64, 10_000, 20
WHOLE: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
KINDS: list[dict[str, Any]] = [
    *({"prompt": f"Q: {number}\nA:", "temperature": 0, **WHOLE} for number in (7, 31, 402)),
    *({"prompt": f"Q: {number}\nA:", "temperature": 1, "seed": number, "n": 2, **WHOLE} for number in (8, 99, 1234)),
    {"prompt": ["Q: 5\nA:", "Q: 6\nA:"], "temperature": 0, "echo": True, **WHOLE, "max_tokens": 1, "logprobs": 1},
    {"prompt": "Q: 55\nA:", "temperature": 0.7, "seed": 1, "stream": True, **WHOLE, "logprobs": None},
]


class Load:
    """Clients that send requests of all kinds, and what they got."""

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.answers: dict[tuple[str, int], set[str]] = defaultdict(set)  # (digest, kind) → answers
        self.count, self.wrong = 0, list[Any]()
        self.over = threading.Event()
        self.threads = [threading.Thread(target=self._client, args=(place,)) for place in range(CLIENTS)]

    def _client(self, place: int) -> None:
        dice = random.Random(place)
        while not self.over.is_set():
            kind = dice.randrange(len(KINDS))
            try:
                digest, said = self.ask(kind)
            except Exception as error:  # the test shows it
                self.wrong.append(error)
                return
            self.answers[digest, kind].add(said)
            self.count += 1

    def ask(self, kind: int) -> tuple[str, str]:
        """The digest that an answer names, and what of it depends on the model."""
        body = KINDS[kind]
        if body.get("stream"):
            pieces = self.served.stream("/v1/completions", body)
            [digest] = {piece["system_fingerprint"] for piece in pieces}
            return digest, "".join(piece["choices"][0]["text"] for piece in pieces)
        status, headers, found = self.served.ask("/v1/completions", body)
        assert status == 200, found
        assert headers["posttrain-model-digest"] == found["system_fingerprint"]
        return found["system_fingerprint"], str(found["choices"])


def test_no_request_fails_and_no_answer_is_of_another_digest(bench: Workbench) -> None:
    with serving(bench, "prod") as served:
        load = Load(served)
        for thread in load.threads:
            thread.start()
        bench.run("run", "run.yaml", "--seed", "6")
        releases = [bench.run("get", "prod", "-o", "json").json["live"]]
        for number in range(ROLLBACKS):
            bench.run("rollback", "prod", "--to", str(1 + number % 2), "--lift-quarantine", "test")
            live = bench.run("get", "prod", "-o", "json").json["live"]
            releases.append(live)
            bench.wait("the live release", lambda live=live: served.ask("/health")[2]["digest"] == live or load.wrong)
            assert not load.wrong, load.wrong[:3]
        bench.wait("all requests", lambda: load.count >= REQUESTS or load.wrong)
        load.over.set()
        for thread in load.threads:
            thread.join()
        assert not load.wrong, load.wrong[:3]
        assert len({*releases}) == 2
        assert {digest for digest, _ in load.answers} == {*releases}
        assert all(len(answers) == 1 for answers in load.answers.values()), "one answer of each digest"
        assert len(load.answers) == 2 * len(KINDS)
        for kind in range(len(KINDS)):
            assert len({str(load.answers[digest, kind]) for digest in {*releases}}) == 2, "the releases differ"
        assert len(children(served.process)) <= 2
        print(f"{load.count} requests, {len(releases)} releases")
        assert served.end() == 0


def test_a_server_that_is_killed_serves_again_and_patient_clients_lose_nothing(bench: Workbench) -> None:
    port = "8479"
    with serving(bench, "prod", port=port) as first:
        expected = [Load(first).ask(kind) for kind in range(len(KINDS))]
        first.end()
    starting = time.monotonic()
    served = ServedModel(bench, "prod", "--port", port)
    start = time.monotonic() - starting
    got: list[Any] = []
    over = threading.Event()

    def patient(place: int) -> None:
        load, dice = Load(first), random.Random(place)
        while not over.is_set():
            kind = dice.randrange(len(KINDS))
            for _ in range(600):
                try:
                    got.append(load.ask(kind) == expected[kind])
                    break
                except AGAIN:
                    time.sleep(0.1)
            else:
                got.append(False)

    clients = [threading.Thread(target=patient, args=(place,)) for place in range(16)]
    for client in clients:
        client.start()
    bench.wait("answers", lambda: len(got) > 100)
    served.process.kill()
    served.process.wait(PATIENCE)
    died = time.monotonic()
    with serving(bench, "prod", port=port) as again:  # the command of the unit
        back = time.monotonic() - died
        many = len(got)
        bench.wait("answers", lambda: len(got) > many + 100)
        over.set()
        for client in clients:
            client.join()
        assert all(got)
        assert back < 10 * start + 60, "what a kill leaves behind does not delay a start; the rest is for busy machines"
        print(f"served again {back:.1f} s after the kill; it starts in {start:.1f} s")
        assert again.end() == 0
