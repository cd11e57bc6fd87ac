"""Targets of trackers as their own readers see them, for every back-end."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import pytest

from posttrain.telemetry.tracker import Tracker
from posttrain.telemetry.trackers.csv import CsvTracker
from posttrain.telemetry.trackers.fake import FakeTracker, Target
from posttrain.telemetry.trackers.mlflow import MlflowTracker
from posttrain.telemetry.trackers.parquet import ParquetTracker
from posttrain.telemetry.trackers.tensorboard import TensorBoardTracker
from posttrain.telemetry.trackers.wandb import WandbTracker

Point = tuple[str, str, int, float]  # stage, metric, step, value
RUN = "sort-1"


class Bench(Protocol):
    """One target."""

    def tracker(self) -> Tracker: ...

    def points(self, run: str = RUN) -> list[Point]:
        """Everything that is there, doubled points twice, in the order of writing within a metric."""

    def state(self, run: str = RUN) -> str:
        """How the run ended, as far as the target says; empty: it says nothing of that."""

    def tear(self, run: str = RUN) -> None:
        """Cut the last thing written in the middle, as a kill or a full disk may."""


class FakeBench:
    def __init__(self, folder: Path) -> None:
        self.target = Target()

    def tracker(self) -> Tracker:
        return FakeTracker(self.target)

    def points(self, run: str = RUN) -> list[Point]:
        return list(self.target.points)

    def state(self, run: str = RUN) -> str:
        return self.target.endings[-1] if self.target.endings else ""

    def tear(self, run: str = RUN) -> None:
        self.target.points.pop()


class CsvBench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tracker(self) -> Tracker:
        return CsvTracker(self.folder)

    def points(self, run: str = RUN) -> list[Point]:
        with open(self.folder / f"{run}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["run"] for row in rows} <= {run}
        return [(row["stage"], row["metric"], int(row["step"]), float(row["value"])) for row in rows]

    def state(self, run: str = RUN) -> str:
        return ""

    def tear(self, run: str = RUN) -> None:
        cut(self.folder / f"{run}.csv", 4)


class ParquetBench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tracker(self) -> Tracker:
        return ParquetTracker(self.folder)

    def points(self, run: str = RUN) -> list[Point]:
        import pyarrow.parquet as pq

        rows = pq.read_table(self.folder / f"{run}.parquet").to_pylist()
        return [(row["stage"], row["metric"], row["step"], row["value"]) for row in rows]

    def state(self, run: str = RUN) -> str:
        return ""

    def tear(self, run: str = RUN) -> None:
        """It is replaced as a whole: what a kill leaves is a temporary file."""
        (self.folder / f".{run}.parquet.1.1.tmp").write_bytes(b"PAR1 half")


class TensorBoardBench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tracker(self) -> Tracker:
        return TensorBoardTracker(self.folder)

    def _read(self, run: str) -> Any:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = EventAccumulator(str(self.folder / run), size_guidance={"scalars": 0, "tensors": 0})
        found.Reload()
        return found

    def points(self, run: str = RUN) -> list[Point]:
        read = self._read(run)
        return [
            (*tag.split("/", 1), event.step, event.value)
            for tag in read.Tags()["scalars"]
            for event in read.Scalars(tag)
        ]

    def state(self, run: str = RUN) -> str:
        read = self._read(run)
        if "run/outcome" not in read.Tags()["tensors"]:
            return ""
        return read.Tensors("run/outcome")[-1].tensor_proto.string_val[0].decode().split("**")[1]

    def tear(self, run: str = RUN) -> None:
        cut(*(self.folder / run).glob("events*"), 5)


class MlflowBench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.uri = f"sqlite:///{folder}/mlflow.db"

    def tracker(self) -> Tracker:
        return MlflowTracker(self.uri, "sorting", "sorter")

    def client(self) -> Any:
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def run(self, run: str) -> Any:
        client = self.client()
        experiment = client.get_experiment_by_name("sorting").experiment_id
        (found,) = client.search_runs([experiment], f"tags.`posttrain.run` = '{run}'")
        return found

    def points(self, run: str = RUN) -> list[Point]:
        found = self.run(run)
        return [
            (*key.split("/", 1), point.step, point.value)
            for key in found.data.metrics
            for point in self.client().get_metric_history(found.info.run_id, key)
        ]

    def state(self, run: str = RUN) -> str:
        return str(self.run(run).data.tags.get("posttrain.state", ""))

    def tear(self, run: str = RUN) -> None:
        """A database takes care of itself."""


class MlflowFolderBench(MlflowBench):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.uri = str(folder / "mlruns")

    def client(self) -> Any:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return super().client()

    def tear(self, run: str = RUN) -> None:
        newest = max((self.folder / "mlruns").rglob("metrics/*/*"), key=lambda path: path.stat().st_mtime_ns)
        cut(newest, 3)


class WandbBench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def tracker(self) -> Tracker:
        return WandbTracker(self.folder, "sorting", None, "offline")

    def _records(self, run: str) -> Iterable[Any]:
        from wandb.proto.wandb_internal_pb2 import Record

        from posttrain.foreign.wandb_export import records

        (file,) = (self.folder / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb")
        return map(Record.FromString, records(file))

    def points(self, run: str = RUN) -> list[Point]:
        found = []
        for record in self._records(run):
            assert all(len(item.nested_key) == 1 for item in record.history.item), "wandb nests at a dot"
            items = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            for key, value in items.items():
                stage, _, metric = key.partition("/")
                if metric and metric != "step":
                    found.append((stage.replace(":", "."), metric, items[f"{stage}/step"], float(value)))
        return found

    def state(self, run: str = RUN) -> str:
        states = [
            json.loads(item.value_json)
            for record in self._records(run)
            for item in record.summary.update
            if (item.key or "/".join(item.nested_key)) == "posttrain/state"
        ]
        return states[-1] if states else ""

    def tear(self, run: str = RUN) -> None:
        (file,) = (self.folder / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb")
        cut(file, 3)


BENCHES: dict[str, type[Any]] = {
    "fake": FakeBench,
    "csv": CsvBench,
    "parquet": ParquetBench,
    "tensorboard": TensorBoardBench,
    "mlflow": MlflowBench,
    "mlflow-folder": MlflowFolderBench,
    "wandb": WandbBench,
}
PACKAGED = ("tensorboard", "mlflow", "mlflow-folder", "wandb")


def each(*without: str) -> list[Any]:
    """A parameter for every back-end; those with a package of their own are of the ecosystem."""
    return [
        pytest.param(kind, marks=[pytest.mark.ecosystem] if kind in PACKAGED else [])
        for kind in BENCHES
        if kind not in without
    ]


def cut(path: Path, count: int) -> None:
    """Cut so many bytes off the end of a file."""
    data = path.read_bytes()
    assert len(data) > count
    path.write_bytes(data[:-count])
