"""Harnesses: lm-eval and Inspect, programs that measure a served model on their tasks.

`posttrain harness fetch` puts a harness with its packages and the data of its tasks into one folder, which is
registered as an asset. The folder has these files::

    harness.json   the facts: program, version, packages with the digests of their archives, tasks, Python, platform
    site.tar       the installed packages
    tasks/         the files of tasks that the harness itself does not have
    data/          the tasks' data sets, as the cache of Hugging Face's libraries

The facts name each task's metrics, so a plan can check gates before any program runs.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from posttrain.domain.errors import InputError, nearest
from posttrain.domain.jobs import MOST_NUMBER
from posttrain.domain.kinds import RATE, SHARE, ItemRange

LM_EVAL, INSPECT = "lm-eval", "inspect"
PROGRAMS = (LM_EVAL, INSPECT)
FACTS, PACKAGES, TASKS, DATA = "harness.json", "site.tar", "tasks", "data"  # in the folder
SITE = "site-packages"  # the folder of installed packages: Inspect finds tasks of packages only below such a name
_NAME = re.compile(r"(?!-)[^\s,={}\"'\\]{1,200}")  # one word of a command line
_METRIC = re.compile(r"[^\s={}\"'\\]{1,200}")  # a metric with its filter, after a comma
_LONGEST = 200  # characters
SCHEMA = 1
# aggregations; letters: the mean of correct, partial and incorrect answers; unknown: of a scorer with any values
MEANS = MEAN, LETTERS, UNKNOWN = "mean", "letters", "unknown"
RATES = ("acc", "acc_norm", "acc_mutual_info", "acc_bytes", "exact_match")  # of lm-eval: 0 or 1 for each document


@dataclass(frozen=True, slots=True)
class Task:
    """A task of a harness."""

    version: str
    documents: int
    metrics: Mapping[str, str]  # metric of a document → how the harness aggregates it
    source: str = ""  # what the harness calls it on its command line; "": its name

    def checked(self) -> Task:
        """Return this instance if its fields are such values, which another program wrote.

        Raises:
            TypeError, ValueError, AttributeError: they are not.
        """
        if type(self.documents) is not int or not 0 < self.documents < MOST_NUMBER:
            raise ValueError(f"documents {self.documents!r:.40}")
        for word in (self.source or "-", self.version, *self.metrics.values()):
            if not isinstance(word, str) or len(word) > _LONGEST:
                raise TypeError(f"{word!r:.40}")
        for metric in self.metrics:
            _named(metric, _METRIC)
        _named(self.source or "its-name")
        return self


@dataclass(frozen=True, slots=True)
class Harness:
    """The facts of a harness."""

    program: str  # one of PROGRAMS
    version: str
    python: str  # version and platform for which the packages were installed
    packages: Mapping[str, Sequence[str]]  # name → version, digest of the archive
    tasks: Mapping[str, Task]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name → its tasks
    schema: int = SCHEMA

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Any, place: str) -> Harness:
        """Return the inverse of `to_json`.

        Args:
            place: where the facts are, for errors.

        Raises:
            InputError: the facts are not those of a harness, or of another schema.
        """
        try:
            if value["schema"] != SCHEMA or value["program"] not in PROGRAMS:
                raise ValueError(f"schema {value['schema']!r:.20} and program {value['program']!r:.40}")
            tasks = {_named(name): Task(**task).checked() for name, task in value["tasks"].items()}
            groups = {_named(name): [*members] for name, members in value["groups"].items()}
            packages = {str(name): (str(version), str(digest)) for name, (version, digest) in value["packages"].items()}
            if not tasks or any(member not in tasks for members in groups.values() for member in members):
                raise ValueError("no task, or a group of unknown tasks")
            program, version, python = _named(value["program"]), _named(value["version"]), str(value["python"])
            return cls(program, version, python, packages, tasks, groups)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{place}: must have the facts of a harness, got {type(error).__name__}: {error!s:.100}; make the "
                "folder with posttrain harness fetch"
            ) from error

    def chosen(self, tasks: Sequence[str]) -> dict[str, Task]:
        """Return the tasks of these names, each a task or a group; of no names: all tasks.

        Raises:
            InputError: a name is unknown.
        """
        known: dict[str, Sequence[str]] = {**{name: (name,) for name in self.tasks}, **self.groups}
        for name, task in self.tasks.items():  # as the command line of Inspect names it, or all tasks of a file
            for word in {task.source, task.source.partition("@")[0]} - {"", name}:
                known[word] = [*known.get(word, ()), name]
        other = next((name for name in tasks if name not in known), None)
        if other is not None:
            raise InputError(
                f"tasks: {other!r} was not fetched{nearest(other, known)}; name one of {', '.join(sorted(known))}, or "
                "fetch it with posttrain harness fetch"
            )
        found = [one for name in dict.fromkeys(tasks) for one in known[name]] or [*self.tasks]
        twice = next((one for one in found if found.count(one) > 1), None)
        if twice is not None:
            raise InputError(f"tasks: {twice!r} is in two of {', '.join(tasks)}; leave one of them out")
        return {one: self.tasks[one] for one in found}

    def aggregations(self, tasks: Sequence[str]) -> dict[str, str]:
        """Return the metrics of tasks → how each is aggregated; those in `MEANS` have a value for each item."""
        chosen = self.chosen(tasks).items()
        return {f"{name}/{metric}": how for name, task in chosen for metric, how in task.metrics.items()}

    def metrics(self, tasks: Sequence[str], ranges: Mapping[str, tuple[float, float]]) -> dict[str, ItemRange | None]:
        """Return the metrics of tasks → the range of an item's value; None: no gate can judge the metric.

        Args:
            ranges: the ranges of metrics that the harness does not declare.

        Raises:
            InputError: a task is unknown, or a range is of no metric that is a mean of items.
        """
        measured = self.aggregations(tasks)
        found = {metric: self._range(metric, aggregation) for metric, aggregation in measured.items()}
        for metric, ends in ranges.items():
            part = next((one for one in measured if metric.startswith(f"{one}/")), metric)
            if part not in measured or (part != metric and measured[part] != UNKNOWN):
                raise InputError(f"ranges: {metric!r} is no metric of these tasks{nearest(metric, found)}; correct it")
            if measured[part] not in MEANS:
                raise InputError(
                    f"ranges: {metric!r} is not the mean of one value per item (aggregation: {measured[part]}), so no "
                    "gate can judge it; leave it out"
                )
            if found.get(metric) is not None and tuple(ends) != (0.0, 1.0):
                raise InputError(
                    f"ranges: {metric!r} is declared as 0 to 1, got {ends[0]:g} to {ends[1]:g}; leave it out"
                )
            found[metric] = ItemRange(*ends)
        return found

    def documents(self, tasks: Sequence[str], limit: int | None) -> dict[str, int]:
        """Return task → the number of documents that a stage measures."""
        return {name: min(limit or one.documents, one.documents) for name, one in self.chosen(tasks).items()}

    def refuse_foreign(self, params: Mapping[str, Any]) -> None:
        """Refuse parameters of a stage that only the other program reads.

        Raises:
            InputError: there is one.
        """
        foreign = {LM_EVAL: ("temperature",), INSPECT: ("chat", "add_bos_token", "num_fewshot")}[self.program]
        odd = next((name for name in foreign if params.get(name)), None)
        if odd is not None:
            raise InputError(f"{odd}: {self.program} does not read it, got {params[odd]!r}; leave it out")

    def _range(self, metric: str, aggregation: str) -> ItemRange | None:
        rate = self.program == LM_EVAL and metric.rpartition("/")[2].partition(",")[0] in RATES
        return {MEAN: RATE if rate else None, LETTERS: SHARE}.get(aggregation)


def _named(word: Any, form: re.Pattern[str] = _NAME) -> str:
    if not isinstance(word, str) or not form.fullmatch(word):
        raise ValueError(f"a name must be one word of a command line, got {word!r:.60}")
    return word


def read_facts(data: bytes, place: str) -> Harness:
    """Return the facts in `harness.json`.

    Raises:
        InputError: the bytes are not such facts.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: is not JSON: {error!s:.100}; make it with posttrain harness fetch") from error
    return Harness.from_json(value, place)


def this_python() -> str:
    """Return version and platform of this interpreter: `3.11 linux-x86_64`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {sys.platform}-{platform.machine()}"
