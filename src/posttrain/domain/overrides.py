"""`--set stages.grpo.steps=100,200`: values that replace those of a run file.

A path consists of the keys from the top of the file, joined by dots; it may begin with the name of a stage, without
`stages`. Values are YAML, separated by commas: `1e-4,3e-4`, `[a, b],[c]`, `null`.
"""

import copy
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain.domain.errors import InputError, meant

MOST_VALUES = 1000  # maximum number of values of one path
_LONGEST = 40
_WIDE = 10**9
_FLOAT = re.compile(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+")


@dataclass(frozen=True, slots=True)
class Override:
    """One path and its values: `Override("grpo.steps", (100, 200))`."""

    path: str
    values: tuple[Any, ...]


Setting = tuple[tuple[str, Any], ...]  # (path, value) pairs: one point of a sweep


def setting_of(given: Mapping[str, Any] | Sequence[tuple[str, Any]]) -> Setting:
    """Return a setting from a map of paths to values, or from pairs of both.

    Raises:
        InputError: it is neither.
    """
    pairs = list(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(pairs, list | tuple) or not all(isinstance(one, list | tuple) and len(one) == 2 for one in pairs):
        raise InputError(f'setting must map paths to values, such as {{"grpo.steps": 100}}, got {given!r:.80}')
    return tuple((str(path), value) for path, value in pairs)


def parse_override(text: str) -> Override:
    """Parse `PATH=VALUE[,VALUE…]`.

    Raises:
        InputError: there is no path or no value, or the values are not YAML.
    """
    path, equals, written = text.partition("=")
    path = path.strip()
    if not equals or not path or not all(path.split(".")):
        raise InputError(f"--set: must be PATH=VALUE, or PATH=VALUE,VALUE for a sweep, got {text!r}")
    import yaml  # late: `--help` does not need it

    try:
        values = yaml.safe_load(f"[{written}]")
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"--set {path}: values must be YAML, separated by commas, got {written!r}") from error
    values = [_number(value) for value in values] if isinstance(values, list) else values
    if not written.strip():
        raise InputError(f"--set {path}: must have a value after the =, got none; {path}=null removes the key")
    if not isinstance(values, list) or not 1 <= len(values) <= MOST_VALUES:
        raise InputError(f"--set {path}: must have 1 to {MOST_VALUES} values, got {written[:_LONGEST]!r}")
    twice = next((value for place, value in enumerate(values) if value in values[:place]), None)
    if twice is not None:
        raise InputError(f"--set {path}: values must differ, got {twice!r} twice; leave one out")
    return Override(path, tuple(values))


def _number(value: Any) -> Any:
    """Convert a number such as `1e-4`, which YAML 1.1 reads as text."""
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def parse_overrides(texts: Sequence[str]) -> tuple[Override, ...]:
    """Parse several overrides; paths must be unique.

    Raises:
        InputError: an override has no path or no value, its values are not YAML, or two overrides have the same path.
    """
    found = tuple(parse_override(text) for text in texts)
    paths = [one.path.removeprefix("stages.") for one in found]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"--set {twice}: must be given once, with its values separated by commas")
    return found


def settings(overrides: Sequence[Override]) -> Iterator[Setting]:
    """Yield every combination of values, varying the last path fastest; without overrides, one empty setting."""
    for values in itertools.product(*(one.values for one in overrides)):
        yield tuple((one.path, value) for one, value in zip(overrides, values, strict=True))


def single(texts: Sequence[str]) -> Setting:
    """Return the one setting that these overrides define; each override must have exactly one value.

    Raises:
        InputError: an override is malformed or has several values, or two overrides have the same path.
    """
    found = parse_overrides(texts)
    many = next((one for one in found if len(one.values) > 1), None)
    if many is not None:
        raise InputError(
            f"--set {many.path}: must have one value, got {len(many.values)}; posttrain sweep takes several"
        )
    return tuple((one.path, one.values[0]) for one in found)


def overridden(raw: Mapping[str, Any], setting: Setting, fields: Collection[str] = ()) -> dict[str, Any]:
    """Return a run file's content with a setting applied.

    Args:
        fields: the keys at the top of a run file, to tell a misspelt stage from them; empty: not told.

    Raises:
        InputError: a path leads through a value that is not a map, or begins with a misspelt stage.
    """
    changed: dict[str, Any] = copy.deepcopy(dict(raw))
    stages = changed.get("stages")
    for path, value in setting:
        keys = path.split(".")
        if isinstance(stages, dict) and keys[0] not in raw:
            misspelt = fields and keys[0] not in fields and keys[1:]
            keys = ["stages", *keys] if keys[0] in stages or misspelt else keys
        place: Any = changed
        for depth, key in enumerate(keys[:-1]):
            if place.get(key) is None:  # the whole map may be omitted from the file
                if keys[0] == "stages" and depth == 1:
                    names = ", ".join(stages) if isinstance(stages, dict) else "none"
                    hint = meant(key, stages) if isinstance(stages, dict) else ""
                    raise InputError(f"--set {path}: the run file has no stage {key!r}{hint}; it has {names}")
                place[key] = {}
            place = place[key]
            if not isinstance(place, dict):
                where, kind = ".".join(keys[: depth + 1]), "a list" if isinstance(place, list) else repr(place)
                raise InputError(f"--set {path}: {where} must be a map, got {kind:.40}; change it in the run file")
        place[keys[-1]] = value
    return changed


def setting_words(setting: Setting) -> str:
    """Return a setting as text: `grpo.steps 100, seed 3`; `as written` without overrides."""
    return ", ".join(f"{path} {value_words(value)}" for path, value in setting) or "as written"


def value_words(value: Any) -> str:
    """Return a value as short text."""
    text = value if isinstance(value, str) else written(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def written(value: Any) -> str:
    """Return a value in the syntax of `--set`: YAML that parses to the same value."""
    import yaml

    if isinstance(value, str) and _reads_back(value):
        return value
    return yaml.safe_dump([value], default_flow_style=True, width=_WIDE, sort_keys=False).strip()[1:-1]


def _reads_back(text: str) -> bool:
    import yaml

    try:
        return bool(yaml.safe_load(f"[{text}]") == [text]) and text == text.strip() and text.isprintable()
    except (yaml.YAMLError, ValueError, RecursionError):
        return False
