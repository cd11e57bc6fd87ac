"""`python -m posttrain.sandbox.probe`: prints whether this machine confines rewards, as one JSON object.

The object is, for example, `{"whole": true, "notes": []}`. For the test, a worker is started and confined like a
reward's worker, without running any user code. Exit code 1 means that the test itself failed, without a result about
the machine.

With the argument `imports`, the program imports rewards and dataflows, each in a separate cell, and prints a JSON list
with one text for each: an error line if the code cannot be imported, and otherwise an empty text. Standard input
contains `asked`, a list of `{"name", "place", "entry", "dialect", "source", "network", "secrets", "files", "recipe",
"turns"}`, where a place is a path and a secret the name of a variable, and `hidden`, folders that are empty in the
cells.
"""

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.rewards import MODEL_PARTS, model_variable
from posttrain.sandbox.port import RewardError
from posttrain.sandbox.process import LOAD_TIMEOUT, open_reward
from posttrain.sandbox.protocol import Fault
from posttrain.sandbox.session import EndedError, LateError, NotConfinedError, Provision, Session, lay_out

_RECIPE_TIMEOUT = 120.0  # seconds; importing the engine takes long


def main() -> int:
    """Print the result of the test, or of the imports."""
    if sys.argv[1:] == ["imports"]:
        given = json.load(sys.stdin)
        hidden = [Path(folder) for folder in given["hidden"]]
        print(json.dumps([_imported(one, hidden) for one in given["asked"]]))
        return 0
    with tempfile.TemporaryDirectory(prefix="posttrain-reward-") as scratch:
        source = Path(scratch, "reward.py")
        source.touch()
        try:
            session = _session(source, scratch, [])
        except (NotConfinedError, EndedError) as error:
            print(error, file=sys.stderr)
            return 1
        session.close()
        print(json.dumps({"whole": session.confined, "notes": session.notes}))
    return 0


def _session(source: Path, scratch: str, hidden: list[Path]) -> Session:
    place = Path(scratch, "cell")
    place.mkdir()
    return Session(lay_out(place, source, source.name, whole=False, hidden=hidden, provision=Provision({})))


def _imported(asked: Mapping[str, Any], hidden: list[Path]) -> str:
    """Return one line on why the code cannot be imported, or an empty text; limits of the cell are not a reason."""
    place = Path(asked["place"])
    try:
        if asked["recipe"]:
            return _recipe(place, asked["entry"], asked["turns"], hidden)
        secrets = {name: os.environ[name] for name in asked["secrets"]}
        files = {name: Path(path) for name, path in asked["files"].items()}
        # no model is served while the code is only imported
        parts = [(name, part) for name in asked["models"] for part in MODEL_PARTS]
        variables = {model_variable(name, part): "http://127.0.0.1:9/v1" for name, part in parts}
        open_reward(
            place,
            asked["entry"],
            timeout=LOAD_TIMEOUT,
            dialect=asked["dialect"],
            name=asked["name"],
            source=asked["source"],
            hidden=hidden,
            provision=Provision(files, tuple(asked["network"]), secrets, variables),
            confined=True,
        ).close()
    except (InputError, RewardError) as error:
        return str(error)
    return ""


def _recipe(place: Path, entry: str, turns: int, hidden: list[Path]) -> str:
    with tempfile.TemporaryDirectory(prefix="posttrain-reward-") as scratch:
        session = _session(place, scratch, hidden)
        try:
            order = {"op": "import", "file": place.name, "entry": entry, "turns": turns}
            answer = next(session.ask(order, _RECIPE_TIMEOUT))
        except (EndedError, LateError):  # the cell has less memory and time than the job that imports it
            return ""
        finally:
            session.close()
    return f"recipe {answer.message}" if isinstance(answer, Fault) and answer.kind != "memory" else ""


if __name__ == "__main__":
    sys.exit(main())
