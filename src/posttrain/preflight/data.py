"""Checks of data sets before a run: fit to base model and stages, lengths, repeated rows, contamination, counts.

A successful check is cached in the workspace under a key computed from the check's inputs, so a repeated submission
does not check again.

The lengths of a stage's documents are counted in tokens by the tokenizer of the stage's initial model, if there is one.
A model that the run initialises has no tokenizer yet. Its tokenizer will have one token for every character, three for
the marks of a chat turn and one for the end of an answer, and lengths are counted accordingly. For a model whose
tokenizer cannot be read here, a quarter of that number is assumed, as for a subword vocabulary.

The data sets of a run are checked for repeated rows, and suites for prompts that are in the training data. The number
of documents in each data set of a run file is determined before any job runs.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from posttrain.control.plan import Count, Planned
from posttrain.control.release_plan import ADDED, dataset_slots, selects
from posttrain.data.assets import shapes_of, shapes_on_disk
from posttrain.data.catalog import external_versions, local_copy
from posttrain.data.files import data_files, read_file
from posttrain.data.fit import (
    PlanTokenizer,
    Read,
    check_answers,
    check_characters,
    check_demonstrations,
    check_pairs,
    check_prompts,
    check_responses_differ,
    context_length,
    open_tokenizer,
)
from posttrain.data.refs import local_path, parse_ref
from posttrain.data.rows import (
    Row,
    Rows,
    canonical_row,
    contamination,
    distinct_items,
    documents,
    has_answer,
    prompt_text,
    read_rows,
    repeated_rows,
    stored_files,
)
from posttrain.domain import rendering
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.kinds import DocumentUnit, RowNeeds, compares, item_id, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.rewards import TURNS, scored_slot
from posttrain.domain.runspec import RunSpec
from posttrain.preflight.confinement import bytes_of, read_reward, registered_otherwise
from posttrain.store.atomic import make_folder, write_atomic
from posttrain.store.trees import materialise, scratch, tree_listing
from posttrain.workspace.settings import OpenWorkspace

_FORM = "posttrain.fit/3"  # a changed value invalidates the cache
_LOOKED_AT = 200_000  # maximum rows of one data set that are checked; the job checks the rest
_MEASURED = 256  # about this many evenly spaced rows of a data set are measured
_TURN, _BEGUN, _END = 3, 2, 1  # tokens for a chat turn's marks, an answer's prefix and an answer's end
READ_AT_MOST = 200_000  # maximum rows of one data set that a plan reads to compare prompts


@dataclass(frozen=True, slots=True)
class _Base:
    """The base model's tokenizer and context length."""

    ref: InputRef | None  # None: the run initialises the model
    tokenizer: PlanTokenizer | None = None
    context: int | None = None


@dataclass(slots=True)
class _Shelf:
    """The data sets and base models of a run, each opened once."""

    workspace: OpenWorkspace
    spec: RunSpec
    source: Path  # the run file
    rows: dict[str, Rows] = field(default_factory=dict)
    bases: dict[str, _Base] = field(default_factory=dict)

    def base(self, ref: InputRef | StageManifest) -> _Base:
        if isinstance(ref, StageManifest):
            return _Base(None, context=_context_of(ref))
        if str(ref.digest) not in self.bases:
            with located(f"{self.source}: model"), bytes_of(ref):
                read = model_files(self.workspace, ref, self.spec.model, self.source.parent).read
                self.bases[str(ref.digest)] = _Base(ref, open_tokenizer(read), context_length(read))
        return self.bases[str(ref.digest)]

    def data(self, ref: InputRef, word: str) -> Rows:
        if str(ref.digest) not in self.rows:
            self.rows[str(ref.digest)] = read_dataset(self.workspace, ref, self.spec.data[word], self.source.parent)
        return self.rows[str(ref.digest)]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files of a model in the store or on disk."""

    sizes: Mapping[str, int]  # path in the model's folder → bytes
    read: Read


def model_files(workspace: OpenWorkspace, ref: InputRef, word: str | None, folder: Path) -> ModelFiles:
    """Return the files of a planned base model, which is in the store or, if the run file names a path, only on disk.

    Args:
        word: the model's ref in the run file; None: the model is in the store.
        folder: the folder at which relative paths start.

    Raises:
        NotFoundError: the model's listing is missing.
        IntegrityError: the model's listing is corrupt.
    """
    parsed = parse_ref(word, "model") if word is not None else None
    if parsed is not None and parsed.on_disk:
        root = local_path(parsed, folder)
        sizes = {path.name: path.stat().st_size for path in root.iterdir() if path.is_file()}
        return ModelFiles(sizes, lambda name: (root / name).read_bytes() if (root / name).is_file() else None)
    listing = tree_listing(workspace.blobs, str(ref.digest))
    sizes = {name: file.size for name, file in listing.items()}
    return ModelFiles(sizes, lambda name: workspace.blobs.get(listing[name].digest) if name in listing else None)


def weight_shapes(workspace: OpenWorkspace, ref: InputRef, word: str | None, folder: Path) -> dict[str, list[int]]:
    """Return the shapes of a planned base model's tensors; the arguments and errors are those of `model_files`."""
    parsed = parse_ref(word, "model") if word is not None else None
    if parsed is not None and parsed.on_disk:
        return shapes_on_disk(local_path(parsed, folder))
    return shapes_of(workspace.blobs, tree_listing(workspace.blobs, str(ref.digest)))


def word_of(ref: InputRef, model: str | None) -> str | None:
    """Return the ref in the run file of a model whose files may be outside the store; None: they are in the store.

    Args:
        model: the base model's ref in the run file, which is the only model ref that may be a path.
    """
    if ref.name.startswith("hf:"):
        return ref.name
    return model if ref.name.startswith("path:") else None


def read_dataset(workspace: OpenWorkspace, ref: InputRef, word: str | None, folder: Path) -> Rows:
    """Return the rows of a planned data set, which is in the store or, if the run file names a path, only on disk.

    Args:
        word: the data set's ref in the run file; None: the data set is in the store.
        folder: the folder at which relative paths start.

    Raises:
        NotFoundError: bytes are missing; the message names the data set.
        IntegrityError: bytes are corrupt; the message names the data set.
    """
    parsed = parse_ref(word, "dataset") if word is not None else None
    if parsed is not None and parsed.on_disk:
        return read_rows(data_files(local_path(parsed, folder), str(parsed)), name=ref.name)
    with scratch(_scratch_place(workspace), "posttrain-plan-") as scratched:
        return read_rows(_stored(workspace, ref, scratched), name=ref.name)


def _stored(workspace: OpenWorkspace, ref: InputRef, scratched: Path) -> Path:
    """Return the path of a stored or external data set, which is a file or a folder of files."""
    with bytes_of(ref):
        if ref.form == "tree":
            return materialise(workspace.blobs, str(ref.digest), scratched)
        versions = external_versions(workspace.ledger.assets_by_digest(str(ref.digest)), str(ref.digest), ref.name)
        if not versions or workspace.blobs.has(str(ref.digest)):
            workspace.blobs.fetch(str(ref.digest), scratched / "rows")
            return scratched / "rows"
    return local_copy(versions, scratched if workspace.read_only else workspace.root / "cache")


def first_row(workspace: OpenWorkspace, ref: InputRef) -> Row:
    """Return the first row of a registered data set; empty if it has no rows.

    Raises:
        NotFoundError: the bytes are missing.
        IntegrityError: the bytes are corrupt.
    """
    with scratch(_scratch_place(workspace), "posttrain-row-") as scratched:
        first = next(iter(stored_files(_stored(workspace, ref, scratched)).values()))
        row = next(read_file(first, ref.name), None)
        return {} if row is None else canonical_row(row, ref.name, 1)


def _scratch_place(workspace: OpenWorkspace) -> Path:
    """Return a folder in the workspace, whose disk has room for the data, or a temporary one if it is read-only."""
    return Path(tempfile.gettempdir()) if workspace.read_only else workspace.root / "cache" / "scratch"


@contextmanager
def located(place: str) -> Iterator[None]:
    """Prefix an error in the block with the place of its cause in a file; the error's class stays the same."""
    try:
        yield
    except (InputError, IntegrityError) as error:
        raise type(error)(f"{place}: {error}") from error


def check_fit(planned: Planned, spec: RunSpec, workspace: OpenWorkspace, source: Path) -> list[str]:
    """Check that every data set meets its stage's needs; return a line for each thing that cannot be checked yet.

    Args:
        source: the run file.

    Raises:
        InputError: a row does not fit; the message contains the file, field, data set, row, constraint and value.
        NotFoundError: bytes of an asset are missing; the message names the file, the field and the asset.
        IntegrityError: bytes of an asset are corrupt; the message names the file, the field and the asset.
    """
    shelf, found = _Shelf(workspace, spec, source), list[str]()
    for stage in planned.manifest.stages:
        contract, model = planned.contracts.get(stage.name), stage.inputs.get("model")
        if contract is None or (model and model.source == "channel"):  # checked with the candidate's evaluation
            continue
        base = origin(planned.manifest, stage, "model")
        for slot, needs in contract.rows.items():
            place = f"{source}: stages.{stage.name}.{slot}"
            found += _check(shelf, base, stage.inputs[slot], contract.inputs[slot][1], needs, place)
        found += _check_rewards(shelf, stage, contract.inputs)
    return [*dict.fromkeys(found)]


def _check_rewards(shelf: _Shelf, stage: StageManifest, inputs: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    """Check that the data of a stage has the columns that calls of the stage's rewards need."""
    for slot, (kind, word) in inputs.items():
        if kind != "reward":
            continue
        with located(f"{shelf.source}: rewards.{word}"):
            written, ref = shelf.spec.rewards[word], stage.inputs[slot]
            used = read_reward(shelf.workspace, ref, written.ref, shelf.source.parent)
            if otherwise := registered_otherwise(shelf.workspace, ref, written.called):
                yield f"rewards.{word}: {otherwise}"
            if used.unknown:
                yield f"rewards.{word}: {used.unknown}"
            elif (used.needs_columns or used.asks_turns) and (rows := scored_slot(slot)) in stage.inputs:
                data = stage.inputs[rows]
                columns = {name for row in shelf.data(data, inputs[rows][1]) for name in row}
                used.refuse_missing(columns, data.name)
                if used.asks_turns and TURNS in columns:
                    yield (
                        f"rewards.{word}: {used.place} receives the column turns of {data.name}, not the turns of the "
                        "policy; rename the column to receive the policy's turns"
                    )


def _check(
    shelf: _Shelf, begun: InputRef | StageManifest, data: InputRef, word: str, needs: RowNeeds, place: str
) -> Iterator[str]:
    model = begun.digest if isinstance(begun, InputRef) else _context_of(begun)
    key = {"form": _FORM, "model": model, "data": data.digest, "needs": asdict(needs)}
    memory = shelf.workspace.root / "cache" / "fits" / digest_json(key).removeprefix("sha256:")
    if memory.exists():
        return
    with located(place):
        rows = shelf.data(data, word)
    used = rows[: needs.first]
    base, looked_at = shelf.base(begun), used[:_LOOKED_AT]
    with located(place):
        try:
            if needs.labels:
                rendering.check_labels(used, data.name, both=needs.first is None)
            _check_rows(looked_at, base, data.name, needs)
        except InputError as error:  # name the file that contains the row
            raise type(error)(rows.located(str(error), data.name)) from error
    if len(looked_at) < len(used):
        yield f"{data.name}: rows beyond {_LOOKED_AT} are checked when the job starts"
    elif base.ref and not base.tokenizer:
        yield f"{base.ref.name} has no tokenizer.json, so the lengths of {data.name} are checked when the job starts"
    else:
        with suppress(WorkspaceError):  # a plan also works in a read-only workspace, without a cache
            make_folder(memory.parent)
            write_atomic(memory, b"")


def _context_of(stage: StageManifest) -> int | None:
    """Return the context length of the model that a stage initialises."""
    context = stage.params.get("context_length") if kind_of(stage.kind).from_nothing else None
    return context if isinstance(context, int) else None


def _check_rows(rows: list[Row], base: _Base, name: str, needs: RowNeeds) -> None:
    if needs.answer:
        check_answers(rows, name)
    if needs.distinct:
        distinct_items(rows, name, whole=needs.whole)
    if needs.pairs:
        check_responses_differ(rows, name)
    if base.tokenizer and needs.pairs:
        check_pairs(rows, base.tokenizer, name=name, context=base.context, longest=needs.max_length)
    elif base.tokenizer and needs.learn:
        limits = {"context": base.context, "longest": needs.max_length}
        check_demonstrations(rows, base.tokenizer, name=name, **limits, labelled=needs.labels)
    elif base.tokenizer:
        check_prompts(rows, base.tokenizer, name=name, context=base.context, reserve=needs.reserve)
    elif base.ref is None and base.context and not (needs.pairs or needs.learn):
        check_characters(rows, name=name, context=base.context, reserve=needs.reserve)


def base_model(manifest: Manifest, stage: StageManifest) -> InputRef | None:
    """Return the registered model from which the stage's model is trained; None: the run initialises the model."""
    ref = origin(manifest, stage, "model")
    return ref if isinstance(ref, InputRef) else None


def origin(manifest: Manifest, stage: StageManifest, slot: str) -> InputRef | StageManifest:
    """Return the origin of a stage's model: a registered model, or the stage that initialises the model."""
    while slot in stage.inputs and stage.inputs[slot].source == "stage":
        stage, slot = manifest.stage(stage.inputs[slot].name), "model"
    return stage.inputs.get(slot, stage)


class Lengths:
    """The lengths of documents in tokens, by stage; tokenizers are opened once."""

    def __init__(self, planned: Planned, spec: RunSpec | None, workspace: OpenWorkspace, source: Path) -> None:
        self._planned, self._spec, self._workspace, self._source = planned, spec, workspace, source
        self._opened: dict[str, PlanTokenizer | None] = {}

    def counted(self, stage: StageManifest) -> bool:
        """Return whether the tokenizer of the stage's model counts the stage's tokens."""
        return self._tokenizer(stage) is not None

    def of_rows(self, stage: StageManifest, slot: str, rows: Sequence[Row]) -> tuple[float, float] | None:
        """Return the mean and maximum length, in tokens, of a data set's documents, from a sample of rows.

        A document is the prompt with the answer if the stage trains on the answer, or else the prompt alone.
        """
        needs, parts = self._planned.contracts[stage.name].rows.get(slot), kind_of(stage.kind).sizes
        if needs is None:  # an installed kind that declares no needs for rows
            needs = RowNeeds(learn="completion" in parts, pairs="chosen" in parts)
        tokenizer, seen = self._tokenizer(stage), rows[:: max(1, len(rows) // _MEASURED)]
        found = [length for row in seen for length in _lengths(row, needs, tokenizer)]
        return (sum(found) / len(found), max(found)) if found else None

    def _tokenizer(self, stage: StageManifest) -> PlanTokenizer | None:
        ref = base_model(self._planned.manifest, stage)
        if ref is None or ref.digest is None:
            return None
        if ref.digest not in self._opened:
            try:
                word = self._spec.model if self._spec else None
                files = model_files(self._workspace, ref, word, self._source.parent)
                self._opened[ref.digest] = open_tokenizer(files.read)
            except (InputError, NotFoundError, IntegrityError, OSError):  # `check_fit` reports the error
                self._opened[ref.digest] = None
        return self._opened[ref.digest]


def _lengths(row: Row, needs: RowNeeds, tokenizer: PlanTokenizer | None) -> Iterator[float]:
    """Yield the lengths of a row's documents; none if the row cannot be rendered, which `check_fit` reports."""
    try:
        if tokenizer is None:
            yield from _characters(row, needs)
        elif needs.pairs:
            for prompt, chosen, rejected in rendering.pairs(tokenizer, [row], name=""):
                yield len(prompt) + (len(chosen) + len(rejected)) / 2
        elif needs.learn:
            for turns in rendering.examples(tokenizer, [row], name="", labelled=needs.labels):
                yield from [len(prompt) + len(answer) for prompt, answer in turns]
        else:
            yield from map(len, rendering.prompts(tokenizer, [row], name=""))
    except Exception:  # a template can raise any exception
        return


def _characters(row: Row, needs: RowNeeds) -> Iterator[float]:
    prompt, messages = row.get("prompt"), row.get("messages")
    if needs.pairs:
        answers = sum(_size(row.get(column)) + _END for column in ("chosen", "rejected")) / 2
        yield _size(prompt) + _begun(prompt) + answers
    elif needs.labels and row.get("completion") is None:
        yield from [_size(prompt) + _begun(prompt) + _size(row.get(column)) + _END for column in ("chosen", "rejected")]
    elif needs.learn and (prompt is None or row.get("completion") is None) and messages is not None:
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                yield _size(messages[:at]) + _BEGUN + _size(message) + _END
    elif needs.learn:
        yield _size(prompt) + _begun(prompt) + _size(row.get("completion") or row.get("text")) + _END
    else:
        asked: Any = prompt if prompt is not None else messages
        yield _size(asked) + _begun(asked)


def _begun(prompt: Any) -> int:
    return 0 if prompt is None or isinstance(prompt, str) else _BEGUN


def _size(value: Any) -> int:
    """Return the length of a text, or of messages with the marks of turns; the caller adds the marks of an answer."""
    if value is None:
        return 0
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return len(str(value.get("content") or ""))
    answer = len(value) == 1 and value[0].get("role") == "assistant"
    return sum(len(str(message.get("content") or "")) + (0 if answer else _TURN) for message in value)


def registered_rows(workspace: OpenWorkspace, ref: InputRef) -> int | None:
    """Return the number of rows of a registered data set; None if the data set is not registered."""
    metas = [asset.meta for asset in workspace.ledger.assets_by_digest(str(ref.digest)) if "rows" in asset.meta]
    return int(metas[0]["rows"]) if metas else None


def counter(workspace: OpenWorkspace, spec: RunSpec, source: Path) -> Count:
    """Return a function that counts the documents in a data set of a run file.

    Args:
        source: the run file; relative paths start at its folder.
    """

    def count(ref: InputRef, word: str, unit: DocumentUnit) -> int:
        known = registered_rows(workspace, ref) if unit == "row" else None
        return known or documents(read_dataset(workspace, ref, spec.data[word], source.parent), unit)

    return count


@dataclass(frozen=True, slots=True)
class Dataset:
    """What a plan uses of one data set."""

    rows: int | None
    read: tuple[Row, ...] | None  # None: there are too many rows, or the bytes are elsewhere

    @property
    def items(self) -> int | None:
        """The number of items if this is a suite: repeated rows count once; rows that were not read all count."""
        return self.rows if self.read is None else len({prompt_text(row) for row in self.read})

    @property
    def ids(self) -> Iterator[str]:
        """The ids of a suite's items, as far as rows were read."""
        for row in self.read or ():
            answer = row.get("answer")
            yield item_id(prompt_text(row), answer if isinstance(answer, str) else None)

    @property
    def answered(self) -> int | None:
        """The number of items that have an answer with which a response can be compared."""
        return self.rows if self.read is None else len({prompt_text(row) for row in self.read if has_answer(row)})


def read_datasets(planned: Planned, spec: RunSpec | None, workspace: OpenWorkspace, source: Path) -> dict[str, Dataset]:
    """Return digest → data set for every data set that a stage reads."""
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
    read = tuple(read_dataset(workspace, ref, word, base))
    return Dataset(len(read), read)


def unanswered(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """Yield one line for each suite of a run file that has rows without an answer, which only a reward scores."""
    for stage in planned.manifest.stages:
        if not stage.measures or stage.name.startswith(ADDED):
            continue
        for slot, ref in dataset_slots(stage):
            data, suite = datasets[str(ref.digest)], slot.removeprefix("suites.")
            if data.items is None or data.answered is None or data.answered == data.items:
                continue
            names = [name for name in planned.contracts[stage.name].metrics if compares(name)]
            mine = [name for name in names if name.rpartition("/")[0] == suite]
            rest = f"measured only on the other {data.answered}" if data.answered else "not measured"
            told = f"{', '.join(mine)} {'is' if len(mine) == 1 else 'are'} {rest}"
            count = f"{data.items - data.answered} of {data.items} items of {ref.name}"
            yield f"{stage.name}: {count} have no answer to compare with, so {told}"


def wide_steps(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """Yield one line for each training stage whose step takes more documents than the stage's data set has."""
    for stage in planned.manifest.stages:
        length = planned.contracts[stage.name].length if stage.name in planned.contracts else None
        if length is None:
            continue
        ref = stage.inputs[length.slot]
        data = datasets[str(ref.digest)]
        count = data.rows if data.read is None else documents(data.read, length.unit)
        if count is not None and count < length.per_step:
            yield (
                f"{stage.name}: {length.field} is {length.per_step}, and {ref.name} has {count} documents, "
                f"so every step repeats some of them; lower {length.field}"
            )


def repeated(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """Yield one line for each evaluation suite with repeated rows."""
    suites = [ref for stage in planned.manifest.stages if stage.measures for _, ref in dataset_slots(stage)]
    for ref in {ref.digest: ref for ref in suites}.values():
        found = datasets[str(ref.digest)]
        if found.rows and found.items is not None and found.items < found.rows:
            yield repeated_rows(ref.name, found.rows, found.items)


def seen_in_training(planned: Planned, datasets: Mapping[str, Dataset]) -> Iterator[str]:
    """Yield one warning for each evaluation suite that contains prompts of a training set."""
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
                little = "; scores on this suite can overstate the quality on unseen prompts" if report.found else ""
                yield f"{suite.name} against {source.name}: {report}{little}"
