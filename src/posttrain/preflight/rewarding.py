"""Before anything runs: is a run's reward called in a way that is known, and is everything it asks for there?

Its source is parsed, never executed (`data.signatures`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from posttrain.data.assets import reward_signature
from posttrain.data.confining import is_confined
from posttrain.data.refs import Source, local_path, parse_ref
from posttrain.data.signatures import imported_reward
from posttrain.domain.errors import InputError, IntegrityError, NotFoundError
from posttrain.domain.manifest import InputRef, Manifest
from posttrain.domain.requests import secret_fault
from posttrain.domain.rewards import (
    AUTO,
    DIALECTS,
    TURNS,
    Called,
    Signature,
    SignatureError,
    detect,
    refuse_missing,
    refuse_nameless,
)
from posttrain.domain.runspec import may_be_secret
from posttrain.events.admitting import SECRETS, secrets_of
from posttrain.store.trees import tree_listing
from posttrain.workspace.opened import OpenWorkspace


def refuse_missing_secrets(workspace: OpenWorkspace, manifest: Manifest, source: Path) -> None:
    """Refuse a reward that names a secret which is not set here, or which a server does not give to its project.

    Raises:
        InputError: one does.
    """
    project = workspace.ledger.project
    for stage in manifest.stages:
        for ref in stage.inputs.values():
            for name in ref.meta.get("secrets", ()):
                where = f"{source}: stages.{stage.name}: {ref.name}"
                if not may_be_secret(name):  # an edited lock
                    raise InputError(
                        f"{where}: secrets: {name}: programs or stores read it; call it JUDGE_KEY, for example"
                    )
                if is_confined() and name not in secrets_of(project):
                    raise InputError(
                        f"{where}: secrets: {name}: must stand in {SECRETS} of the server as {project}/{name}; ask its "
                        "operator"
                    )
                if manifest.image_of(stage):
                    raise InputError(f"{where}: secrets: {name}: a reward in an image gets no secrets; leave image out")
                if fault := secret_fault(name):
                    raise InputError(f"{where}: {fault}")


@dataclass(frozen=True, slots=True)
class UsedReward:
    """How the function of a planned reward will be called."""

    place: str  # of the function, for errors
    signature: Signature
    dialect: str
    unknown: str = ""  # why it is not known before the stage starts

    @property
    def needs_columns(self) -> bool:
        """Whether it has a parameter that must be a column of the rows."""
        return not set(self.signature.required) <= set(DIALECTS[self.dialect].offers)

    @property
    def asks_turns(self) -> bool:
        """Whether it has a parameter that a column of the rows may take the place of."""
        return TURNS in self.signature.names and DIALECTS[self.dialect].columns

    def refuse_missing(self, columns: Collection[str], data: str) -> None:
        """Raises InputError for a parameter that is neither a column nor part of the call."""
        try:
            refuse_missing(self.signature, self.dialect, columns)
        except SignatureError as error:
            raise InputError(f"{self.place}: {str(error).replace('the data set', data)}") from error


def read_reward(workspace: OpenWorkspace, ref: InputRef, word: str, folder: Path) -> UsedReward:
    """Parse a planned reward, which is in the store or, named by its path, on disk only.

    Args:
        word: how the run file names it.
        folder: where its relative paths start.

    Raises:
        InputError: its signature is of no known dialect, or cannot be called by name.
        NotFoundError, IntegrityError: its bytes are missing or corrupt; names the reward.
    """
    source = str(ref.meta.get("source") or "reward.py")
    entry, wanted = ref.meta.get("entry"), ref.meta.get("dialect") or AUTO
    if parse_ref(word, "reward").source is Source.MODULE:
        place, signature = word, imported_reward(word).signature
    else:
        name, signature = reward_signature(_source(workspace, ref, word, folder, source), source, entry)
        place = f"{source} ({name})"
    if isinstance(signature, str):
        known = "its parameters are" if wanted != AUTO else "how it is called is"
        return UsedReward(
            place, Signature(()), "row", f"{place}: {signature}, so {known} known only when the stage starts"
        )
    try:
        refuse_nameless(signature)
        return UsedReward(place, signature, detect(signature) if wanted == AUTO else wanted)
    except SignatureError as error:
        raise InputError(f"{place}: {error}") from error


def registered_otherwise(workspace: OpenWorkspace, ref: InputRef, called: Called) -> str:
    """What a run file says of a registered reward that its registration says otherwise; empty: nothing."""
    if not called or not ref.name.startswith("reward:"):
        return ""
    meta = workspace.catalog.find(ref.name, "reward").meta
    both = [(str(meta[key]), str(ref.meta[key])) for key in ("entry", "dialect")]
    (entry, used), (dialect, spoken) = both
    if all(one == other for one, other in both):
        return ""
    return f"{ref.name} is registered with entry {entry}, dialect {dialect}; this run calls {used}, dialect {spoken}"


def _source(workspace: OpenWorkspace, ref: InputRef, word: str, folder: Path, source: str) -> bytes:
    parsed = parse_ref(word, "reward")
    if parsed.source is not Source.REGISTRY:
        path = local_path(parsed, folder)
        return (path / source if path.is_dir() else path).read_bytes()
    with bytes_of(ref):
        if ref.form == "file":
            return workspace.blobs.get(str(ref.digest))
        return workspace.blobs.get(tree_listing(workspace.blobs, str(ref.digest))[source].digest)


@contextmanager
def bytes_of(ref: InputRef) -> Iterator[None]:
    """Name the asset whose bytes are missing or corrupt, and what mends it."""
    try:
        yield
    except (IntegrityError, NotFoundError) as error:
        what, made = str(error).partition(";")[0], ref.name.startswith(("channel:", "run:"))
        remedy = "name another model, or restore the store" if made else "register it again with posttrain asset add"
        raise type(error)(f"{ref.name}: {what}; {remedy}") from error
