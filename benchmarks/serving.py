"""Latencies of a server's `get` and `ls` over many connections, measured from each request's intended moment.

    python -m benchmarks.serving [--json FILE] [--runs N] [--seconds N] [--rate N] [--connections N] [--limit N]
                                 [--keep DIR] [--tiny]

It serves a workspace of N runs as the reconciler leaves them (created by `benchmarks.real_runs`), and sends requests at
the given rate over the given number of connections, independent of the answers, so that a server that falls behind is
noticed. The first five seconds, in which the driver starts, do not count. Half of the requests read a run (`get`), half
the newest twenty, or `--limit`, runs (`ls`). Rejected requests (503) are counted and have no latency. Also measured:
bytes of the largest answer, seconds from `posttrain serve` to the first answer, the resident memory of the server's
process when idle and afterwards, the proportional memory of it with its child processes (the driver and the workers of
heavy verbs), and their processor time per request. The targets, at 50 requests a second and 2,000 runs: a p99 of
100 ms, 150 MiB when idle, 1.5 s to the first answer.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from benchmarks.judging import at_most, judge
from benchmarks.real_runs import RUNS, built

SECONDS, RATE, CONNECTIONS, LIMIT = 30.0, 50.0, 50, 20
P99, IDLE, READY = 100.0, 150.0, 1.5  # maxima at that rate and number of runs: milliseconds, MiB, seconds
_PATIENCE = 120.0  # seconds within which a server must answer
_MIB = 2**20
_WARM = 5.0  # seconds that do not count


@dataclass(frozen=True)
class Row:
    """One verb: milliseconds from the intended moment to the last byte."""

    verb: str
    requests: int  # answered requests
    refused: int  # answered with 503
    median: float
    p99: float
    worst: float
    bytes: int  # of the largest answer


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--rate", type=float, default=RATE, help="requests a second, in all")
    parser.add_argument("--connections", type=int, default=CONNECTIONS)
    parser.add_argument("--limit", type=int, default=LIMIT, help="runs of one list")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="make the workspace here, or use the one that is here")
    parser.add_argument("--tiny", action="store_true", help="two runs, a few requests: that it runs, no figures")
    given = parser.parse_args()
    if given.tiny:
        given.runs, given.seconds, given.rate, given.connections = 2, 1.0, 20.0, 4
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.keep or Path(scratch)
        ids = built(folder, given.runs)
        with served(folder) as (port, key, ready, process):
            idle, spent = process.memory_info().rss / _MIB, _spent(process)
            rows = asyncio.run(offered(port, key, ids, given))
            most, spent = process.memory_info().rss / _MIB, _spent(process) - spent
            whole = sum(one.memory_full_info().pss for one in (process, *process.children(recursive=True))) / _MIB
    each = spent / sum(row.requests + row.refused for row in rows) * 1e3
    print(f"{len(ids)} runs, {given.connections} connections, {given.rate:g}/s, lists of {given.limit}")
    print(f"ready after {ready:.2f} s, idle {idle:.0f} MiB, afterwards {most:.0f} MiB, {each:.1f} ms CPU a request")
    print(f"with its child processes {whole:.0f} MiB afterwards")
    print(f"{'verb':6s} {'answered':>8s} {'refused':>8s} {'median':>8s} {'p99':>8s} {'worst':>8s} ms {'bytes':>8s}")
    for row in rows:
        print(
            f"{row.verb:6s} {row.requests:8d} {row.refused:8d} {row.median:8.1f} {row.p99:8.1f} {row.worst:8.1f}    "
            f"{row.bytes:8d}"
        )
    if given.json:
        found = {
            "ready": ready,
            "idle_mib": idle,
            "most_mib": most,
            "whole_mib": whole,
            "cpu_ms": each,
            "rows": [asdict(r) for r in rows],
        }
        given.json.write_text(json.dumps(found, indent=2) + "\n")
    claims = [at_most(f"p99 of {row.verb}", row.p99, P99, " ms") for row in rows]
    claims += [at_most("memory when idle", idle, IDLE, " MiB"), at_most("time to the first answer", ready, READY, " s")]
    judge(claims, full=(len(ids), given.rate, given.limit) == (RUNS, RATE, LIMIT))


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str, float, psutil.Process]]:
    """Start a server for the workspace; yield port, key, seconds until its first answer, process."""
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


def _spent(process: psutil.Process) -> float:
    """Return the processor seconds of the server and its child processes."""
    each = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return float(sum(one.user + one.system for one in each))


async def offered(port: int, key: str, ids: Sequence[str], given: argparse.Namespace) -> list[Row]:
    """Send requests at their moments, each on the next connection; latencies count from these moments."""
    rng = random.Random(1)
    paths: dict[str, Callable[[], str]] = {
        "get": lambda: f"/runs/{rng.choice(ids)}/status",
        "ls": lambda: f"/runs?limit={given.limit}",
    }
    open_ones = [await asyncio.open_connection("127.0.0.1", port) for _ in range(given.connections)]
    locks = [asyncio.Lock() for _ in open_ones]
    taken: dict[str, list[float]] = {verb: [] for verb in paths}
    refused, sizes = dict.fromkeys(paths, 0), dict.fromkeys(paths, 0)
    began = time.perf_counter() + 0.5
    warm = int(given.rate * (_WARM if given.seconds > _WARM else 0.0))

    async def ask(number: int, verb: str, path: str) -> None:
        intended = began + number / given.rate
        await asyncio.sleep(max(0.0, intended - time.perf_counter()))
        place = number % len(open_ones)
        async with locks[place]:
            status, size = await _ask(*open_ones[place], path, key)
        if number < warm:
            return
        if status == http.client.SERVICE_UNAVAILABLE:
            refused[verb] += 1
            return
        taken[verb].append((time.perf_counter() - intended) * 1000)
        sizes[verb] = max(sizes[verb], size)

    verbs = list(paths)
    jobs = [(number, verbs[number % len(verbs)]) for number in range(warm + int(given.rate * given.seconds))]
    await asyncio.gather(*(ask(number, verb, paths[verb]()) for number, verb in jobs))
    for _, writer in open_ones:
        writer.close()
    return [_row(verb, taken[verb], refused[verb], sizes[verb]) for verb in paths]


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str, key: str) -> tuple[int, int]:
    """Send a request; return status and bytes of the answer."""
    head = f"GET /v1/projects/default{path} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n\r\n"
    writer.write(head.encode())
    status = int((await reader.readline()).split()[1])
    if status not in (http.client.OK, http.client.SERVICE_UNAVAILABLE):
        raise SystemExit(f"GET {path} was answered with {status}")
    length = 0
    while (line := (await reader.readline()).strip().lower()) != b"":
        if line.startswith(b"content-length:"):
            length = int(line.partition(b":")[2])
    await reader.readexactly(length)
    return status, length


def _row(verb: str, found: list[float], refused: int, size: int) -> Row:
    ordered = sorted(found) or [float("nan")]
    at = [ordered[min(len(ordered) - 1, int(len(ordered) * share))] for share in (0.5, 0.99)]
    return Row(verb, len(found), refused, at[0], at[1], ordered[-1], size)


if __name__ == "__main__":
    main()
