"""Checks, with the packages of TensorBoard, MLflow and W&B, that each has every point of a run exactly once.

python check_trackers.py RUN FOLDER    # FOLDER: .posttrain/tracking
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

Place = tuple[str, int]  # stage/metric, step


def main(run: str, folder: Path) -> None:
    points = Counter(of_csv(folder / "csv" / f"{run}.csv"))
    steps = {step for name, step in points if name == "grpo/reward/mean"}
    if steps != set(range(1, 81)) or max(points.values()) > 1:
        sys.exit(f"csv: must have steps 1 to 80 once each, got {sorted(steps)}")
    for name, found in (("tensorboard", of_tensorboard), ("mlflow", of_mlflow), ("wandb", of_wandb)):
        shown = Counter(found(folder, run))
        twice = [place for place, count in shown.items() if count > 1]
        lacking, more = points.keys() - shown.keys(), shown.keys() - points.keys()
        if twice or lacking or more:
            sys.exit(f"{name}: doubled {twice[:3]}, missing {sorted(lacking)[:3]}, unknown {sorted(more)[:3]}")
        print(f"{name}: {len(shown)} points of {len({place[0] for place in shown})} metrics, each once")


def of_csv(path: Path) -> Iterator[Place]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            yield f"{row['stage']}/{row['metric']}", int(row["step"])


def of_tensorboard(folder: Path, run: str) -> Iterator[Place]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard" / run), size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    for tag in found.Tags()["scalars"]:
        yield from ((tag, event.step) for event in found.Scalars(tag))


def of_mlflow(folder: Path, run: str) -> Iterator[Place]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiments = [one.experiment_id for one in client.search_experiments()]
    (found,) = client.search_runs(experiments, f"tags.`posttrain.run` = '{run}'")
    for key in found.data.metrics:
        yield from ((key, point.step) for point in client.get_metric_history(found.info.run_id, key))


def of_wandb(folder: Path, run: str) -> Iterator[Place]:
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = (folder / "wandb").glob(f"**/offline-run-*-{run}/run-{run}.wandb")
    for data in records(file.read_bytes()):
        items = {
            i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in Record.FromString(data).history.item
        }
        for key in items:
            stage, _, metric = key.partition("/")
            if metric and metric != "step":
                yield f"{stage.replace(':', '.')}/{metric}", items[f"{stage}/step"]  # W&B nests at a dot


def records(log: bytes) -> Iterator[bytes]:
    """Yield the records of a .wandb file: LevelDB's log format after a header of seven bytes.

    A block has 32 KiB. A part of a record has a checksum (4 bytes), a length (2) and a type: whole, first, middle or
    last.
    """
    block, place, record = 32768, 7, b""
    while place + 7 <= len(log):
        if block - place % block < 7:  # a header does not fit: zeros
            place += block - place % block
            continue
        size, kind = int.from_bytes(log[place + 4 : place + 6], "little"), log[place + 6]
        record += log[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
