"""A model by the words that a person has for it: a channel, a run, a run's stage, or a ref of run.yaml."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from posttrain.app.workspace import Workspace
from posttrain.control.lineage import MadeModel, made_model
from posttrain.data.refs import AssetRef, Source, is_confined, local_path, parse_ref
from posttrain.domain.errors import NotFoundError, PosttrainError, nearest
from posttrain.domain.manifest import InputRef
from posttrain.store.trees import materialise

_HEADS = ("model", "channel", "run", "hf")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model that somebody named, pinned to its bytes."""

    word: str  # as run.yaml would name it: channel:prod, run:sort/sft, model:base, hf:org/name@revision, a path
    ref: AssetRef
    pinned: InputRef
    made: MadeModel | None  # None: no run of this workspace made it

    @property
    def digest(self) -> str:
        """Of its tree of files."""
        return str(self.pinned.digest)

    def folder(self, workspace: Workspace) -> Path:
        """Its files, in Hugging Face format; not to be written to.

        Raises:
            NotFoundError, IntegrityError: bytes are missing or corrupt.
        """
        if self.ref.on_disk:
            return local_path(self.ref, Path.cwd())
        return materialise(workspace.blobs, self.digest, workspace.root / "cache")


def named_model(workspace: Workspace, text: str) -> NamedModel:
    """The model that `prod`, `prod@3`, `sort-b0ed9b49`, `sort/sft` or a ref such as `model:base` means here.

    A channel goes before a run of the same name, and a run before a folder of it; relative paths start here.

    Raises:
        NotFoundError: nobody knows it. InputError: ill-formed, or a folder that is no model.
    """
    word = model_word(workspace, text)
    ref = parse_ref(word, "model")
    if not ref.made:
        return NamedModel(word, ref, workspace.catalog.resolver(Path.cwd())("model", word), None)
    try:
        made = made_model(workspace.stores, ref)
    except NotFoundError as error:
        if word == text or ref.source is Source.CHANNEL:  # there is the channel, and the error says what it has
            raise
        hint = nearest(text, workspace.ledger.channels()) or " (there are no channels yet)"
        raise NotFoundError(f"model {text!r}: no channel{hint}, and {error}") from error
    return NamedModel(word, ref, made.pinned(word), made)


def model_word(workspace: Workspace, text: str) -> str:
    """How run.yaml would name what a person calls `text`."""
    if text.partition(":")[0] in _HEADS or text.startswith((".", "~", "/")):
        return text
    head = "channel" if text.partition("@")[0] in workspace.ledger.channels() else "run"
    if head == "run" and not is_confined() and Path(text).is_dir() and not _is_run(workspace, text.partition("/")[0]):
        return f"./{text}"
    return f"{head}:{text}"


def measured_word(workspace: Workspace, word: str) -> str:
    """What `compare` calls a model folder: the digest of its files, which evaluations of it have; else the word."""
    path = model_word(workspace, word)
    return named_model(workspace, path).digest if path.startswith((".", "~", "/")) else word


def _is_run(workspace: Workspace, word: str) -> bool:
    try:
        return bool(workspace.ledger.find_run(word))
    except PosttrainError:  # no run, or several that begin so
        return False
