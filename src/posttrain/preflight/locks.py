"""Files with locked manifests, which the command `lock` writes and the command `run` checks and runs."""

import json
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from posttrain.control.channels import check_manifest, policy_of
from posttrain.control.plan import Planned
from posttrain.data.catalog import external_versions
from posttrain.data.refs import UNCONFINED, is_confined, refuse_afar
from posttrain.domain.canonical import canonical_json
from posttrain.domain.errors import InputError, NotFoundError, WorkspaceError
from posttrain.domain.ids import LOCK_SUFFIX, is_lock
from posttrain.domain.kinds import Driver, StageContract, kind_of
from posttrain.domain.manifest import Manifest, StageManifest, manifest_from_json
from posttrain.domain.validation import explain
from posttrain.domain.waits import wait_contract
from posttrain.execution.ports import called, present_code
from posttrain.preflight.confinement import check_servers, refuse_missing_secrets
from posttrain.preflight.data import located
from posttrain.preflight.outlook import look_ahead, refuse_hopeless
from posttrain.preflight.placements import (
    check_models,
    refuse_image,
)
from posttrain.workspace.settings import OpenWorkspace

RECIPE = "recipe"


def refuse_lock(path: Path) -> None:
    """Reject a locked manifest where a run file is expected.

    Raises:
        InputError: the file is a locked manifest.
    """
    if is_lock(path):
        raise InputError(f"{path}: is a locked manifest, not a run file; run it with posttrain run {path}")


def write_lock(manifest: Manifest, path: Path) -> None:
    """Write the canonical manifest to a file, whose SHA-256 is the manifest's digest.

    Raises:
        InputError: the file's name lacks the suffix of locks, so `posttrain run` would not recognise the file.
        WorkspaceError: the path cannot be written.
    """
    if not is_lock(path):
        raise InputError(f"{path}: a locked manifest must be named *{LOCK_SUFFIX}; choose such a name with --out")
    try:
        path.write_bytes(canonical_json(manifest.to_json()))
    except OSError as error:
        raise WorkspaceError(f"{path}: cannot be written: {error.strerror}; choose another place with --out") from error


def read_lock(path: Path, workspace: OpenWorkspace, *, again: bool = False) -> Planned:
    """Return a locked manifest, after checking it against this workspace and this version of Posttrain.

    Args:
        again: whether to start another run even if a run of the manifest exists.

    Raises:
        InputError: the file is not a manifest, or does not meet its channel's policy. If the manifest needs a new run:
            it was locked with other engine sources, a trainer rejects its parameters, its placement is not possible
            here, its executor is not installed, or no run could meet its budgets and gates.
        NotFoundError: an asset's bytes are not in this workspace.
    """
    try:
        manifest = manifest_from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; check the path") from error
    except ValidationError as error:
        raise explain(error, str(path), Manifest) from error
    except (ValueError, AttributeError) as error:
        raise InputError(f"{path}: is not a locked manifest: {error}; write one with posttrain lock") from error
    there = bool(workspace.ledger.runs(manifest_digest=manifest.digest))
    if again or not there:
        _refuse_unmet(manifest, path, workspace)
    if there and not again:  # the existing run continues
        return Planned(manifest, {})
    workspace.refuse_missing_executor()
    refuse_image(manifest.image, workspace, path)
    refuse_missing_secrets(workspace, manifest, path)
    planned = Planned(manifest, _check_lock(manifest, path, workspace))
    ahead = look_ahead(planned, None, workspace, path, verified=False)
    try:
        refuse_hopeless(manifest, ahead, path)
    except InputError as error:
        raise InputError(f"{error} in the run file, and lock it again") from error
    return replace(planned, warnings=ahead.warnings)


def _refuse_other_outputs(stage: StageManifest, contract: StageContract) -> None:
    """Reject a stage whose declared outputs differ from those of its kind; gates would read added measurements."""
    wanted = dict(contract.outputs)
    if stage.outputs != wanted:
        raise InputError(
            f"outputs: a stage of kind {stage.kind} must have {', '.join(wanted) or 'none'}, got "
            f"{', '.join(stage.outputs) or 'none'}; lock the run file again"
        )


def _refuse_unmet(manifest: Manifest, path: Path, workspace: OpenWorkspace) -> None:
    """Reject a lock that was made under a different policy than the channel's, or was edited since."""
    policy = policy_of(workspace.stores, manifest.release.channel) if manifest.release else None
    if policy is not None:
        with located(f"{path}"):
            check_manifest(manifest, policy)


def _foreign(manifest: Manifest, workspace: OpenWorkspace) -> set[str]:
    """Return the manifest's digests that the project has not recorded, although the store may contain their bytes."""
    named = {str(ref.digest) for _, _, ref in manifest.assets()}
    known = {artifact.digest for artifact in workspace.ledger.artifacts(*named)}
    return {
        digest for digest in named - known if not external_versions(workspace.ledger.assets_by_digest(digest), digest)
    }


def _check_lock(manifest: Manifest, path: Path, workspace: OpenWorkspace) -> dict[str, StageContract]:
    """Check a lock's code, stages and assets; return the contracts of its stages."""
    for name, digest in manifest.code.items():
        with located(f"{path}"):
            present = present_code(name, workspace.jobs.trainers)
        if present != digest:
            raise InputError(
                f"{path}: the sources, libraries or platform of {called(name)} differ from those in the lock "
                f"({digest[:19]}…); lock the run file again, or install the locked versions"
            )
    contracts: dict[str, StageContract] = {}
    for each in manifest.stages:
        if each.trainer in manifest.code:
            with located(f"{path}: stages.{each.name}"):
                contracts[each.name] = workspace.jobs.trainers[each.trainer].check(each.kind, each.params)
                _refuse_other_outputs(each, contracts[each.name])
        elif kind_of(each.kind).driver is Driver.WAIT:
            contracts[each.name] = wait_contract(each.params, f"{path}: stages.{each.name}")
    foreign = _foreign(manifest, workspace) if is_confined() else set()
    for stage, slot, ref in manifest.assets():
        digest = str(ref.digest)
        if slot == RECIPE and manifest.image is None:
            refuse_afar(f"{path}: stages.{stage}: {UNCONFINED}")
        if digest in foreign or not (
            workspace.blobs.has(digest) or external_versions(workspace.ledger.assets_by_digest(digest), digest)
        ):
            raise NotFoundError(
                f"{path}: stages.{stage}.{slot}: {ref.name} ({ref.digest}) is not in this workspace; "
                "register it with posttrain asset add"
            )
    check_models(manifest, contracts, workspace, path)
    tuple(check_servers(manifest, path))  # the warnings of both were reported at locking
    return contracts
