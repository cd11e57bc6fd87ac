"""Which files are a data set: one, several given together, those that match a pattern, or those of a folder.

A folder is read as Hugging Face's tools write it: what `save_to_disk` left (`state.json` names the shards; a
`DatasetDict` holds a folder for every split), the snapshot of a repository, or any folder of shards. Only files of data
count: descriptions and hidden files may be there. Data of several splits, or in several folders, is never mixed: one
must be named. Files are taken in the order of their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError, NotFoundError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".zst")
_DESCRIBES = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_TEXTS = re.compile(r"(.*\.md|licen[cs]e.*|notice.*|citation.*)", re.IGNORECASE)
_SPLITS = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
_SPLITS |= {"valid": "validation", "val": "validation", "dev": "validation"}
_KNOWN = {"train", "test", "validation", *_SPLITS}
_PATTERN = re.compile(r"[*?\[]")
_MOST_FILES = 10_000
_SHOWN = 5  # names in an error


def is_pattern(path: Path) -> bool:
    """Whether the last part of a path stands for several files, such as `train-*.parquet`."""
    return _PATTERN.search(path.name) is not None and not path.exists()


def data_files(path: Path, word: str = "") -> dict[str, Path]:
    """The files of a data set by name, sorted.

    Args:
        path: a file, a folder, or a pattern of file names in a folder.
        word: how the person named it, for errors; the path by default.

    Raises:
        NotFoundError: no such file, or nothing matches.
        InputError: no data in the folder, data of several splits or folders, or a file that is none.
    """
    word = word or str(path)
    if is_pattern(path):
        return together(sorted(p for p in path.parent.glob(path.name) if p.is_file() and not _hidden(p.name)), word)
    return _folder(path, word) if path.is_dir() else {path.name: path}


def together(paths: Iterable[Path], word: str) -> dict[str, Path]:
    """Several files as one data set, by name.

    Raises:
        NotFoundError: there are none. InputError: two of one name, a folder, too many.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if path.is_dir():
            raise InputError(f"{word}: several paths must be files, got the folder {path}; give its files, or it alone")
        if path.name in files:
            raise InputError(f"{word}: files must have different names, got {path.name} twice; rename one")
        files[path.name] = path
    if not files:
        raise NotFoundError(f"{word}: no file matches; check the pattern")
    if len(files) > _MOST_FILES:
        raise InputError(f"{word}: a data set must be of at most {_MOST_FILES} files, got {len(files)}; join them")
    return dict(sorted(files.items()))


def _folder(folder: Path, word: str) -> dict[str, Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json", "splits", word)
        raise InputError(f"{word} holds the splits {_listed(splits)}; name one: {_beside(word, str(splits[0]))}")
    if (folder / "state.json").is_file():
        shards = [str(file.get("filename")) for file in _described(folder / "state.json", "_data_files", word)]
        lost = next((name for name in shards if Path(name).name != name or not (folder / name).is_file()), None)
        if lost is not None:
            raise NotFoundError(f"{word}: state.json names {lost}, which is not there; save the data set again")
        return together([folder / name for name in shards], word)
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and _counts(path.relative_to(folder))]
    stranger = next((path for path in found if not _is_data(path.name)), None)
    if stranger is not None:
        raise InputError(
            f"{word}: a data set's folder must hold data only ({', '.join(SUFFIXES)}, with {' or '.join(PACKED)}), got"
            f" {stranger.relative_to(folder)}; take it away, or name the files: {_beside(word, '*.jsonl')}"
        )
    if not found:
        raise NotFoundError(f"{word}: the folder holds no data file; give one with {', '.join(SUFFIXES)} files")
    _refuse_mixed(found, folder, word)
    return together(found, word)


def _refuse_mixed(found: list[Path], folder: Path, word: str) -> None:
    folders = sorted({path.parent.relative_to(folder).as_posix() for path in found})
    if len(folders) > 1:
        raise InputError(f"{word} holds data in the folders {_listed(folders)}; name one: {_beside(word, folders[-1])}")
    splits = {path: _split(path.name) for path in found}
    if len(set(splits.values())) > 1:
        first = next(path for path, split in splits.items() if split)
        name = re.sub(r"\d+-of-\d+", "*", first.name)
        place = Path(folders[0], name).as_posix()
        words = sorted({split or "others" for split in splits.values()})
        raise InputError(f"{word} holds the splits {_listed(words)}; name one: {_beside(word, place)}")


def _described(file: Path, key: str, word: str) -> list[Any]:
    """A list in one of the files that `datasets` writes beside its data."""
    try:
        found = json.loads(file.read_bytes())[key]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"{word}: {file.name} must say {key}: {error!r:.100}; save the data set again") from error
    entries = found if isinstance(found, list) else []
    if not entries or not all(isinstance(entry, str if key == "splits" else dict) for entry in entries):
        raise InputError(f"{word}: {file.name} must list {key}, got {found!r:.60}; save the data set again")
    return entries


def _counts(name: Path) -> bool:
    hidden = any(_hidden(part) for part in name.parts)
    return not hidden and name.name not in _DESCRIBES and not _TEXTS.fullmatch(name.name)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_data(name: str) -> bool:
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES)


def _split(name: str) -> str | None:
    """The split that a file's name says: `train-00000-of-00002.parquet` is `train`."""
    word = next((part for part in re.split(r"[^a-z]+", name.lower()) if part in _KNOWN), None)
    return _SPLITS.get(word, word) if word else None


def _beside(word: str, name: str) -> str:
    return f"{word.rstrip('/')}/{name}"


def _listed(words: list[Any]) -> str:
    more = f" and {len(words) - _SHOWN} more" if len(words) > _SHOWN else ""
    return ", ".join(map(str, words[:_SHOWN])) + more
