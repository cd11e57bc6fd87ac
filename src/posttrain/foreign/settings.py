"""Settings in the files of other trainers, by dotted names, and drafts of the run files that result from them.

Settings are read from YAML, shell commands and Python. A Python script is parsed, never executed: a computed value is
not a setting. A `Draft` is an unfinished run file with the notes to report about it.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from posttrain.domain.errors import InputError
from posttrain.domain.rendering import stop_fault
from posttrain.foreign.outside import flat

_OVERRIDE = re.compile(r"^\+{0,2}([a-z_][\w.]*)=(.*)$", re.DOTALL)
# a line that only sets a variable; a variable before a command on the same line is set for that command only
_ASSIGNED = re.compile(
    r"""^[ \t]*(?:export\s+)?([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^\s;&|]*)[ \t]*(?:#.*)?$""", re.MULTILINE
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|\$([A-Za-z_]\w*)")
_MOST_BYTES = 4 * 2**20
_ASKED_FOR = ("args", "model", "reward_funcs", "train_dataset", "dataset_name")  # values that a person must fill in
_FUNCTIONS = ("reward_funcs", "reward_func")  # settings in which a name is a function, not a value
_PARTS = ("LoraConfig", "BitsAndBytesConfig", "GenerationConfig")  # arguments of these classes are reported as a whole
_LOADED = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split", "data_files": "data_files"}
_TRAINED = "model args data_collator train_dataset eval_dataset processing_class"
_REWARDED = "model reward_funcs args train_dataset eval_dataset processing_class"
PLACES = {  # class → its first parameters, in the order in TRL 1.16; other positional arguments are reported
    "SFTTrainer": f"{_TRAINED} compute_loss_func compute_metrics callbacks optimizers",
    "RewardTrainer": f"{_TRAINED} compute_metrics callbacks optimizers",
    **dict.fromkeys(
        ("DPOTrainer", "KTOTrainer"),
        f"{_TRAINED.replace('model', 'model ref_model')} compute_metrics callbacks optimizers",
    ),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), f"{_REWARDED} reward_processing_classes callbacks optimizers"),
}
_IN_PLACE = ("update", "setdefault", "pop", "append")
_READ = ("Config", "Arguments", "Trainer", "from_pretrained", "load_dataset")  # calls whose arguments are settings
_DEEP = 8  # maximum length of a chain of names bound to names
_ABSENT: tuple[Any, ...] = (False, [], {}, "")  # values that have no effect
# values that keep the whole distribution, as Posttrain does when it samples for training
WHOLE = {"top_p": (1,), "top_k": (0, -1), "min_p": (0,), "repetition_penalty": (1,)}


@dataclass(slots=True)
class Settings:
    """The settings in a file; `take` marks a setting as read, and `left` returns the unread settings."""

    source: str  # the file's name, for messages
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)  # notes about effects of the file that are not converted
    unknown: dict[str, str] = field(default_factory=dict)  # setting → expression with an unknown value
    words: tuple[str, ...] = ()  # names of programs, classes and subcommands in the file: `trl`, `grpo`, `GRPOTrainer`
    starts: bool = True  # whether importing the file would train
    taken: set[str] = field(default_factory=set)

    def here(self, name: str) -> str | None:
        """Return the path of a local file or folder that the source names; None if it does not exist."""
        for folder in (Path(), Path(self.source).parent):
            if name and (folder / Path(name).expanduser()).exists():
                found = str(folder / Path(name).expanduser()) if folder != Path() else name
                return found if found.startswith((".", "/", "~")) else f"./{found}"
        return None

    def take(self, *names: str, default: Any = None) -> Any:
        """Return the value of the first of these settings that the file sets; all of them count as read."""
        self.taken.update(names)
        return next((self.values[name] for name in names if self.values.get(name) is not None), default)

    def number(self, *names: str, default: float) -> float:
        """Return a number.

        Raises:
            InputError: the value is not a number.
        """
        value = self.take(*names, default=default)
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise InputError(f"{self.source}: {names[0]} must be a number, got {value!r}; write the number") from error

    def count(self, *names: str, default: int) -> int:
        """Return a whole number. Raises InputError if the value is not a number."""
        return int(self.number(*names, default=default))

    def flag(self, *names: str, default: bool = False) -> bool:
        """Return a boolean, in any spelling."""
        value = self.take(*names, default=default)
        return value if isinstance(value, bool) else str(value).strip().lower() in ("true", "1", "yes", "")

    def given(self, *names: str) -> bool:
        """Return whether the file sets one of these settings; all of them count as read."""
        return self.take(*names) is not None

    def left(self) -> dict[str, Any]:
        """Return the settings that were not read."""
        return {name: value for name, value in self.values.items() if name not in self.taken and value is not None}


def read_settings(path: Path) -> Settings:
    """Return the settings of a `.yaml`, `.yml` or `.json` file, a `.py` script, or a file of shell commands.

    Raises:
        InputError: there is no such file, or it has no settings or not the format that its suffix implies.
    """
    try:
        data = path.read_bytes()
        if len(data) > _MOST_BYTES:
            raise InputError(
                f"{path}: must be at most {_MOST_BYTES // 2**20} MiB, got {len(data)} bytes; give the script or its "
                "configuration"
            )
        text = data.decode()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: must be text in UTF-8: {error.reason}; give the script or its configuration"
        ) from error
    read = {".yaml": _of_yaml, ".yml": _of_yaml, ".json": _of_yaml, ".py": _of_python}.get(path.suffix, _of_shell)
    found = read(text, str(path))
    if not found.values:
        raise InputError(f"{path}: must contain settings, got none; name the file that contains the arguments")
    return found


def _of_yaml(text: str, source: str) -> Settings:
    try:
        raw = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(raw, Mapping):
        raise InputError(f"{source}: must be a map of settings, got {type(raw).__name__}")
    return Settings(source, _flat(raw))


def _flat(raw: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return settings by dotted names, without interpolations, because these repeat other settings."""
    return {name: said for name, said in flat(raw, prefix) if not (isinstance(said, str) and said.startswith("${"))}


def _of_shell(text: str, source: str) -> Settings:
    """Read `--key value`, `--key=value`, `--flag` and hydra's `key=value` in every command; the last value wins."""
    try:
        words = shlex.split(_expanded(text).replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise InputError(f"{source}: cannot be read as shell commands: {error}; close its quotes") from error
    values: dict[str, Any] = {}
    plain: list[str] = []
    index = 0
    while index < len(words):
        word = words[index]
        override = _OVERRIDE.match(word)
        index += 1
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            given = [value] if equals else []
            while not equals and index < len(words) and _is_value(words[index]):
                given.append(words[index])
                index += 1
            values[name.replace("-", "_")] = (
                [_typed(v) for v in given] if len(given) > 1 else _typed(*given or ["true"])
            )
        elif override:
            values[override[1]] = _typed(override[2])
        else:
            plain.append(word)
    unknown = {name: str(value) for name, value in values.items() if "$" in str(value)}
    known = {k: v for k, v in values.items() if k not in unknown}
    return Settings(source, _flat(known), unknown=unknown, words=tuple(plain))


def _expanded(text: str) -> str:
    """Expand the variables that the file itself sets in its commands."""
    known = {"HOME": "~"} | {name: value.strip().strip("\"'") for name, value in _ASSIGNED.findall(text)}
    known = {name: re.sub(r"^\$\{\w+:?-(.*)\}$", r"\1", value) for name, value in known.items()}
    rest = _ASSIGNED.sub("", text)
    for _ in range(3):  # a variable's value may contain other variables
        rest = _VARIABLE.sub(lambda found: str(known.get(found[1] or found[3], found[2] or found[0])), rest)
    return rest


def _is_value(word: str) -> bool:
    return (
        not re.match(r"--|-[A-Za-z]", word)
        and not word.endswith(".py")
        and not _OVERRIDE.match(word)
        and word not in ("&&", "||", "|", ";", ">", "2>&1")
    )


def _typed(text: str) -> Any:
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
    if isinstance(value, str):  # readers of YAML 1.1 return 1e-6 as text
        with suppress(ValueError):
            return float(value)
    return value


def _of_python(text: str, source: str) -> Settings:
    """Read the keywords of all calls `…Config(…)`, `…Arguments(…)`, `…Trainer(…)`, and `load_dataset`'s arguments."""
    try:
        module = ast.parse(text, filename=source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{source}: is not Python: {error}") from error
    script = _Script(module)
    words: list[str] = []
    for call in sorted((node for node in ast.walk(module) if isinstance(node, ast.Call)), key=lambda c: c.lineno):
        called = ast.unparse(call.func).rpartition(".")[2]
        if called.endswith(("Config", "Arguments", "Trainer")) and called not in _PARTS:
            words.append(called)
            script.read([*script.placed(call, called), *_keywords(call)])
        elif called == "LoraConfig":
            script.values["peft_config.peft_type"] = "LORA"
            script.read(_keywords(call), "peft_config.")
        elif called == "from_pretrained" and "Model" in ast.unparse(call.func):
            script.read(_keywords(call), "model_init_kwargs.")
        elif called == "add_callback":
            script.unknown["callbacks"] = ", ".join(ast.unparse(one) for one in call.args)
        elif called in ("map", "filter") and isinstance(call.func, ast.Attribute):
            script.notes.append(
                f"{ast.unparse(call.func)[:60]} (line {call.lineno}): this code changes the rows; "
                "write its result to JSON lines and register that file"
            )
    script.read_rows()
    parts = {name.partition(".")[0] for name in script.values}
    unknown = {k: v for k, v in script.unknown.items() if k not in script.values and k not in parts}
    return Settings(source, script.values, script.notes, unknown, tuple(words), _starts(module))


class _Script:
    """The settings in a script's calls whose values are literals, or names bound exactly once, to a literal."""

    def __init__(self, module: ast.Module) -> None:
        self.values: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        self.notes: list[str] = []
        self._rows: list[ast.expr] = []  # values of `train_dataset` that are positional arguments
        self._nodes = list(ast.walk(module))
        assigned = [(node.targets, node.value) for node in self._nodes if isinstance(node, ast.Assign)]
        bound = [(one.id, value) for targets, value in assigned for one in targets if isinstance(one, ast.Name)]
        times = Counter(name for name, _ in bound) + _changed(self._nodes)
        used = _used(self._nodes)
        self._names = {n: value for n, value in bound if times[n] == 1 and not (n in used and _is_mutable(value))}

    def read(self, settings: Iterable[tuple[str | None, ast.expr]], prefix: str = "") -> None:
        """Read keywords, including those in `**NAME` if a dict in the script lists them; otherwise add a note."""
        for name, value in settings:
            if name:
                self._set(prefix + name, value)
            elif (inner := self._pairs(value)) is not None:
                self.read(inner, prefix)
            else:
                self.notes.append(
                    f"**{ast.unparse(value)[:60]} (line {value.lineno}): cannot be read without running the script; "
                    "its settings are not carried over; write them as keywords"
                )

    def placed(self, call: ast.Call, called: str) -> list[tuple[str | None, ast.expr]]:
        """Return positional arguments with their parameters' names; add a note about arguments without a known name."""
        names = ["output_dir"] if called.endswith(("Config", "Arguments")) else PLACES.get(called, "").split()
        starred = next((place for place, one in enumerate(call.args) if isinstance(one, ast.Starred)), len(call.args))
        known = list(zip(names, call.args[:starred], strict=False))
        if left := call.args[len(known) :]:
            said = ", ".join(ast.unparse(one)[:40] for one in left)
            self.notes.append(
                f"{called}(… {said} …) (line {call.lineno}): these positional arguments have no known names and are "
                "not carried over; write them as keywords"
            )
        self._rows += [value for name, value in known if name == "train_dataset"]
        return [*known]

    def read_rows(self) -> None:
        """Read the arguments of the call of `load_dataset` that makes `train_dataset`, or of the first such call."""
        given = [node.value for node in self._nodes if isinstance(node, ast.keyword) and node.arg == "train_dataset"]
        parts: list[ast.expr] = [*self._rows, *given][:1]
        for part in parts:  # grows by the values of names; a self-referring name is bound twice, so this ends
            used = [node.id for node in ast.walk(part) if isinstance(node, ast.Name) and node.id in self._names]
            parts += [self._names[name] for name in used if self._names[name] not in parts]
        behind = [node for part in parts for node in ast.walk(part)]
        call = next((load for nodes in (behind, self._nodes) for load in _loads(nodes)), None)
        if call is None:
            return
        splits = [node.slice for node in behind if isinstance(node, ast.Subscript)]
        said: dict[str | None, ast.expr] = {"split": splits[0]} if splits else {}
        positions = zip(("path", "name", "data_dir", "data_files", "split"), call.args, strict=False)
        for name, value in (said | dict(positions) | dict(_keywords(call))).items():
            self._set(_LOADED.get(str(name), f"load_dataset.{name}"), value)

    def _pairs(self, node: ast.expr) -> list[tuple[str | None, ast.expr]] | None:
        """Return the keywords that `**node` sets; None if they cannot be read from the script."""
        node = self._names.get(node.id, node) if isinstance(node, ast.Name) else node
        if isinstance(node, ast.Dict):
            keys = [None if key is None else str(_literal(key, self._names)) for key in node.keys]
            return list(zip(keys, node.values, strict=True))
        of_words = isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args
        return _keywords(node) if of_words and isinstance(node, ast.Call) else None

    def _set(self, name: str, node: ast.expr) -> None:
        value = None if name == "callbacks" else _literal(node, self._names, functions=name in _FUNCTIONS)
        if isinstance(value, dict):
            self.values |= _flat(value, f"{name}.")
        elif value is not None and name != "args":
            self.values[name] = value
        elif name not in _ASKED_FOR and not (isinstance(node, ast.Constant) and node.value is None):
            self.unknown[name] = ast.unparse(node)


def _keywords(call: ast.Call) -> list[tuple[str | None, ast.expr]]:
    return [(word.arg, word.value) for word in call.keywords]


def _loads(nodes: list[ast.AST]) -> list[ast.Call]:
    """Return the calls of `load_dataset`, in the order of the script."""
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("load_dataset")]
    return sorted(calls, key=lambda call: call.lineno)


def _changed(nodes: list[ast.AST]) -> Counter[str]:
    """Count, by name, changes in place by the script: `kwargs["beta"] = …`, `kwargs.update(…)`, `rate *= 2`."""
    parts = [node.value for node in nodes if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)]
    parts += [node.value for node in nodes if isinstance(node, ast.Attribute) and node.attr in _IN_PLACE]
    parts += [node.target for node in nodes if isinstance(node, ast.AugAssign | ast.For)]
    return Counter(part.id for part in parts if isinstance(part, ast.Name))


def _is_mutable(node: ast.expr) -> bool:
    made = isinstance(node, ast.Call) and ast.unparse(node.func) in ("dict", "list")
    return made or isinstance(node, ast.Dict | ast.List)


def _used(nodes: list[ast.AST]) -> set[str]:
    """Return the names that the script reads in places other than `**NAME` and arguments of calls with settings.

    In such a place the script may change the value, under another name or in a function.
    """
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    read = [call for call in calls if ast.unparse(call.func).rpartition(".")[2].endswith(_READ)]
    plain = {id(one) for call in read for one in (*call.args, *(word.value for word in call.keywords))}
    plain |= {id(word.value) for call in calls for word in call.keywords if word.arg is None}
    maps = [node for node in nodes if isinstance(node, ast.Dict)]
    plain |= {id(value) for one in maps for key, value in zip(one.keys, one.values, strict=True) if key is None}
    names = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return {name.id for name in names if id(name) not in plain}


def _starts(module: ast.Module) -> bool:
    """Return whether importing the script starts a training, in code outside functions, classes and `__main__`."""
    defined = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    inside = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    done = [one for one in module.body if not isinstance(one, inside) and "__name__ ==" not in ast.unparse(one)]
    called = {ast.unparse(node.func) for one in done for node in ast.walk(one) if isinstance(node, ast.Call)}
    return bool(called & defined) or any(name.endswith((".train", "Trainer")) for name in called)


def _literal(node: ast.expr, names: Mapping[str, ast.expr], depth: int = _DEEP, *, functions: bool = False) -> Any:
    """Return a literal, or the name of a function if a function is expected; None for a computed value."""
    with suppress(ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ast.literal_eval(node)
    if isinstance(node, ast.List | ast.Tuple):
        parts = [_literal(part, names, depth, functions=functions) for part in node.elts]
        return parts if functions or None not in parts else None
    if isinstance(node, ast.Dict):
        keys = [None if key is None else _literal(key, names, depth) for key in node.keys]
        said = {k: _literal(v, names, depth) for k, v in zip(keys, node.values, strict=True)}
        return None if None in (*said, *said.values()) else said
    if isinstance(node, ast.Name):
        known = names.get(node.id)
        found = _literal(known, names, depth - 1, functions=functions) if known is not None and depth else None
        return node.id if found is None and known is None and functions else found
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained") and node.args:
        return _literal(node.args[0], names, depth)  # the name of a model or a tokenizer
    if not isinstance(node, ast.Attribute):
        return None
    if functions or ast.unparse(node.value) == "torch":
        return node.attr
    return node.attr.lower() if node.attr.isupper() else None  # an enum's member such as SchedulerType.COSINE


@dataclass(slots=True)
class Draft:
    """The run file to write, and notes on each setting in the other trainer's file."""

    source: str
    trainer: str  # TRL | verl
    run: dict[str, Any]
    carried: list[str] = field(default_factory=list)  # such as "num_generations: 8 → group_size: 8"
    changed: list[str] = field(default_factory=list)  # settings that are converted with a different meaning, or missing
    fill_in: list[str] = field(default_factory=list)  # tasks for a person before the first run
    dropped: list[str] = field(default_factory=list)  # settings without a counterpart, with their values
    inert: list[str] = field(default_factory=list)  # settings without effect on the result, such as devices and output

    def carry(self, theirs: str, value: Any, ours: str, result: Any) -> None:
        """Record a setting that was converted."""
        self.carried.append(f"{theirs}: {_short(value)} → {ours}: {_short(result)}")

    def model(self, settings: Settings, name: Any, revision: str) -> str:
        """Return the base model: a local folder, or a model on the hub, which a person must fetch."""
        if not isinstance(name, str):
            self.fill_in.append("model: name the base model")
            return "model:base"
        folder = name if name.startswith((".", "/", "~")) else settings.here(name)
        if folder is None:
            self.fill_in.append(f"fetch the model: hf download {name} --revision {revision}")
        return folder or f"hf:{name}@{revision}"

    def stops(self, settings: Settings, stage: dict[str, Any], *names: str) -> None:
        """Convert the stop strings in the first of these settings that the file sets."""
        name = next((name for name in names if settings.given(name)), None)
        given = settings.take(*names)
        found = tuple([given] if isinstance(given, str) else given if isinstance(given, list | tuple) else [given])
        if name is None or not found:
            return
        odd = [one for one in found if not isinstance(one, str)]
        fault = f"must be text, got {odd[0]!r}" if odd else stop_fault(found)
        if fault:
            self.changed.append(f"{name}: {_short(given)}: not carried over: stop {fault}")
            return
        stage["stop"] = list(found)
        self.carry(name, list(found), "stop", list(found))

    def close(
        self,
        settings: Settings,
        told: Mapping[str, str],
        harmless: frozenset[str],
        ours: Mapping[str, str] = MappingProxyType({}),
        same: Mapping[str, tuple[Any, ...]] = MappingProxyType(WHOLE),
    ) -> Draft:
        """Record the conversion of every setting that the file sets; unset settings are not reported.

        Args:
            told: setting that changes the result or the output for people → why it has no counterpart.
            harmless: settings without effect on the result: where and how to compute, or what to print.
            ours: converted setting → the resulting fields of the run file, separated by spaces.
            same: setting in `told` → the values that match Posttrain's behaviour.
        """
        self.changed += settings.notes
        for name, text in settings.unknown.items():
            if name in harmless:
                self.inert.append(name)
                continue
            reason = _told(told, name) or "the file does not define this value; the default applies"
            self.changed.append(f"{name}: {_short(text)}: {reason}")
        for name, value in settings.left().items():
            last, why = name.rpartition(".")[2], _told(told, name)
            if why and (name in same or last in same) and value in same.get(name, same.get(last, ())):
                self.carried.append(f"{name}: {_short(value)} → Posttrain does the same")
            elif why and (value not in _ABSENT or name in same):
                self.changed.append(f"{name}: {_short(value)}: {why}")
            elif why or name in harmless or last in harmless:
                self.inert.append(name if why else last)
            else:
                self.dropped.append(f"{name}: {_short(value)}")
        self._taken(settings, ours)
        return self

    def _taken(self, settings: Settings, ours: Mapping[str, str]) -> None:
        """Record the resulting field for each setting that was read; a setting without such a field has no effect."""
        ((_, stage),) = self.run.get("stages", {"": {}}).items()
        reported = {line.partition(":")[0] for line in (*self.changed, *self.carried)}
        for name, value in settings.values.items():
            fields = ours.get(name) or ours.get(name.partition(".")[0])
            if value is None or fields is None or name not in settings.taken - reported:
                continue
            found = [(field, _at(tree, field)) for field in fields.split() for tree in (stage, self.run)]
            line = next((f"{field}: {_short(result)}" for field, result in found if result is not None), None)
            (self.carried if line else self.inert).append(f"{name}: {_short(value)} → {line}" if line else name)

    def text(self) -> str:
        """Return the text of the run file, which begins with comments that contain the notes for a person."""
        lines = [f"# From {self.source} ({self.trainer}) by `posttrain init --from`; check it with `posttrain plan`."]
        for title, items in (
            ("To do before the first run", self.fill_in),
            ("Set differently", self.changed),
            ("Left out (no counterpart)", self.dropped),
            ("Ignored (no effect on the result)", [", ".join(self.inert)] if self.inert else []),
        ):
            if items:
                lines += [f"# {title}:", *(f"#   - {' '.join(item.split())}"[:300] for item in items)]
        body = yaml.dump(self.run, Dumper=_Plain, sort_keys=False, allow_unicode=True, width=118)
        return "\n".join([*lines, "", body])


def _told(told: Mapping[str, str], name: str) -> str | None:
    """Return why a setting has no counterpart; looked up by the full name, then by its suffixes and its first part."""
    parts = name.split(".")
    ends = (*(".".join(parts[at:]) for at in range(len(parts))), parts[0])
    return next((told[end] for end in ends if end in told), None)


def _at(tree: Any, path: str) -> Any:
    """Return the value at a dotted path; None if there is no value."""
    return reduce(lambda found, part: found.get(part) if isinstance(found, Mapping) else None, path.split("."), tree)


def plainly(number: float) -> float:
    """Return the number in the form that people write: 2 for 2.0."""
    return int(number) if number.is_integer() else number


def share_of_steps(draft: Draft, theirs: str, share: float, steps: int | None) -> int:
    """Convert a share of a stage's steps to steps; if the total is unknown, return a placeholder and add a note."""
    if share and steps is None:
        draft.fill_in.append(
            f"warmup_steps: {theirs} is {share:g} of the steps, which posttrain plan counts; "
            f"{round(share * 100)} is a placeholder"
        )
    return round(share * (steps or 100))


class _Plain(yaml.SafeDumper):
    """A YAML dumper that writes numbers in the form that people write."""


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    mantissa, mark, exponent = f"{value:.10g}".partition("e")
    text = mantissa if "." in mantissa else f"{mantissa}.0"  # YAML readers return 1e-6 as text
    return dumper.represent_scalar("tag:yaml.org,2002:float", text + (f"e{int(exponent)}" if mark else ""))


_Plain.add_representer(float, _number)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
