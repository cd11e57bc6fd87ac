"""What a server answers in time: latencies of `get` and `ls` over many connections, from the moment each was intended.

    python -m benchmarks.serving [--json FILE] [--runs N] [--events N] [--seconds N] [--rate N] [--connections N]
                                 [--keep DIR] [--tiny]

Serves a workspace of N runs (`benchmarks.ledger` makes it), and offers so many requests a second in all over so many
connections, whatever has been answered: a server that falls behind is seen to; the first five seconds, in which its
driver starts beside it, do not count. Half are a run (`get`), half the newest
twenty (`ls`). Beside the latencies: seconds from `posttrain serve` to the first answer, and the idle server's memory.
The bound that it is held against: p99 of 100 ms at 100 requests a second, 150 MB, 1.5 s.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.ledger import fill

RUNS, EVENTS, SECONDS, RATE, CONNECTIONS = 10_000, 100, 30.0, 100.0, 200
_PATIENCE = 120.0  # seconds until a server must have answered
_MIB = 2**20
_WARM = 5.0  # seconds that do not count


@dataclass(frozen=True)
class Row:
    """One verb: milliseconds from the intended moment to the last byte."""

    verb: str
    requests: int
    median: float
    p99: float
    worst: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--events", type=int, default=EVENTS, metavar="N", help="of one run")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second, in all")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the workspace here, or use the one that is here")
    parser.add_argument("--tiny", action="store_true", help="two runs, a few requests: that it runs, no figures")
    given = parser.parse_args()
    if given.tiny:
        given.runs, given.events, given.seconds, given.rate, given.connections = 2, 20, 1.0, 20.0, 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        if not (folder / ".posttrain").exists():
            fill(folder, given.runs, given.events)
        with served(folder) as (port, key, ready, process):
            idle = process.memory_info().rss / _MIB
            rows = asyncio.run(offered(port, key, given))
    print(f"{given.runs} runs, {given.runs * given.events} events, {given.connections} connections, {given.rate:g}/s")
    print(f"ready after {ready:.2f} s, idle {idle:.0f} MiB")
    print(f"{'verb':6s} {'requests':>8s} {'median':>8s} {'p99':>8s} {'worst':>8s}  milliseconds")
    for row in rows:
        print(f"{row.verb:6s} {row.requests:8d} {row.median:8.1f} {row.p99:8.1f} {row.worst:8.1f}")
    if given.json:
        found = {"ready": ready, "idle_mib": idle, "rows": [asdict(row) for row in rows]}
        given.json.write_text(json.dumps(found, indent=2) + "\n")


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str, float, psutil.Process]]:
    """A server over the workspace: port, key, seconds until it answered, process."""
    place = folder / ".posttrain" / "server.json"
    place.unlink(missing_ok=True)
    began = time.perf_counter()
    command = [sys.executable, "-m", "posttrain", "serve", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        while True:
            with suppress(OSError, ValueError, KeyError):
                said = json.loads(place.read_text())
                port = int(said["url"].rpartition(":")[2])
                if _answers(port):
                    break
            if process.poll() is not None or time.perf_counter() - began > _PATIENCE:
                raise SystemExit("the server does not answer")
            time.sleep(0.01)
        yield port, said["key"], time.perf_counter() - began, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def _answers(port: int) -> bool:
    asked = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
    asked.request("GET", "/healthz")
    return asked.getresponse().status == http.client.OK


async def offered(port: int, key: str, given: argparse.Namespace) -> list[Row]:
    """Offer requests at their moments, each on the next connection; its latency counts from that moment."""
    rng = random.Random(1)
    paths: dict[str, Callable[[], str]] = {
        "get": lambda: f"/runs/bench-{rng.randrange(given.runs):08d}/status",
        "ls": lambda: "/runs?limit=20",
    }
    open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(given.connections)]
    locks = [asyncio.Lock() for _ in open_ones]
    taken: dict[str, list[float]] = {verb: [] for verb in paths}
    began = time.perf_counter() + 0.5
    warm = int(given.rate * (_WARM if given.seconds > _WARM else 0.0))

    async def ask(number: int, verb: str, path: str) -> None:
        intended = began + number / given.rate
        await asyncio.sleep(max(0.0, intended - time.perf_counter()))
        place = number % len(open_ones)
        async with locks[place]:
            await _ask(*open_ones[place], path, key)
        if number >= warm:
            taken[verb].append((time.perf_counter() - intended) * 1000)

    verbs = list(paths)
    jobs = [(number, verbs[number % len(verbs)]) for number in range(warm + int(given.rate * given.seconds))]
    await asyncio.gather(*(ask(number, verb, paths[verb]()) for number, verb in jobs))
    for _, writer in open_ones:
        writer.close()
    return [_row(verb, found) for verb, found in taken.items()]


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, key: str) -> None:
    head = f"GET /v1/projects/default{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    status = (await reader.readline()).split()[1]
    if status != b"200":
        raise SystemExit(f"GET {path} was answered with {status.decode()}")
    length = 0
    while (line := (await reader.readline()).strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    await reader.readexactly(length)


def _row(verb: str, found: list[float]) -> Row:
    ordered = sorted(found)
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return Row(verb, len(ordered), at[0], at[1], ordered[-1])


if __name__ == "__main__":
    main()
