"""Before anything runs: the data sets of a run, and what is odd about them: repeated rows, suites seen in training.

How many documents a data set of a run file has, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from posttrain.control.deciding import ADDED
from posttrain.control.planning import Count, Planned
from posttrain.control.selecting import dataset_slots, selects
from posttrain.data.contamination import contamination
from posttrain.data.rows import Row, demonstrations, has_answer, prompt_text, repeated_rows
from posttrain.domain.manifest import InputRef
from posttrain.domain.measures import compares, item_id
from posttrain.domain.runspec import RunSpec
from posttrain.preflight.fitting import located, read_dataset
from posttrain.workspace.opened import OpenWorkspace

READ_AT_MOST = 200_000  # rows of one data set that a plan reads to compare prompts


def registered_rows(workspace: OpenWorkspace, ref: InputRef) -> int | None:
    """Rows of a registered data set; None: it is not registered."""
    metas = [asset.meta for asset in workspace.ledger.assets_by_digest(str(ref.digest)) if "rows" in asset.meta]
    return int(metas[0]["rows"]) if metas else None


def counter(workspace: OpenWorkspace, spec: RunSpec, source: Path) -> Count:
    """Counts the data sets of a run file.

    Args:
        source: the file; relative paths in it start at its folder.
    """

    def count(ref: InputRef, word: str, turns: bool) -> int:
        known = None if turns else registered_rows(workspace, ref)
        if known is not None:
            return known
        rows = read_dataset(workspace, ref, spec.data[word], source.parent)
        return sum(map(demonstrations, rows)) if turns else len(rows)

    return count


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a plan knows of one data set."""

    rows: int | None
    read: tuple[Row, ...] | None  # None: too many, or its bytes are elsewhere

    @property
    def items(self) -> int | None:
        """Of a suite: rows that repeat another count once. Rows that were not read are taken to be distinct."""
        return self.rows if self.read is None else len({prompt_text(row) for row in self.read})

    @property
    def ids(self) -> Iterator[str]:
        """Of a suite: the ids of its items; none of rows that were not read."""
        for row in self.read or ():
            answer = row.get("answer")
            yield item_id(prompt_text(row), answer if isinstance(answer, str) else None)

    @property
    def answered(self) -> int | None:
        """Of these the items with an answer to compare with."""
        if self.read is None:
            return self.rows
        return len({prompt_text(row) for row in self.read if has_answer(row)})


def read_datasets(planned: Planned, spec: RunSpec | None, workspace: OpenWorkspace, source: Path) -> dict[str, Dataset]:
    """Digest → data set, for everything that stages work through."""
    found: dict[str, Dataset] = {}
    for stage in planned.manifest.stages:
        probe = [("probe", stage.inputs["probe"])] if selects(stage) else []
        for slot, ref in [*dataset_slots(stage), *probe]:
            if str(ref.digest) not in found:
                word = planned.contracts[stage.name].inputs[slot][1]
                with located(f"{source}: stages.{stage.name}.{slot}"):
                    found[str(ref.digest)] = _dataset(workspace, ref, spec.data[word] if spec else None, source.parent)
    return found


def _dataset(workspace: OpenWorkspace, ref: InputRef, word: str | None, base: Path) -> Dataset:
    rows = registered_rows(workspace, ref)
    if rows is not None and rows > READ_AT_MOST:
        return Dataset(rows, None)
    read = read_dataset(workspace, ref, word, base)
    return Dataset(len(read), tuple(read))


def unanswered(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """One line for every suite of a run file with rows that only a reward scores."""
    for stage in planned.manifest.stages:
        if not stage.measures or stage.name.startswith(ADDED):
            continue
        for slot, ref in dataset_slots(stage):
            data, suite = datasets[str(ref.digest)], slot.removeprefix("suites.")
            if data.items is None or data.answered is None or data.answered == data.items:
                continue
            names = [name for name in planned.contracts[stage.name].metrics if compares(name)]
            mine = [name for name in names if name.rpartition("/")[0] == suite]
            rest = f"of the other {data.answered} only" if data.answered else "not measured"
            told = f"{', '.join(mine)} {'is' if len(mine) == 1 else 'are'} {rest}"
            count = f"{data.items - data.answered} of {data.items} items of {ref.name}"
            yield f"{stage.name}: {count} have no answer to compare with, so {told}"


def wide_steps(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """One line per training stage whose step takes more documents than there are."""
    for stage in planned.manifest.stages:
        length = planned.contracts[stage.name].length if stage.name in planned.contracts else None
        if length is None:
            continue
        ref = stage.inputs[length.slot]
        data = datasets[str(ref.digest)]
        documents = sum(map(demonstrations, data.read)) if length.turns and data.read is not None else data.rows
        if documents is not None and documents < length.per_step:
            yield (
                f"{stage.name}: {length.field} is {length.per_step}, and {ref.name} has {documents} documents, "
                f"so every step takes some of them more than once; lower {length.field}"
            )


def repeated(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """One line per evaluation suite with rows that repeat another."""
    suites = [ref for stage in planned.manifest.stages if stage.measures for _, ref in dataset_slots(stage)]
    for ref in {ref.digest: ref for ref in suites}.values():
        found = datasets[str(ref.digest)]
        if found.rows and found.items is not None and found.items < found.rows:
            yield repeated_rows(ref.name, found.rows, found.items)


def seen_in_training(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """One warning per evaluation suite whose prompts stand in a training set."""
    train: dict[str, InputRef] = {}
    suites: dict[str, InputRef] = {}
    for stage in planned.manifest.stages:
        for _, ref in dataset_slots(stage):
            (suites if stage.measures else train)[str(ref.digest)] = ref
    for digest, suite in suites.items():
        for other, source in train.items():
            known, asked = datasets[other].read, datasets[digest].read
            if known is None or asked is None:
                yield f"{suite.name} was not compared with {source.name}: more than {READ_AT_MOST} rows"
                continue
            report = contamination(known, asked)
            if report.found or report.left:
                little = "; its scores say little about unseen prompts" if report.found else ""
                yield f"{suite.name} against {source.name}: {report}{little}"
