"""The examples folder, and the `demo.yaml` in each that says how to play it: no task is hard-coded anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, ValidationError

from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.runspec import Frozen, read_yaml
from posttrain.domain.validation import explain, nearest

DEFAULT = "01-sort"


def _file_or_map(value: Any) -> Any:
    return {"file": value} if isinstance(value, str) else value


class DemoModel(Frozen):
    """The base model: made from nothing by `posttrain asset create`."""

    name: str
    file: str  # parameters, beside demo.yaml


class DemoReward(Frozen):
    """A reward's source; a file name alone is enough."""

    file: str
    entry: str | None = None


class DemoChange(Frozen):
    """A new version of a reward, registered before a run, as its vendor would."""

    reward: str
    file: str


class DemoRun(Frozen):
    """One run of the story."""

    label: str  # A, B, C: the legend of the picture
    say: str  # what happens, for the person who watches
    file: str  # the run file
    before: DemoChange | None = None
    exit: int = 0  # the exit code it must end with


class DemoPlan(Frozen):
    """`demo.yaml`: what to register and which runs to make, in order. Files are named from its folder."""

    title: str
    seed: int = Field(ge=0)
    make_data: str  # a script that takes --seed N --out DIR
    datasets: dict[str, str] = Field(min_length=1)  # asset name → file that the script writes
    model: DemoModel
    rewards: dict[str, Annotated[DemoReward, BeforeValidator(_file_or_map)]]
    channel: str
    runs: tuple[DemoRun, ...] = Field(min_length=1)


def find_example(name: str | None, start: Path | None = None) -> Path:
    """The folder of an example: below `./examples`, else of the checkout that is installed.

    Raises:
        InputError: there is no examples folder.
        NotFoundError: no such example in it.
    """
    here = (start or Path.cwd()) / "examples"
    checkout = Path(__file__).resolve().parents[3] / "examples"
    root = next((folder for folder in (here, checkout) if any(folder.glob("*/demo.yaml"))), None)
    if root is None:
        raise InputError(
            f"demo: no examples in {here}, and an installed package brings none; clone the repository and run it there"
        )
    known = sorted(path.parent.name for path in root.glob("*/demo.yaml"))
    wanted = name or (DEFAULT if DEFAULT in known else known[0])
    found = [folder for folder in known if folder == wanted] or [f for f in known if f.startswith(wanted)]
    if len(found) != 1:
        raise NotFoundError(f"demo: there is no example {wanted!r}{nearest(wanted, known)}; --task takes one of them")
    return root / found[0]


def load_demo(folder: Path) -> DemoPlan:
    """Read an example's `demo.yaml`.

    Raises:
        InputError: an unknown key, a missing one, a file that is not there.
    """
    path = folder / "demo.yaml"
    try:
        plan = DemoPlan.model_validate(read_yaml(path))
    except ValidationError as error:
        raise explain(error, str(path), DemoPlan) from error
    named = [plan.make_data, plan.model.file, *(reward.file for reward in plan.rewards.values())]
    named += [run.file for run in plan.runs] + [run.before.file for run in plan.runs if run.before]
    missing = next((name for name in named if not (folder / name).is_file()), None)
    if missing:
        raise InputError(f"{path}: names {missing!r}, which is not in {folder}; add it")
    return plan
