"""Checks of rewards, and of models on other servers, before a run.

Rewards are checked for their confinement on this machine, imports in their cells, and their parameters.

Workers in other processes test whether the machine confines rewards, and whether the rewards and dataflows of a run can
be imported in their cells. The workspace caches the confinement result until the next boot, and import results for the
same bytes in the same environment.

The dialect of a reward must be known, and the reward's parameters must be available. The reward's source is parsed,
never executed (`data.refs`).
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from posttrain.control.plan import Planned
from posttrain.data.assets import reward_signature
from posttrain.data.refs import Source, imported_reward, is_confined, local_path, parse_ref
from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InfrastructureError, InputError, IntegrityError, NotFoundError, WorkspaceError
from posttrain.domain.jobspec import secret_fault
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
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
from posttrain.domain.roles import servers_of
from posttrain.domain.runspec import may_be_secret
from posttrain.events.ports import SECRETS, secrets_of
from posttrain.store.atomic import make_folder, read_json, write_json
from posttrain.store.trees import tree_listing
from posttrain.workspace.settings import OpenWorkspace

_PROBE = "posttrain.sandbox.probe"
_SECONDS = 120.0  # seconds; limit for a worker on a busy machine
_REMEDY = "run where the kernel allows user namespaces, or trust your rewards: posttrain init --rewards trusted"


@dataclass(frozen=True, slots=True)
class Confinement:
    """The confinement of rewards on this machine."""

    whole: bool  # whether a cell has a separate root, no network and no other processes
    notes: tuple[str, ...]  # descriptions of the missing parts


IN_AN_IMAGE = Confinement(False, ("in an image, rewards can access everything that their job can access",))


def confinement(cache: Path | None = None) -> Confinement:
    """Return the confinement that a test found; the result is cached in the folder `cache` until the next boot.

    Raises:
        InfrastructureError: the worker did not answer.
    """
    memory = cache / "confinement" / _machine() if cache else None
    known = read_json(memory) if memory else None
    if known is None:
        known = _ask()
        if memory:
            with suppress(WorkspaceError):  # a read-only workspace; the next run tests again
                make_folder(memory.parent)
                write_json(memory, known)
    return Confinement(bool(known["whole"]), tuple(known["notes"]))


def check_surroundings(planned: Planned, workspace: OpenWorkspace, source: Path) -> list[str]:
    """Check what a run's rewards and stages need around them: a cell, secrets, imports, and servers of models.

    Returns:
        A line for each thing that a person should consider.

    Raises:
        InputError, InfrastructureError: see the functions that this one calls.
    """
    confined = list(check_confinement(planned, workspace))
    refuse_missing_secrets(workspace, planned.manifest, source)
    check_imports(planned, workspace, source)
    return [*check_servers(planned.manifest, source), *confined]


def check_confinement(planned: Planned, workspace: OpenWorkspace) -> Iterator[str]:
    """Yield notes for a person about the confinement of a run's rewards and `observe` methods.

    Raises:
        InputError: they cannot be confined, and the workspace does not trust them.
    """
    here, imaged = list[str](), list[str]()
    for stage in planned.manifest.stages:
        contract = planned.contracts.get(stage.name)
        turns = contract.params.get("turns") if contract else None
        if contract and ((isinstance(turns, int) and turns > 1) or "reward" in dict(contract.inputs.values())):
            (imaged if planned.manifest.image_of(stage) else here).append(stage.name)
    if here:
        yield from _judged(here, confinement(workspace.root / "cache"), trusted=workspace.trusts_rewards)
    if imaged:
        yield from _judged(imaged, IN_AN_IMAGE, trusted=workspace.trusts_rewards)


def check_imports(planned: Planned, workspace: OpenWorkspace, source: Path) -> None:
    """Import, each in a cell, every reward, judge and dataflow of a run that jobs run outside images.

    Without complete confinement nothing is imported here, and the job reports import errors.

    Raises:
        InputError: an import fails; the message names the stage.
        InfrastructureError: the workers did not answer.
    """
    memory = workspace.root / "cache" / "imports"
    with tempfile.TemporaryDirectory(prefix="posttrain-imports-") as scratch:
        asked = {
            (stage.name, slot): {
                **_import_order(stage, slot, kind, workspace, Path(scratch, f"{stage.name}.{at}")),
                "turns": planned.contracts[stage.name].params.get("turns", 1),
            }
            for stage in planned.manifest.stages
            if stage.name in planned.contracts and not planned.manifest.image_of(stage)
            for at, (slot, (kind, _)) in enumerate(planned.contracts[stage.name].inputs.items())
            if kind in ("reward", "recipe")
        }
        keys = {place: memory / _import_key(order) for place, order in asked.items()}
        asked = {place: order for place, order in asked.items() if not keys[place].exists()}
        if not asked or not confinement(workspace.root / "cache").whole:
            return
        orders = [{key: value for key, value in order.items() if key != "digests"} for order in asked.values()]
        given = json.dumps({"asked": orders, "hidden": [str(workspace.root)]})
        found = _answer(["imports"], given, _SECONDS * len(asked))
    for (stage, _), line in zip(asked, found, strict=True):
        if line:
            raise InputError(f"{source}: stages.{stage}: {line}; fix it, or install the packages that it imports")
    with suppress(WorkspaceError):  # a read-only workspace; the next run imports again
        make_folder(memory)
        for place in asked:
            write_json(keys[place], {})


def _import_order(
    stage: StageManifest, slot: str, kind: str, workspace: OpenWorkspace, scratch: Path
) -> dict[str, Any]:
    """Return the order that makes a worker import the source in a slot; a blob is written to a file of its name."""
    ref = stage.inputs[slot]
    beside = {
        name.removeprefix(f"{slot}/"): other for name, other in stage.inputs.items() if name.startswith(f"{slot}/")
    }
    scratch.mkdir()

    def place(of: InputRef, name: str) -> str:
        found = workspace.catalog.located(of, workspace.root / "cache")
        if isinstance(found, Path):
            return str(found)
        (scratch / name).parent.mkdir(parents=True, exist_ok=True)
        (scratch / name).write_bytes(found)
        return str(scratch / name)

    known = str(ref.meta.get("source") or "reward.py")
    return {
        "name": f"reward {known}",
        "place": place(ref, Path(known).name),
        "entry": ref.meta.get("entry"),
        "dialect": ref.meta.get("dialect") or "auto",
        "source": known,
        "network": list(ref.meta.get("network", ())),
        "secrets": list(ref.meta.get("secrets", ())),
        "files": {name: place(other, f"files/{name}") for name, other in beside.items()},
        "models": sorted(stage.params.get("models", ())),
        "recipe": kind == "recipe",
        "digests": [ref.digest, *(other.digest for other in beside.values())],
    }


def _import_key(order: Mapping[str, Any]) -> str:
    """Return the cache key of an import, computed from the source and everything that the source may import."""
    placed = {key: value for key, value in order.items() if key not in ("place", "files")}
    folders = {path: str(os.stat(path).st_mtime_ns) for path in sorted(set(sys.path)) if os.path.isdir(path)}
    return digest_json([placed, sorted(order["files"]), folders, _machine()]).removeprefix("sha256:")


def _judged(stages: Collection[str], found: Confinement, *, trusted: bool) -> Iterator[str]:
    if not found.whole and not trusted:
        raise InputError(
            f"stages {', '.join(stages)}: rewards and observe must be confined, which is not possible here: "
            f"{'; '.join(found.notes)}; {_REMEDY}"
        )
    if not found.whole:
        yield f"rewards and observe run unconfined, because the workspace trusts them: {'; '.join(found.notes)}"


def _machine() -> str:
    """Return a key that identifies the boot, the container, the user and the interpreter."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    booted = boot.read_text().strip() if boot.exists() else ""
    spaces = [os.readlink(place) for kind in ("user", "pid", "mnt") if os.path.exists(place := f"/proc/self/ns/{kind}")]
    return digest_json([booted, *spaces, os.getuid(), sys.executable, sys.prefix]).removeprefix("sha256:")


def _ask() -> Any:
    return _answer([], "", _SECONDS)


def _answer(words: list[str], given: str, seconds: float) -> Any:
    command = [sys.executable, "-s", "-P", "-m", _PROBE, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True, input=given)
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError, OSError) as error:
        raise InfrastructureError(
            f"the reward worker did not respond: {error}; check the machine's memory, then try again"
        ) from error


def check_servers(manifest: Manifest, source: Path) -> Iterator[str]:
    """Yield a warning for each model on another server, which no manifest can pin.

    Raises:
        InputError: a job in an image would need the server.
    """
    for stage in manifest.stages:
        for field, one in servers_of(stage.params).items():
            if manifest.image_of(stage):
                raise InputError(
                    f"{source}: stages.{stage.name}.{field}: a job in an image has no network, so it cannot reach "
                    f"{one['url']}; remove the field image, or name a model of this project"
                )
            named = "a model" if one.get("model", "model") == "model" else f"the model {one['model']}"
            yield (
                f"{stage.name}: {field} is {named} at {one['url']}; the manifest does not pin it, so another run may "
                "have another result"
            )
            where = urlsplit(one["url"])
            if one.get("key") and where.scheme == "http" and where.hostname not in ("localhost", "127.0.0.1"):
                yield f"{stage.name}: {field}: {one['key']} is sent unencrypted to {one['url']}; use https"


def refuse_missing_secrets(workspace: OpenWorkspace, manifest: Manifest, source: Path) -> None:
    """Reject a reward's secret or a server's key that is not set here, or that is not assigned to the run's project.

    Raises:
        InputError: a reward has such a secret, or a stage names a server with such a key.
    """
    for stage in manifest.stages:
        named = [(ref.name, name) for ref in stage.inputs.values() for name in ref.meta.get("secrets", ())]
        named += [(field, str(one["key"])) for field, one in servers_of(stage.params).items() if one.get("key")]
        for owner, name in named:
            if fault := _secret_fault(workspace.ledger.project, name, boxed=manifest.image_of(stage) is not None):
                raise InputError(f"{source}: stages.{stage.name}: {owner}: {fault}")


def _secret_fault(project: str, name: str, *, boxed: bool) -> str:
    if not may_be_secret(name):  # possible only in an edited lock
        return f"secrets: {name}: other programs or stores read this variable; use another name, such as JUDGE_KEY"
    if is_confined() and name not in secrets_of(project):
        return f"secrets: {name}: the server's {SECRETS} must contain {project}/{name}; ask the server's operator"
    if boxed:
        return f"secrets: {name}: a job in an image gets no secrets; remove the field image or the secret"
    return secret_fault(name)


@dataclass(frozen=True, slots=True)
class UsedReward:
    """The call of a planned reward's function."""

    place: str  # the function's name in errors
    signature: Signature
    dialect: str
    unknown: str = ""  # the reason why the call is unknown before the stage starts

    @property
    def needs_columns(self) -> bool:
        """Whether the function has a parameter that must be a column of the rows."""
        return not set(self.signature.required) <= set(DIALECTS[self.dialect].offers)

    @property
    def asks_turns(self) -> bool:
        """Whether the function has the parameter `turns`, which a column of the rows may replace."""
        return TURNS in self.signature.names and DIALECTS[self.dialect].columns

    def refuse_missing(self, columns: Collection[str], data: str) -> None:
        """Raise InputError for a parameter that is not a column and not provided by the dialect."""
        try:
            refuse_missing(self.signature, self.dialect, columns)
        except SignatureError as error:
            raise InputError(f"{self.place}: {str(error).replace('the data set', data)}") from error


def read_reward(workspace: OpenWorkspace, ref: InputRef, word: str, folder: Path) -> UsedReward:
    """Parse a planned reward, which is in the store or, if the run file contains its path, only on disk.

    Args:
        word: the reward's ref in the run file.
        folder: the folder at which relative paths start.

    Raises:
        InputError: the signature has no known dialect, or the function cannot be called by name.
        NotFoundError: the reward's bytes are missing; the message names the reward.
        IntegrityError: the reward's bytes are corrupt; the message names the reward.
    """
    source = str(ref.meta.get("source") or "reward.py")
    entry, wanted = ref.meta.get("entry"), ref.meta.get("dialect") or AUTO
    if parse_ref(word, "reward").source is Source.MODULE:
        place, signature = word, imported_reward(word).signature
    else:
        name, signature = reward_signature(_source(workspace, ref, word, folder, source), source, entry)
        place = f"{source} ({name})"
    if isinstance(signature, str):
        known = "its parameters are" if wanted != AUTO else "its dialect is"
        return UsedReward(
            place, Signature(()), "row", f"{place}: {signature}, so {known} unknown until the stage starts"
        )
    try:
        refuse_nameless(signature)
        return UsedReward(place, signature, detect(signature) if wanted == AUTO else wanted)
    except SignatureError as error:
        raise InputError(f"{place}: {error}") from error


def registered_otherwise(workspace: OpenWorkspace, ref: InputRef, called: Called) -> str:
    """Return how a run file's call of a registered reward differs from the registration; "" if it does not differ."""
    if not called or not ref.name.startswith("reward:"):
        return ""
    meta = workspace.catalog.find(ref.name, "reward").meta
    (entry, used), (dialect, spoken) = ((str(meta[key]), str(ref.meta[key])) for key in ("entry", "dialect"))
    if (entry, dialect) == (used, spoken):
        return ""
    return f"{ref.name} is registered with entry {entry}, dialect {dialect}; this run calls {used}, dialect {spoken}"


def _source(workspace: OpenWorkspace, ref: InputRef, word: str, folder: Path, source: str) -> bytes:
    parsed = parse_ref(word, "reward")
    if parsed.source is not Source.REGISTRY:
        path = local_path(parsed, folder)
        return (path / source if path.is_dir() else path).read_bytes()
    with bytes_of(ref):
        whole = ref.form == "file"
        digest = ref.digest if whole else tree_listing(workspace.blobs, str(ref.digest))[source].digest
        return workspace.blobs.get(str(digest))


@contextmanager
def bytes_of(ref: InputRef) -> Iterator[None]:
    """Add the asset whose bytes are missing or corrupt, and the remedy, to an error in the block."""
    try:
        yield
    except (IntegrityError, NotFoundError) as error:
        what, made = str(error).partition(";")[0], ref.name.startswith(("channel:", "run:"))
        remedy = "name another model, or restore the store" if made else "register it again with posttrain asset add"
        raise type(error)(f"{ref.name}: {what}; {remedy}") from error
