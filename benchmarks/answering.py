"""Throughput and latency of a served model, beside vLLM's server where a Python with vLLM is named.

    python -m benchmarks.answering [--json FILE] [--size 1m|24m] [--clients N ...] [--requests N] [--rounds N]
                                   [--vllm PYTHON] [--threads N] [--tiny]

Both servers serve the same weights in float32 over `/v1/completions`, on one thread each unless `--threads` says
otherwise. Each client sends its next request when it has its answer: a prompt of 64 token ids, and 64 tokens, greedy
and past any end of sequence, without a stream. The rounds of the two servers alternate. Figures: generated tokens per
second, and milliseconds from a request's first byte to the answer's last one, over the requests of all rounds; ratios
are the median of the rounds' ratios. The row `decoder` is the bound: the decoder without a server. The target is the
throughput of vLLM's server.

The second table is about a teacher of distillation: response tokens per second for which a student gets the likeliest
tokens, and bytes of an answer for each of them. The row `job` is the bound: the same model in the student's job.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.error import URLError

import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.judging import at_least, judge
from benchmarks.rollout import SIZES, build_module
from posttrain.engine.batch import Document, TokenBatch
from posttrain.engine.groups.port import RankContext
from posttrain.engine.models.files import ModelSource, character_tokenizer
from posttrain.engine.models.language_model import adopt_module
from posttrain.engine.roles.remote import RemoteSource
from posttrain.engine.roles.training import FrozenWorker
from posttrain.engine.rollout.backends.native import NativeRollout
from posttrain.engine.rollout.port import Generation, SamplingParams

PROMPT, TOKENS, CLIENTS = 64, 64, (1, 16, 64)
SAMPLES, RESPONSE, LIKELIEST = 32, 400, 64  # of a student that asks a teacher
TARGET = 1.0  # ratio of throughputs
_PATIENCE = 600.0  # seconds until a server answers
_VLLM = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "passive",
}


@dataclass(frozen=True)
class Row:
    """The figures of one server at a number of clients; ratios to the other server, NaN without one.

    The server `decoder` is the bound: the decoder alone, in one process.
    """

    server: str
    clients: int
    tokens_per_second: float
    p50_ms: float
    p99_ms: float
    ratio: float


@dataclass(frozen=True)
class Taught:
    """The figures of one teacher."""

    server: str
    tokens_per_second: float  # response tokens, of all rounds' best
    bytes_per_token: float  # of an answer, for each likeliest token of a response token; NaN in the job


@dataclass(frozen=True)
class Server:
    """A running server."""

    name: str
    port: int
    model: str


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answering", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--size", choices=SIZES, default="1m")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, metavar="N")
    parser.add_argument("--requests", type=int, default=8, metavar="N", help="of each client and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--vllm", metavar="PYTHON", help="a Python in whose environment vLLM is installed")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help="of the student of the second table")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.tiny:
        options.clients, options.requests, options.rounds = (2,), 2, 1
        options.samples = 2
    decoder = [_decoder(options.size, clients, options) for clients in options.clients]
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = _model(Path(scratch), options.size)
        servers = [stack.enter_context(_posttrain(Path(scratch), folder, options.threads))]
        if options.vllm:
            servers.append(stack.enter_context(_vllm(Path(scratch), folder, options.vllm, options.threads)))
        rows = [row for clients in options.clients for row in _measured(servers, clients, options)]
        taught = _taught(servers, folder, options)
    rows = [*decoder, *rows]
    print(f"{'server':<10} {'clients':>7} {'tokens/s':>9} {'p50 ms':>8} {'p99 ms':>8} {'ratio':>6}")
    for row in rows:
        print(f"{row.server:<10} {row.clients:>7} {row.tokens_per_second:>9.0f} {row.p50_ms:>8.1f} {row.p99_ms:>8.1f} "
              f"{row.ratio:>6.2f}")  # fmt: skip
    print(f"{'teacher':<10} {'tokens/s':>9} {'bytes':>6}")
    for one in taught:
        print(f"{one.server:<10} {one.tokens_per_second:>9.0f} {one.bytes_per_token:>6.1f}")
    if options.json:
        options.json.write_text(json.dumps([*map(asdict, rows), *map(asdict, taught)], indent=1) + "\n")
    claims = [
        at_least(f"throughput at {row.clients} clients", row.ratio, TARGET)
        for row in rows
        if row.server == "posttrain" and options.vllm
    ]
    judge(claims, full=not options.tiny)


def _decoder(size: str, rows: int, options: argparse.Namespace) -> Row:
    """Return the bound: the rate of the decoder in this process, with as many rows as there are clients."""
    torch.set_num_threads(options.threads)
    engine, best, dice = NativeRollout(adopt_module(build_module(512, size))), 0.0, random.Random(0)
    for number in range(options.rounds + 1):
        sampling = SamplingParams(TOKENS, greedy=True, ignore_eos=True)
        prompts = [tuple(dice.randrange(10, 400) for _ in range(PROMPT)) for _ in range(rows)]
        begun, done = time.perf_counter(), 0
        engine.submit([Generation(f"{number}.{at}", one, at, sampling, TOKENS) for at, one in enumerate(prompts)])
        while done < rows:
            done += len(engine.completed(60))
        best = max(best, rows * TOKENS / (time.perf_counter() - begun))
    return Row("decoder", rows, best, float("nan"), float("nan"), float("nan"))


def _model(scratch: Path, size: str) -> Path:
    """Write a model of this size, whose vocabulary is that of a tokenizer of as many characters."""
    folder, vocabulary = scratch / "model", SIZES[size][-1]
    build_module(512, size).save_pretrained(folder)
    characters = "".join(chr(0x4E00 + place) for place in range(vocabulary))
    tokenizer: PreTrainedTokenizerFast = character_tokenizer(characters)
    tokenizer.save_pretrained(folder)
    return folder


@contextmanager
def _posttrain(scratch: Path, folder: Path, threads: int) -> Iterator[Server]:
    work, words = scratch / "workspace", [sys.executable, "-m", "posttrain"]
    work.mkdir()
    environment = {**os.environ, "NO_COLOR": "1"}
    for command in (["init"], ["asset", "add", "model:bench", str(folder)]):
        subprocess.run([*words, *command], cwd=work, env=environment, check=True, capture_output=True)
    command = ["serve-model", "model:bench", "--port", "0", "--threads", str(threads), "--log-level", "error"]
    with _running([*words, *command], work, environment, scratch / "posttrain.log") as process:
        assert process.stdout is not None
        line = next((line for line in process.stdout if line.startswith("serving ")), "")
        assert line, (scratch / "posttrain.log").read_text()
        port = int(line.partition(" at http://127.0.0.1:")[2].partition("/")[0])
        yield Server("posttrain", port, "")


@contextmanager
def _vllm(scratch: Path, folder: Path, python: str, threads: int) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [
        *(python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--host", "127.0.0.1"),
        *("--port", str(port), "--dtype", "float32", "--max-model-len", "512", "--served-model-name", "bench"),
        *("--enforce-eager", "--no-enable-log-requests", "--max-logprobs", str(LIKELIEST)),
    ]
    environment = {**os.environ, **_VLLM, "OMP_NUM_THREADS": str(threads)}
    log = scratch / "vllm.log"
    with _running(words, scratch, environment, log, output=True) as process:
        until = time.monotonic() + _PATIENCE
        while True:
            with suppress(URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"vLLM's server did not answer: {log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield Server("vllm", port, "bench")


@contextmanager
def _running(
    words: Sequence[str], folder: Path, environment: dict[str, str], log: Path, *, output: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """Run a server until the end of the block; its errors (with `output`, all that it prints) go to a file."""
    with log.open("w") as errors:
        process = subprocess.Popen(
            words, cwd=folder, env=environment, stderr=errors, stdout=errors if output else subprocess.PIPE, text=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _measured(servers: Sequence[Server], clients: int, options: argparse.Namespace) -> list[Row]:
    """Return the figures of all servers at this number of clients."""
    rates = {server.name: list[float]() for server in servers}
    times = {server.name: list[float]() for server in servers}
    for server in servers:
        asyncio.run(_round(server, clients, 1, 0))  # warm
    for number in range(options.rounds):
        for server in servers if number % 2 == 0 else reversed(servers):
            begun = time.perf_counter()
            times[server.name] += asyncio.run(_round(server, clients, options.requests, 1 + number))
            rates[server.name].append(clients * options.requests * TOKENS / (time.perf_counter() - begun))
    rows = []
    for server in servers:
        ordered, own = sorted(times[server.name]), rates[server.name]
        other = next((rates[one.name] for one in servers if one is not server), None)
        ratio = statistics.median(a / b for a, b in zip(own, other, strict=True)) if other else float("nan")
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        rows.append(
            Row(server.name, clients, statistics.median(own), 1e3 * statistics.median(ordered), 1e3 * p99, ratio)
        )
    return rows


def _taught(servers: Sequence[Server], folder: Path, options: argparse.Namespace) -> list[Taught]:
    """Return the rates at which teachers give the likeliest tokens: in the job, and on each server."""
    dice, length, found = random.Random(0), PROMPT + RESPONSE, list[Taught]()
    texts = [tuple(dice.randrange(10, 400) for _ in range(length)) for _ in range(options.samples)]
    batch = TokenBatch.pack([Document(text[:PROMPT], text[PROMPT:]) for text in texts])
    sources: dict[str, ModelSource | RemoteSource] = {"job": ModelSource(folder, "float32")}
    for server in servers:
        name = server.model or "model:bench"
        sources[server.name] = RemoteSource("teacher", f"http://127.0.0.1:{server.port}/v1", name)
    for name, source in sources.items():
        worker, best = FrozenWorker(RankContext("main", 0, 1, "cpu"), source, micro_batch_tokens=4096), float("inf")
        for _ in range(options.rounds + 1):
            begun = time.perf_counter()
            worker.hold(batch, LIKELIEST)
            best = min(best, time.perf_counter() - begun)
        size = _size(source, texts[0]) / length / LIKELIEST if isinstance(source, RemoteSource) else float("nan")
        found.append(Taught(name, len(texts) * RESPONSE / best, size))
    return found


def _size(source: RemoteSource, text: Sequence[int]) -> int:
    """Return the bytes of an answer."""
    body = {"model": source.model, "prompt": text, "max_tokens": 1, "temperature": 0, "prompt_logprobs": LIKELIEST}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{source.url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=_PATIENCE) as answer:
        return len(answer.read())


async def _round(server: Server, clients: int, requests: int, seed: int) -> list[float]:
    """Send the requests of all clients; return the seconds of each."""
    done = await asyncio.gather(*(_client(server, requests, f"{seed} {place}") for place in range(clients)))
    return [seconds for one in done for seconds in one]


async def _client(server: Server, requests: int, seed: str) -> list[float]:
    dice, seconds = random.Random(seed), list[float]()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        for _ in range(requests):
            prompt = [dice.randrange(10, 400) for _ in range(PROMPT)]
            asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            body = json.dumps({**asked, **({"model": server.model} if server.model else {})}).encode()
            head = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json"]
            begun = time.perf_counter()
            writer.write("\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body)
            status, answer = await _answer(reader)
            seconds.append(time.perf_counter() - begun)
            assert status == 200, answer[:300]
            assert json.loads(answer)["usage"]["completion_tokens"] == TOKENS
    finally:
        writer.close()
    return seconds


async def _answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return status and body of an answer whose length is in its headers."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in head if line.startswith("content-length:"))
    return int(head[0].split()[1]), await reader.readexactly(length)


if __name__ == "__main__":
    main()
