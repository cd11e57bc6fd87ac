"""Runs of other programs as assets: the model, its history and the available data, each with the import's record.

The record is a blob with the run's format, source, programs and parameters; the digests of the files that were read and
of the resulting assets; and the inputs that are known by name only. Lineages are built from this record.
"""

import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.data.assets import inspect_model
from posttrain.data.catalog import Catalog, inspect_dataset, refuse_name
from posttrain.data.files import data_files
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import InputError, unwritable
from posttrain.domain.ports import BlobStore
from posttrain.domain.records import IMPORTED, Asset
from posttrain.foreign.outside import Named, OutsideRun, Points
from posttrain.store.trees import file_digest, put_files, put_tree, scratch

RECORD = "posttrain.import/1"
COLUMNS = ("run", "stage", "step", "wall_time", "metric", "value")  # columns of a history, as in the Parquet tracker
_NO_LETTER = re.compile(r"[^a-z0-9._-]+")
_DATA, _MODEL = "data set", "base model"


@dataclass(frozen=True, slots=True)
class Imported:
    """The registered assets and the record of an import."""

    assets: tuple[Asset, ...]  # data sets, the history, the model
    record: Mapping[str, Any]
    digest: str  # the digest of the record

    @property
    def unknown(self) -> str:
        """A description of the unknown part of the model's lineage."""
        return begins_at(self.record)

    @property
    def named_only(self) -> list[str]:
        """The inputs that the run names without available bytes, such as `base model Qwen/Qwen3-0.6B`."""
        return [f"{row['role']} {row['name']}" for row in self.record["named"] if "digest" not in row]


def import_run(catalog: Catalog, blobs: BlobStore, cache: Path, run: OutsideRun, name: str | None) -> Imported:
    """Register all outputs of another program's run, or none; a repeated import returns the same versions.

    Args:
        cache: a folder in which the model's files are inspected together.
        name: the name for the model and the history; None: the run's name, reduced to valid characters.

    Raises:
        InputError: the name is invalid, the model is unusable, or there is nothing to register.
        WorkspaceError: the workspace is read-only or full.
    """
    name = name or _name_from(run.source)
    refuse_name("model", name)
    if run.model is None and not len(run.points):
        raise InputError(f"{run.source}: contains neither a model nor a metric; check the path")
    with blobs.holding():
        about, model = _store_model(blobs, cache, run)
        history = {"digest": blobs.put(_parquet(run.points, run.source, run.stage)), **_summary(run.points)}
        named, data = _named(catalog, blobs, run, name)
        record = {**_record(run), "named": named}
        record |= {"history": history} if len(run.points) else {}
        record |= {"model": model} if run.model else {}
        digest = blobs.put(canonical_json(record))
        parents = (*(str(row["digest"]) for row in named if "digest" in row), digest)
        versions = list(data.values())
        if len(run.points):
            meta = {**_summary(run.points), IMPORTED: digest}
            versions.append(catalog.version("history", name, history["digest"], "file", meta, parents))
            parents = (*parents, history["digest"])
        if run.model:
            meta = {**about, IMPORTED: digest}
            versions.append(catalog.version("model", name, model["digest"], "tree", meta, parents))
        return Imported(tuple(catalog.add_together(*versions)), record, digest)


def _record(run: OutsideRun) -> dict[str, Any]:
    """Return the part of the record that does not depend on the registered assets."""
    return {
        "format": RECORD,
        "of": run.format,
        "from": run.source,
        "tools": dict(run.tools),
        "parameters": dict(run.params),
        "withheld": list(run.withheld),
        "read": {key: {"digest": file_digest(p), "size": p.stat().st_size} for key, p in sorted(run.read.items())},
        "left_out": dict(run.left_out),
        "notes": list(run.notes),
    }


def _name_from(source: str) -> str:
    """Return a name reduced to valid characters; raise InputError if no valid character remains."""
    found = _NO_LETTER.sub("-", source.lower()).strip("-._")[:63].rstrip("-._")
    if not found:
        raise InputError(
            f"{source!r} contains no letter a-z and no digit, so no asset name can be made from it; give a name with "
            "--name"
        )
    return found


# --- the model --------------------------------------------------------------------------------------------------------


def _store_model(blobs: BlobStore, cache: Path, run: OutsideRun) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metadata and the stored digest of the run's model; empty maps if the run has no model.

    The model's files are inspected in a folder that contains only links to them.
    """
    if run.model is None:
        return {}, {}
    with scratch(cache, ".import-") as work:
        folder = work / (_NO_LETTER.sub("-", run.source.lower()) or "model")
        try:
            folder.mkdir()
            for name, path in run.model.files.items():
                (folder / name).symlink_to(path)
        except OSError as error:
            raise unwritable(folder, error) from error
        about = inspect_model(folder)
        return about, {"digest": put_tree(blobs, folder, follow_links=True), "place": run.model.place}


# --- data sets --------------------------------------------------------------------------------------------------------


def _named(
    catalog: Catalog, blobs: BlobStore, run: OutsideRun, name: str
) -> tuple[list[dict[str, Any]], dict[str, Asset]]:
    """Return the inputs that the run names, as rows of the record, and digest → new version of available data sets.

    Data sets that are already registered get no new version.
    """
    rows: list[dict[str, Any]] = []
    versions: dict[str, Asset] = {}
    for number, named in enumerate(run.named):
        row: dict[str, Any] = {"role": named.role, "name": named.name, "said": named.said}
        rows.append(row)
        files, meta = _data(named, row)
        if not files:
            continue
        form = "tree" if len(files) > 1 else "file"
        digest = put_files(blobs, files) if form == "tree" else blobs.put_file(*files.values())
        row |= {"digest": digest, "form": form}
        if digest not in versions and not catalog.has("dataset", digest):
            own = _name_from(f"{name[:30]}-{Path(named.name).name.partition('.')[0][:28]}")
            own = f"{own}-{number}" if own in {version.name for version in versions.values()} else own
            versions[digest] = catalog.version("dataset", own, digest, form, meta)
    return rows, versions


def _data(named: Named, row: dict[str, Any]) -> tuple[Mapping[str, Path], dict[str, Any]]:
    """Return the files and metadata of a data set that the run names.

    If the data set is known by name only, both are empty. If its file is unusable, `row` gets the reason.
    """
    if named.role != _DATA or named.path is None:
        return {}, {}
    try:
        files = data_files(named.path)
        return files, inspect_dataset(files)
    except InputError as error:
        row["why"] = " ".join(str(error).split())
        return {}, {}


# --- metrics ----------------------------------------------------------------------------------------------------------


def _summary(points: Points) -> dict[str, Any]:
    steps = points.step
    return {
        "metrics": len(points.names),
        "points": len(points),
        "steps": [min(steps), max(steps)] if steps else [],
        "not_finite": points.strange,
    }


def _parquet(points: Points, run: str, stage: str) -> bytes:
    """Return points as Parquet with the columns of the Parquet tracker; unknown times are null."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    count = len(points)
    times = np.frombuffer(points.at, dtype=np.float64)
    metric = pa.DictionaryArray.from_arrays(
        pa.array(np.asarray(points.metric, dtype=np.int32)), pa.array(points.names, pa.string())
    )
    table = pa.table(
        {
            "run": pa.repeat(pa.scalar(run, pa.string()), count),
            "stage": pa.repeat(pa.scalar(stage, pa.string()), count),
            "step": pa.array(np.asarray(points.step, dtype=np.int64)),
            "wall_time": pa.array(times, mask=np.isnan(times)),
            "metric": metric.cast(pa.string()),
            "value": pa.array(np.asarray(points.value, dtype=np.float64)),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table.select(list(COLUMNS)), sink)
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric in a history: the number of points, the first and last step, and the first, last and extreme values."""

    metric: str
    points: int
    steps: tuple[int, int]
    first: float
    last: float
    least: float
    most: float


def recorded(data: bytes) -> Iterator[tuple[str, Any, Any]]:
    """Yield (metric, steps, values) for each metric of a history, in the order of first recording.

    Steps and values are arrays of shape [points].
    """
    import numpy as np
    import pyarrow.parquet as pq

    # threads may outlive the interpreter
    table = pq.ParquetFile(io.BytesIO(data)).read(["metric", "step", "value"], use_threads=False)
    column = table.column("metric").combine_chunks().dictionary_encode()
    place, names = column.indices.to_numpy(), column.dictionary.to_pylist()
    steps, values = table.column("step").to_numpy(), table.column("value").to_numpy()
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(len(names) + 1))
    for number, name in enumerate(names):
        rows = order[bounds[number] : bounds[number + 1]]
        yield name, steps[rows], values[rows]


def curves(data: bytes) -> Iterator[Curve]:
    """Yield a history's metrics in the order of first recording; minima and maxima are those of the finite values."""
    import numpy as np

    for name, at, own in recorded(data):
        finite = own[np.isfinite(own)]
        low, high = (float(finite.min()), float(finite.max())) if len(finite) else (float("nan"), float("nan"))
        yield Curve(name, len(own), (int(at[0]), int(at[-1])), float(own[0]), float(own[-1]), low, high)


def begins_at(record: Mapping[str, Any]) -> str:
    """Return a description of the unknown part of the lineage."""
    bases = [row["name"] for row in record["named"] if row["role"] == _MODEL and "digest" not in row]
    data = [row for row in record["named"] if row["role"] == _DATA]
    base = f"the origin of {os.fspath(bases[0])}" if bases else "the base model"
    if not data:
        return f"{base}; the training data"
    unseen = any("digest" not in row for row in data)
    return f"{base}; the rows of data sets of which only the name is known" if unseen else base
