"""The time to stage and to adopt a checkpoint, compared with a copy of its files on the same disk.

    python -m benchmarks.staging [--mib N] [--rounds N] [--json FILE] [--tiny]

A checkpoint of one file of N MiB is left by a job, staged by its agent's uploads in a store on the same disk, and
adopted by the collector. Rounds are interleaved; figures are medians over rounds, in MiB per second:

- `copy`: the file is copied and synced, the limit of any transfer on one disk;
- `hash`: one SHA-256 of the file;
- `stage`: parts are hashed, written and synced, beside a hash of the whole file;
- `adopt`: parts are hashed again and composed into an artifact.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from posttrain.store.attempts import mailbox_at
from posttrain.store.blobs import open_blobs
from posttrain.store.staging import StagedAttempt, StoredParts, Uploads
from posttrain.store.trees import file_digest

MIB, ROUNDS = 512, 5
NAME = "bench-train-1"


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def copied(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    with target.open("rb") as file:
        os.fsync(file.fileno())


def one_round(folder: Path, mib: int, seed: int) -> dict[str, float]:
    """Return the seconds of each way; every round has fresh bytes and a fresh store."""
    left, mail, store = folder / "left", folder / "mail", (folder / "store").as_uri()
    left.mkdir(parents=True)
    rng = random.Random(seed)
    with (left / "model.safetensors").open("wb") as file:
        for _ in range(mib):
            file.write(rng.randbytes(1 << 20))
    mailbox, blobs = mailbox_at(mail.as_uri()), open_blobs(store)
    uploads = Uploads(StoredParts(store, NAME), mailbox, 0)
    attempt = StagedAttempt(folder / "attempt", mail.as_uri(), NAME, store)
    source = left / "model.safetensors"
    found = {
        "copy": timed(lambda: copied(source, folder / "copy")),
        "hash": timed(lambda: file_digest(source)),
        "stage": timed(lambda: uploads.checkpoint(1, 0, left)),
        "adopt": timed(lambda: attempt.store_checkpoint(blobs, 1)),
    }
    uploads.close()
    return found


def main() -> None:
    """Print a line for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=MIB)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true", help="one round of a few MiB, to see that it runs")
    words = parser.parse_args()
    mib, rounds = (8, 1) if words.tiny else (words.mib, words.rounds)
    seconds = []
    for seed in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            seconds.append(one_round(Path(folder), mib, seed))
    print(f"{'way':<8} {'MiB/s':>7} {'(min-max)':>15} {'of the copy':>12}")
    rows = []
    for way in seconds[0]:
        rates = sorted(mib / one[way] for one in seconds)
        share = statistics.median(one["copy"] / one[way] for one in seconds)
        rows.append({"way": way, "rate": statistics.median(rates), "low": rates[0], "high": rates[-1], "share": share})
        print(f"{way:<8} {rows[-1]['rate']:>7.0f} {f'({rates[0]:.0f}-{rates[-1]:.0f})':>15} {share:>11.2f}x")
    if words.json:
        words.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
