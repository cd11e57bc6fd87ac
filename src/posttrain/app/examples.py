"""The examples in the package. Each has a `demo.yaml` that describes its steps; this code is the same for all."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, Field

from posttrain.domain.errors import InputError, NotFoundError, nearest, unwritable
from posttrain.domain.runspec import read_yaml
from posttrain.domain.validation import Frozen, validated

if TYPE_CHECKING:
    from posttrain.preflight.confinement import Confinement

DEFAULT = "01-sort"
PLAN = "demo.yaml"
_ASSET = ("posttrain", "asset")
_ELSEWHERE = re.compile(r"(\.\./[\w-]+)/([\w.-]+)")  # a file of another example
OWN = Path(__file__).resolve().parents[1] / "examples"


def _file_or_map(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


class DemoModel(Frozen):
    """The base model, which `posttrain asset create` makes with random weights."""

    name: str
    file: str  # the model's parameters; the file is next to demo.yaml


class DemoReward(Frozen):
    """A reward's source; demo.yaml may give the file name alone."""

    file: str
    entry: str | None = None


class DemoChange(Frozen):
    """A new version of a reward, registered before a run, as if the reward's vendor had released it."""

    reward: str
    file: str


class DemoRun(Frozen):
    """One run of the demo (`demo.yaml`)."""

    label: str  # A, B or C, as in the picture's legend
    say: str  # a description for the person who watches
    file: str  # the run file
    before: DemoChange | None = None
    exit: int = 0  # the exit code with which the run must end


class DemoPlan(Frozen):
    """The file `demo.yaml`: the assets to register and the runs to make, in order.

    File names are relative to the file's folder.
    """

    title: str
    seed: int = Field(ge=0)
    make_data: str  # a script that takes --seed N --out DIR
    datasets: dict[str, str] = Field(min_length=1)  # asset name → file that the script writes
    model: DemoModel
    rewards: dict[str, Annotated[DemoReward, BeforeValidator(_file_or_map)]]
    channel: str
    runs: tuple[DemoRun, ...] = Field(min_length=1)


def find_example(name: str | None, start: Path | None = None) -> Path:
    """Return the folder of an example: a folder below `./examples` if it exists, else the folder in the package.

    Raises:
        NotFoundError: there is no such example.
    """
    found = {folder.name: folder for folder in examples(start)}
    wanted = name or (DEFAULT if DEFAULT in found else next(iter(found)))
    fitting = [wanted] if wanted in found else [other for other in found if other.startswith(wanted)]
    if len(fitting) != 1:
        raise NotFoundError(f"there is no example {wanted!r}{nearest(wanted, found)}; posttrain examples lists them")
    return found[fitting[0]]


def examples(start: Path | None = None) -> list[Path]:
    """Return the folders of all examples, by name: those below `./examples`, or else those in the package."""
    here = (start or Path.cwd()) / "examples"
    found = (sorted(path.parent for path in root.glob(f"*/{PLAN}")) for root in (here, OWN))
    return next(filter(None, found), [])


def copy_example(folder: Path, target: Path) -> list[str]:
    """Copy an example, and the files of other examples that it names, into a new folder, which is self-contained.

    Returns:
        The names of the files in the new folder.

    Raises:
        InputError: `target` exists, the example is broken, or two files would have the same name.
        WorkspaceError: `target` cannot be written.
    """
    load_demo(folder)  # before anything is written
    files = {path.name: path for path in sorted(folder.iterdir()) if path.is_file()}
    words = (folder / PLAN).read_text(encoding="utf-8")
    for place, name in _ELSEWHERE.findall(words):
        if files.setdefault(name, folder / place / name) != folder / place / name:
            raise InputError(
                f"{folder / PLAN}: {place}/{name} has the same name as another file; rename one of the two files"
            )
    try:
        target.mkdir(parents=True)
        for name, path in files.items():
            shutil.copyfile(path, target / name)
        (target / PLAN).write_text(_ELSEWHERE.sub(r"\2", words), encoding="utf-8")
    except FileExistsError as error:
        raise InputError(f"{target}: must not exist yet; name another folder") from error
    except OSError as error:
        raise unwritable(target, error) from error
    return sorted(files)


def preparation(plan: DemoPlan, place: str, seed: int) -> list[list[str]]:
    """Return the commands that follow `posttrain init`: they make the data and register the assets.

    Args:
        place: the path of the example's folder, as the commands contain it.
    """
    return [
        ["python", f"{place}/{plan.make_data}", "--seed", str(seed), "--out", "data"],
        [*_ASSET, "create", f"model:{plan.model.name}", f"{place}/{plan.model.file}", "--seed", str(seed)],
        *([*_ASSET, "add", f"dataset:{name}", f"data/{file}"] for name, file in plan.datasets.items()),
        *(
            [*_ASSET, "add", f"reward:{name}", f"{place}/{it.file}", *(["--entry", it.entry] if it.entry else [])]
            for name, it in plan.rewards.items()
        ),
    ]


def load_demo(folder: Path) -> DemoPlan:
    """Read an example's `demo.yaml`.

    Raises:
        InputError: a key is unknown or missing, or a file is missing.
    """
    path = folder / PLAN
    plan = validated(DemoPlan, read_yaml(path), str(path))
    named = (
        *(plan.make_data, plan.model.file),
        *(reward.file for reward in plan.rewards.values()),
        *(run.file for run in plan.runs),
        *(run.before.file for run in plan.runs if run.before),
    )
    missing = next((name for name in named if not (folder / name).is_file()), None)
    if missing:
        raise InputError(f"{path}: names {missing!r}, which is not in {folder}; add it")
    return plan


def confined() -> Confinement:
    """Return how far this machine confines rewards."""
    from posttrain.preflight.confinement import confinement

    return confinement()


def overlaid(folder: Path, runs: list[tuple[str, str]], picture: Path, title: str) -> Path:
    """Draw the curves of several runs of a folder's workspace into one picture; return the picture's path.

    Args:
        runs: the label and the id of each run.
    """
    from posttrain.app.workspace import open_workspace
    from posttrain.views.report import overlay

    workspace = open_workspace(folder)
    try:
        return overlay(workspace, runs, picture, title)
    finally:
        workspace.close()
