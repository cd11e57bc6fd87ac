"""The file, function and dialect of a reward: determined identically at registration and at run time.

This module handles names only; the caller has the files and the functions. `DIALECTS` is the single table of calling
conventions: `plan` checks a parsed signature against the table without executing code, and the worker
(`sandbox.dialects`) calls functions by it.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from posttrain.domain.errors import InputError

CONVENTIONAL_FILE = "reward.py"
CONVENTIONAL_ENTRIES = ("score", "compute_score")
NO_COLUMNS = ("prompt", "completion", "completions", "messages")  # columns that a dialect passes in another form
_IDS = ("prompt_ids", "completion_ids")
TURNS = "turns"  # the argument with the policy's turns; a column with this name takes precedence
_OWN = ("prompt", "completion", "response", "row", TURNS, *_IDS)


@dataclass(frozen=True, slots=True)
class Dialect:
    """The arguments that a function of one convention gets by name."""

    offers: tuple[str, ...]
    columns: bool  # whether the function also gets the row's columns
    batched: bool  # whether one call gets all completions, as lists


AUTO = "auto"  # determine the dialect by the parameter names
DIALECTS: Mapping[str, Dialect] = {
    "trl": Dialect(("prompts", "completions", TURNS, *_IDS, "trainer_state", "log_extra", "log_metric"), True, True),
    "openrlhf": Dialect(("queries", "prompts", "labels"), False, True),
    "verl_batch": Dialect(("data_sources", "solution_strs", "ground_truths", "extra_infos"), False, True),
    "row": Dialect(_OWN, True, False),
    "areal": Dialect((*_OWN, "completions"), True, False),
    "verifiers": Dialect((*_OWN, "answer", "info", "task", "parser", "state"), True, False),
    "verl": Dialect(("data_source", "solution_str", "ground_truth", "extra_info"), False, False),
    "slime": Dialect(("args", "sample"), False, False),
}
_TELLING = (  # parameter names → the dialect of a function that has all of them; the first match counts
    ({"solution_str"}, "verl"),
    ({"solution_strs"}, "verl_batch"),
    ({"queries"}, "openrlhf"),
    ({"args", "sample"}, "slime"),
    ({"completions", "prompt"}, "areal"),
    ({"completions"}, "trl"),
    ({"prompts"}, "trl"),
    *(({name}, "verifiers") for name in ("state", "parser", "task", "info")),
    *(({name}, "row") for name in ("completion", "response", TURNS)),
)


@dataclass(frozen=True, slots=True)
class Called:
    """A run file's choice of a reward's function and dialect."""

    entry: str | None = None  # `function` or `file.py:function`; None: the registered or the default function
    dialect: str | None = None  # None: the registered dialect, or determined by the parameters

    def __bool__(self) -> bool:
        return self.entry is not None or self.dialect is not None


AS_FOUND = Called()


JUDGES = "rewards."  # prefix of a suite's name in the slot of its reward


def scored_slot(slot: str) -> str:
    """Return the slot of the data set whose rows a slot's reward reads: `data`, or a suite's slot."""
    suite = slot.partition(":")[0]
    return f"suites.{suite.removeprefix(JUDGES)}" if suite.startswith(JUDGES) else "data"


MODEL_PARTS = ("URL", "MODEL", "KEY")  # what a reward's code gets about a model that it may call


def model_variable(name: str, part: str) -> str:
    """Return the variable with a part of what a reward's code gets about a model: `POSTTRAIN_JUDGE_URL`."""
    return f"POSTTRAIN_{name.upper()}_{part}"


def reward_slots(slot: str, reward: str | Mapping[str, float] | None) -> dict[str, tuple[str, str]]:
    """Return the inputs of a stage's reward: slot → ("reward", its name under `rewards`).

    A single reward uses the slot itself; with weights, each reward has a separate slot such as `reward:right`.
    """
    if not reward:
        return {}
    if isinstance(reward, str):
        return {slot: ("reward", reward)}
    return {f"{slot}:{name}": ("reward", name) for name in sorted(reward)}


class SignatureError(Exception):
    """The function has a parameter that no call provides; the message names it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a reward function."""

    names: tuple[str, ...]  # parameters that can be passed by name, in order
    required: tuple[str, ...] = ()  # those without a default
    takes_all: str = ""  # the name of its **kwargs
    nameless: tuple[str, ...] = ()  # positional-only parameters

    def words(self) -> list[str]:
        """Return the parameters as written in Python."""
        return [*self.names, *([f"**{self.takes_all}"] if self.takes_all else [])]


def detect(signature: Signature) -> str:
    """Return the dialect of a function with these parameters.

    Raises:
        SignatureError: no known dialect has these names, or a parameter is positional-only.
    """
    refuse_nameless(signature)
    names = set(signature.names)
    dialect = next((dialect for told, dialect in _TELLING if told <= names), None)
    if dialect is not None:
        return dialect
    raise SignatureError(
        f"parameters ({', '.join(signature.words())}) match no known dialect; call the parameter for the response "
        "`completion`, or set the reward's dialect, in run.yaml (dialect:) or at registration (asset add --dialect "
        f"{'|'.join(DIALECTS)})"
    )


def refuse_nameless(signature: Signature) -> None:
    """Raise SignatureError for a positional-only parameter."""
    for name in signature.nameless:
        raise SignatureError(f"parameter {name!r} is positional-only; parameters are given by name")


def refuse_missing(signature: Signature, dialect: str, columns: Collection[str]) -> None:
    """Check a function's required parameters against its dialect and the rows' columns.

    Raises:
        SignatureError: neither provides a parameter that has no default.
    """
    given = DIALECTS[dialect]
    known = {*given.offers, *(c for c in columns if c not in NO_COLUMNS)} if given.columns else set(given.offers)
    for name in signature.required:
        if name not in known:
            raise SignatureError(not_offered(name, known))


def not_offered(name: str, known: Iterable[str]) -> str:
    """Return the error for a parameter that is not provided."""
    listed = ", ".join(sorted(known))
    return f"parameter {name!r} is neither a column of the data set nor part of the call; known: {listed}"


def source_name(files: Collection[str], wanted: str, folder: str) -> str:
    """Return the Python file of a reward's folder: the requested one, `reward.py`, or the only one.

    Args:
        files: Python files at the top of the folder.
        wanted: the requested file; empty: unspecified.
        folder: the folder's name, for the error.

    Raises:
        InputError: the file does not exist, or there are several files and none is called `reward.py`.
    """
    only = next(iter(files)) if len(files) == 1 else ""
    chosen = wanted or (CONVENTIONAL_FILE if CONVENTIONAL_FILE in files else only)
    if chosen not in files:
        missing = repr(wanted) if wanted else f"`{CONVENTIONAL_FILE}` or a single Python file"
        remedy = f"; name one with --entry {min(files)}:FUNCTION, or in run.yaml with entry:" if files else ""
        raise InputError(
            f"reward folder {folder} must contain {missing}, got {', '.join(sorted(files)) or 'none'}{remedy}"
        )
    return chosen


def entry_name(functions: Iterable[str], source: str, rubrics: Iterable[str] = (), bound: Collection[str] = ()) -> str:
    """Return the default entry of a reward's source: `score`, `compute_score`, a rubric, or the only public function.

    Args:
        functions: functions that the file defines.
        source: the file's name, for the error.
        rubrics: names of verifiers' rubrics that the file creates.
        bound: names that the file imports or assigns.

    Raises:
        InputError: the file has none of these, or several public functions.
    """
    public = [name for name in functions if not name.startswith("_")]
    conventional = [name for name in CONVENTIONAL_ENTRIES if name in public or name in bound]
    made = [name for name in rubrics if not name.startswith("_")]
    single = made if len(made) == 1 else public if len(public) == 1 else []
    entry = (conventional or single or [""])[0]
    if not entry:
        defined = ", ".join(public) or "none"
        remedy = f"; name the function with --entry {public[0]}, or in run.yaml with entry:" if public else ""
        raise InputError(
            f"{source} must define a function `score`, or one public function; it defines {defined}{remedy}"
        )
    return entry
