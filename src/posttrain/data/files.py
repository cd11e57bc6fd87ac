"""Data set files: which files a data set has, and the rows of one file as they are written.

The format of a file is recognised by its bytes, never by its name:

=========================== ==========================================================================================
begins with                 is
=========================== ==========================================================================================
`{`                         JSON lines: one object per line
`[`                         a JSON list of objects
`PAR1`                      Parquet
`FFFFFFFF`, `ARROW1`        Arrow, as Hugging Face `datasets` saves to disk
gzip's, zstd's magic number JSON lines, a JSON list or CSV, compressed once
anything else               CSV with a header row that names a known column; comma, tab or semicolon
=========================== ==========================================================================================

A CSV cell is read as the written text, and an empty cell as None: pandas and `datasets` would convert `007` to 7.0 and
`NA` to a missing value, but an answer is compared as text. A file is read row by row. The file's unpacked size is
limited, so a small file cannot fill the memory.

A data set is one file, several files, the matches of a pattern, or the files of a folder. A folder is read in the form
that Hugging Face's tools write: the output of `save_to_disk` (`state.json` lists the shards; a `DatasetDict` has a
folder for every split), the snapshot of a repository, or any folder of shards. Only data files count; descriptions and
hidden files are ignored. Data of several splits, or in several folders, is never mixed: the user must name one split or
folder. Files are read in the order of their names.
"""

import codecs
import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from posttrain.domain.errors import InputError, NotFoundError

Row = dict[str, Any]
COLUMNS = ("prompt", "question", "messages", "text", "chosen")  # a row has at least one of these; see `data.rows`
MOST_ROW = 64 * 2**20  # maximum bytes of one row's text
ALWAYS, TIMES, MOST = 256 * 2**20, 200, 16 * 2**30  # unpacked bytes: always allowed; per packed byte; maximum
_PARQUET, _STREAM, _ARROW = b"PAR1", b"\xff\xff\xff\xff", b"ARROW1"
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_FOREIGN = {b"PK\x03\x04": "a zip archive", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x89HDF": "HDF5"}
_BLANK = b" \t\r\n"
_CHUNK = 1 << 16
_SHOWN = 60  # maximum characters of a wrong value in an error
SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow")
PACKED = (".gz", ".zst")
_DESCRIBES = {"config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
_TEXTS = re.compile(r"(.*\.md|licen[cs]e.*|notice.*|citation.*)", re.IGNORECASE)
_SPLITS = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
_SPLITS |= {"valid": "validation", "val": "validation", "dev": "validation"}
_KNOWN = {"train", "test", "validation", *_SPLITS}
_PATTERN = re.compile(r"[*?\[]")
_MOST_FILES = 10_000
_SHOWN_PARTS = 5  # maximum number of names in an error


def read_file(path: Path, name: str) -> Iterator[Row]:
    """Yield the rows of a file as they are written.

    Args:
        name: the file's name in errors.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file is malformed or has an unknown format; the message names the file and the line or row.
    """
    kind = _kind(path, name)
    return _bounded_tables(path, name, kind) if kind in ("parquet", "arrow") else _texts(path, name, kind)


def file_format(path: Path) -> str:
    """Return `jsonl`, `json`, `csv`, `parquet` or `arrow`, with `+gzip` or `+zstd` if the file is compressed.

    Raises:
        NotFoundError: there is no such file.
        InputError: the file has an unknown format.
    """
    kind = _kind(path, path.name)
    if kind in ("parquet", "arrow"):
        return kind
    with _opened(path, path.name, kind) as file:
        return _text_form(file, path.name) + (f"+{kind}" if kind else "")


def _kind(path: Path, name: str) -> str:
    if not path.is_file():
        raise NotFoundError(f"{name}: data set file {path} does not exist; check the path")
    try:
        with path.open("rb") as file:
            magic = file.read(8)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; check {path}") from error
    if foreign := next((word for start, word in _FOREIGN.items() if magic.startswith(start)), None):
        raise InputError(
            f"{name} must be JSON lines, a JSON list or CSV (each may be compressed with gzip or zstd), Parquet or"
            f" Arrow, got {foreign}; unpack or convert the file"
        )
    if magic.startswith(_PARQUET):
        return "parquet"
    if magic.startswith((_STREAM, _ARROW)):
        return "arrow"
    return next((word for start, word in _PACKED.items() if magic.startswith(start)), "")


# --- text -------------------------------------------------------------------------------------------------------------


def _texts(path: Path, name: str, packed: str) -> Iterator[Row]:
    with _opened(path, name, packed) as file:
        start = file.peek(8)
        if packed and (start.startswith((_PARQUET, _STREAM, _ARROW)) or start[:2] in _PACKED or start[:4] in _PACKED):
            raise InputError(
                f"{name} must contain text when unpacked ({packed}), got binary data; unpack the file once"
            )
        yield from {"csv": _csv_rows, "json": _listed_rows, "jsonl": _lines}[_text_form(file, name)](file, name)


def _opened(path: Path, name: str, packed: str) -> io.BufferedReader:
    return io.BufferedReader(_Unpacked(path, name, packed), _CHUNK)


def _text_form(file: io.BufferedReader, name: str) -> str:
    if b"\0" in file.peek(_CHUNK).partition(b"\n")[0]:  # only the first line, because later CSV cells may contain NUL
        raise InputError(
            f"{name} must be text (JSON lines, a JSON list or CSV in UTF-8), Parquet or Arrow, got a NUL byte; give "
            "the unpacked file, or save the text as UTF-8"
        )
    start = file.peek(_CHUNK).removeprefix(codecs.BOM_UTF8).lstrip(_BLANK)[:1]
    return {b"[": "json", b"{": "jsonl", b"": "jsonl"}.get(start, "csv")


class _Unpacked(io.RawIOBase):
    """The text of a file, decompressed if necessary, up to a maximum size."""

    def __init__(self, path: Path, name: str, packed: str) -> None:
        self._name, self._packed, self._count = name, packed, 0
        self._source = _stream(path, packed)
        self._most = bound(path.stat().st_size) if packed else None

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer; return fewer bytes only at the end."""
        view, filled = memoryview(buffer), 0
        while filled < len(view):
            try:
                chunk = self._source.read(len(view) - filled)
            except (OSError, EOFError, zlib.error) as error:  # the file is truncated or has another format
                reason = " ".join(str(error).split())[:200]
                raise InputError(f"{self._name} cannot be read: {reason}; write the file again") from error
            if not chunk:
                break
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        self._count += filled
        if self._most is not None and self._count > self._most:
            raise InputError(
                f"{self._name} must have at most {self._most} bytes when unpacked ({TIMES} times its size), got more;"
                " unpack the file yourself, or split it"
            )
        return filled

    def close(self) -> None:
        """Close this stream and the underlying file."""
        self._source.close()
        super().close()


def bound(size: int) -> int:
    """Return the maximum unpacked size of a packed file of `size` bytes."""
    return max(ALWAYS, min(size * TIMES, MOST))


def _stream(path: Path, packed: str) -> BinaryIO:
    if packed == "gzip":
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if packed == "zstd":
        import pyarrow

        return cast(BinaryIO, pyarrow.CompressedInputStream(pyarrow.OSFile(str(path)), "zstd"))
    return path.open("rb", buffering=0)


def _lines(file: BinaryIO, name: str) -> Iterator[Row]:
    for number, line in enumerate(iter(lambda: file.readline(MOST_ROW + 1), b""), start=1):
        _refuse_long(len(line), f"{name}:{number}")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
            if b"\\u" in line:
                json.dumps(row, ensure_ascii=False).encode()  # a lone surrogate is not valid text
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}:{number} must be one JSON object per line: {_reason(error)}") from error
        if not isinstance(row, dict):
            raise InputError(f"{name}:{number} must be a JSON object, got {type(row).__name__}")
        yield row


def _refuse_long(length: int, place: str) -> None:
    if length > MOST_ROW:
        raise InputError(f"{place} must be a row of at most {MOST_ROW} bytes, got more; split the row")


def _refuse_constant(text: str) -> float:
    raise ValueError(f"{text} is not JSON; write null or a finite number")


def _reason(error: Exception) -> object:
    if isinstance(error, UnicodeEncodeError):
        return f"the lone surrogate {error.object[error.start]!r} is not valid Unicode"
    return error.msg if isinstance(error, json.JSONDecodeError) else error


def _listed_rows(file: BinaryIO, name: str) -> Iterator[Row]:
    """Yield the objects of a JSON list, without reading the whole list into memory."""
    text, number = _Text(file, name), 0
    text.skip("[")
    if text.skip("]"):
        return
    while True:
        number += 1
        row = text.value(f"{name} row {number}")
        if not isinstance(row, dict):
            raise InputError(f"{name} row {number} must be a JSON object, got {type(row).__name__}")
        yield row
        if text.skip("]"):
            break
        if not text.skip(","):
            raise InputError(f"{name}: row {number} of the list must be followed by a comma or ], got {text.shown()}")
    if text.shown() != "its end":
        raise InputError(f"{name}: the file must end after its list, got {text.shown()}; write one list, or JSON lines")


class _Text:
    """A window over a JSON text that advances value by value."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file, self._name = file, name
        self._decode = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder(parse_constant=_refuse_constant)
        self._window, self._at, self._ended = "", 0, False

    def skip(self, mark: str) -> bool:
        """Return whether this character comes next; if it does, consume it."""
        self._blanks()
        found = self._window.startswith(mark, self._at)
        self._at += found
        return found

    def shown(self) -> str:
        """Return the text at the current position, for an error."""
        self._blanks()
        return repr(self._window[self._at : self._at + _SHOWN]) if self._at < len(self._window) else "its end"

    def value(self, place: str) -> Any:
        """Return the next value, or raise InputError at the end."""
        self._blanks()
        wanted = _CHUNK
        while True:
            try:
                value, end = self._json.raw_decode(self._window, self._at)
                if "\\u" in self._window[self._at : end]:
                    json.dumps(value, ensure_ascii=False).encode()
            except json.JSONDecodeError as error:
                _refuse_long(len(self._window) - self._at, place)
                if self._ended:
                    raise InputError(f"{place} must be a JSON object: {_reason(error)}") from error
                self._more(wanted)
                wanted *= 2
                continue
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place} must be a JSON object: {_reason(error)}") from error
            self._at = end
            return value

    def _blanks(self) -> None:
        while True:
            while self._at < len(self._window) and self._window[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._window) or self._ended:
                return
            self._more(_CHUNK)

    def _more(self, count: int) -> None:
        chunk = self._file.read(count)
        self._ended = not chunk
        try:
            self._window = self._window[self._at :] + self._decode.decode(chunk, final=self._ended)
        except UnicodeDecodeError as error:
            raise InputError(f"{self._name} must be UTF-8, got byte {error.object[error.start]:#04x}") from error
        self._at = 0


def _csv_rows(file: BinaryIO, name: str) -> Iterator[Row]:
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(MOST_ROW)
    try:
        first = text.readline(MOST_ROW + 1)
        records = csv.reader(_chained(first, text, name), strict=True, delimiter=_delimiter(first, name))
        header: list[str] = []
        for number, cells in enumerate((record for record in records if record), start=0):
            if not number:
                header = _header(cells, name)
            elif len(cells) == len(header):
                yield {column: cell or None for column, cell in zip(header, cells, strict=True)}
            else:
                raise InputError(
                    f"{name} row {number} (line {records.line_num}) must have {len(header)} cells like its header, got"
                    f" {len(cells)}; quote cells that contain the separator"
                )
    except csv.Error as error:
        raise InputError(f"{name}:{records.line_num} is not CSV: {error}; fix its quotes") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{name} must be UTF-8, got byte {error.object[error.start]:#04x}; save it as UTF-8"
        ) from error
    finally:
        text.detach()


def _chained(first: str, text: io.TextIOWrapper, name: str) -> Iterator[str]:
    line, number = first, 1
    while line:
        _refuse_long(len(line), f"{name}:{number}")
        yield line
        line, number = text.readline(MOST_ROW + 1), number + 1


def _delimiter(line: str, name: str) -> str:
    """Return the first delimiter with which a CSV header contains a known column."""
    for delimiter in (",", "\t", ";"):
        try:
            cells = next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter), [])
        except csv.Error as error:
            raise InputError(f"{name}:1 is not CSV: {error}; fix the header, or save the file as UTF-8") from error
        if any(cell.strip() in COLUMNS for cell in cells):
            return delimiter
    raise InputError(
        f"{name}:1 must be JSON, or a CSV header that names one of the columns {', '.join(COLUMNS)}, got"
        f" {line.strip()[:_SHOWN]!r}"
    )


def _header(cells: list[str], name: str) -> list[str]:
    """Return the names of the columns; an empty name, which pandas writes, becomes `Unnamed: N`, as in pandas."""
    names = [cell or f"Unnamed: {index}" for index, cell in enumerate(cells)]
    padded = next((cell for cell in names if cell != cell.strip()), None)
    if padded is not None:
        raise InputError(
            f"{name}:1 must name its columns without surrounding spaces, got {padded!r}; remove the spaces"
        )
    _refuse_twice(names, name)
    return names


def _refuse_twice(columns: list[str], name: str) -> None:
    if len(set(columns)) < len(columns):
        raise InputError(f"{name} must have columns with different names, got {', '.join(columns)}; rename one")


# --- tables -----------------------------------------------------------------------------------------------------------


def _bounded_tables(path: Path, name: str, kind: str) -> Iterator[Row]:
    import pyarrow.parquet  # imported here: the import takes 0.1 s, too long for `posttrain --help`

    most, count = bound(path.stat().st_size), 0
    word = "Parquet" if kind == "parquet" else "Arrow"
    large = InputError(f"{name} must contain at most {most} bytes ({TIMES} times its size), got more; split it")
    try:
        if kind == "parquet" and _declared(pyarrow.parquet.read_metadata(path)) > most:
            raise large
        for batch in _batches(path, name, kind):
            count += sum(map(_decoded, batch.columns))
            if count > most:
                raise large
            batch.validate(full=True)  # Arrow does not validate the metadata of a file
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{name} cannot be read as {word}: {' '.join(str(error).split())[:200]}") from error
    except (ValueError, OverflowError) as error:  # invalid UTF-8, or a date out of range
        raise InputError(f"{name} contains values that cannot be read: {' '.join(str(error).split())[:200]}") from error


def _declared(found: Any) -> int:
    """Return the unpacked size of a Parquet file's values by its metadata, counting at least 8 bytes per value."""
    groups = [found.row_group(index) for index in range(found.num_row_groups)]
    each = [group.column(index) for group in groups for index in range(group.num_columns)]
    return sum(max(one.total_uncompressed_size, 8 * one.num_values) for one in each)


def _decoded(array: Any) -> int:
    """Return the size of an array's values in bytes; a shared value counts each time that it is used."""
    import pyarrow.compute

    if pyarrow.types.is_dictionary(array.type):
        known = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_binary)
        if not any(one(array.dictionary.type) for one in known):
            return int(array.indices.nbytes)
        lengths = pyarrow.compute.binary_length(array.dictionary)
        return int(array.indices.nbytes + (pyarrow.compute.sum(lengths.take(array.indices)).as_py() or 0))
    if pyarrow.types.is_list(array.type) or pyarrow.types.is_large_list(array.type):
        return int(array.offsets.nbytes) + _decoded(array.flatten())
    return sum(map(_decoded, array.flatten())) if pyarrow.types.is_struct(array.type) else int(array.nbytes)


def _batches(path: Path, name: str, kind: str) -> Iterator[Any]:
    import pyarrow.parquet

    if kind == "parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            _refuse_twice(list(file.schema_arrow.names), name)
            columns = [file.schema.column(index) for index in range(len(file.schema))]
        texts = [one.path for one in columns if one.physical_type == "BYTE_ARRAY" and one.logical_type.type == "STRING"]
        # a text shared by many rows stays one dictionary entry until its size is checked
        with pyarrow.parquet.ParquetFile(path, read_dictionary=texts) as file:
            yield from file.iter_batches(batch_size=1024)
        return
    with pyarrow.OSFile(str(path)) as source:
        with path.open("rb") as head:
            whole = head.read(len(_ARROW)) == _ARROW
        reader = pyarrow.ipc.open_file(source) if whole else pyarrow.ipc.open_stream(source)
        _refuse_twice(list(reader.schema.names), name)
        yield from map(reader.get_batch, range(reader.num_record_batches)) if whole else reader


def is_pattern(path: Path) -> bool:
    """Return whether the last part of a path is a pattern for several files, such as `train-*.parquet`."""
    return _PATTERN.search(path.name) is not None and not path.exists()


def data_files(path: Path, word: str = "") -> dict[str, Path]:
    """Return name → file for the files of a data set, sorted by name.

    Args:
        path: a file, a folder, or a pattern for file names in a folder.
        word: the user's name for the data set, for errors; if it is "", errors contain the path.

    Raises:
        NotFoundError: there is no such file, or no file matches the pattern.
        InputError: the folder has no data, or data in several splits or folders, or a file is not a data file.
    """
    word = word or str(path)
    if is_pattern(path):
        return together(sorted(p for p in path.parent.glob(path.name) if p.is_file() and not _hidden(p.name)), word)
    return _folder(path, word) if path.is_dir() else {path.name: path}


def together(paths: Iterable[Path], word: str) -> dict[str, Path]:
    """Return name → file for several files that form one data set.

    Raises:
        NotFoundError: there are no files.
        InputError: two files have the same name, a path is a folder, or there are too many files.
    """
    files: dict[str, Path] = {}
    for path in paths:
        if path.is_dir():
            raise InputError(
                f"{word}: if several paths are given, each must be a file, got the folder {path}; give its files, or "
                "only the folder"
            )
        if path.name in files:
            raise InputError(f"{word}: files must have different names, got {path.name} twice; rename one")
        files[path.name] = path
    if not files:
        raise NotFoundError(f"{word}: no file matches; check the pattern")
    if len(files) > _MOST_FILES:
        raise InputError(f"{word}: a data set must have at most {_MOST_FILES} files, got {len(files)}; merge them")
    return dict(sorted(files.items()))


def _folder(folder: Path, word: str) -> dict[str, Path]:
    if (folder / "dataset_dict.json").is_file():
        splits = _described(folder / "dataset_dict.json", "splits", word)
        raise InputError(f"{word} has the splits {_listed(splits)}; name one: {_beside(word, str(splits[0]))}")
    if (folder / "state.json").is_file():
        shards = [str(file.get("filename")) for file in _described(folder / "state.json", "_data_files", word)]
        lost = next((name for name in shards if Path(name).name != name or not (folder / name).is_file()), None)
        if lost is not None:
            raise NotFoundError(f"{word}: state.json names {lost}, which does not exist; save the data set again")
        return together([folder / name for name in shards], word)
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and _counts(path.relative_to(folder))]
    if stranger := next((path for path in found if not _is_data(path.name)), None):
        raise InputError(
            f"{word}: a data set's folder must contain data only ({', '.join(SUFFIXES)}, with {' or '.join(PACKED)}), "
            f"got {stranger.relative_to(folder)}; remove it, or name the files: {_beside(word, '*.jsonl')}"
        )
    if not found:
        raise NotFoundError(f"{word}: the folder has no data file; give one with {', '.join(SUFFIXES)} files")
    _refuse_mixed(found, folder, word)
    return together(found, word)


def _refuse_mixed(found: list[Path], folder: Path, word: str) -> None:
    folders = sorted({path.parent.relative_to(folder).as_posix() for path in found})
    if len(folders) > 1:
        raise InputError(f"{word} has data in the folders {_listed(folders)}; name one: {_beside(word, folders[-1])}")
    splits = {path: _split(path.name) for path in found}
    if len(set(splits.values())) > 1:
        first = next(path for path, split in splits.items() if split)
        place = Path(folders[0], re.sub(r"\d+-of-\d+", "*", first.name)).as_posix()
        words = sorted({split or "others" for split in splits.values()})
        raise InputError(f"{word} has the splits {_listed(words)}; name one: {_beside(word, place)}")


def _described(file: Path, key: str, word: str) -> list[Any]:
    """Return the list under `key` in a metadata file, which `datasets` writes next to the data."""
    try:
        found = json.loads(file.read_bytes())[key]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise InputError(f"{word}: {file.name} must contain {key}: {error!r:.100}; save the data set again") from error
    wanted = str if key == "splits" else dict
    if not found or not isinstance(found, list) or not all(isinstance(entry, wanted) for entry in found):
        raise InputError(f"{word}: {file.name} must list {key}, got {found!r:.60}; save the data set again")
    return found


def _counts(name: Path) -> bool:
    described = name.name in _DESCRIBES or _TEXTS.fullmatch(name.name)
    return not described and not any(map(_hidden, name.parts))


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _is_data(name: str) -> bool:
    for suffix in PACKED:
        name = name.removesuffix(suffix)
    return name.endswith(SUFFIXES)


def _split(name: str) -> str | None:
    """Return the split that a file's name contains: `train` for `train-00000-of-00002.parquet`."""
    word = next((part for part in re.split(r"[^a-z]+", name.lower()) if part in _KNOWN), None)
    return _SPLITS.get(word, word) if word else None


def _beside(word: str, name: str) -> str:
    return f"{word.rstrip('/')}/{name}"


def _listed(words: list[Any]) -> str:
    more = f" and {len(words) - _SHOWN_PARTS} more" if len(words) > _SHOWN_PARTS else ""
    return ", ".join(map(str, words[:_SHOWN_PARTS])) + more
