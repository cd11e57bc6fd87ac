"""The verbs of `Control` for data sets, models and rewards, and for projects, members and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.api.verbs import FileRef, RunFile, Verbs, verb
from posttrain.domain.ids import Name, Principal, Role, TokenId, Word
from posttrain.domain.overrides import Override

if TYPE_CHECKING:
    from posttrain.api.values import (
        Asked,
        Curve,
        Exported,
        Imported,
        Marked,
        Point,
        Ranked,
        Submitted,
        Sweep,
    )
    from posttrain.domain.records import Asset, AssetStatus, Token

SWEEP = {"path": RunFile, "overrides": list[Override], "seeds": int, "metric": str | None, "better": str | None}


class Assets(Verbs):
    """Verbs for versioned data sets, models, rewards, and imported runs of other programs."""

    @verb("POST /assets/datasets", Role.SUBMITTER, ".catalog.add_dataset", heavy=True, command="asset add", seals=True)
    def add_dataset(
        self, path: Path, name: Word, *more: Path, progress: Callable[[str], None] = lambda _: None
    ) -> Asset:
        """Register a data set: a file, a folder, or several files.

        Args:
            progress: called with the number of rows read so far.
        """

    @verb("POST /assets/external", Role.SUBMITTER, "app.models", heavy=True, command="asset add", seals=True)
    def add_external(self, uri: Word, name: Word, *, checksum: Word, version: Word) -> Asset:
        """Register an external data set: one object in an object store, whose bytes stay there.

        Args:
            checksum: the object's checksum.
            version: the object's version in its store, or empty.
        """

    @verb("POST /assets/models", Role.SUBMITTER, ".catalog.add_model", heavy=True, command="asset add", seals=True)
    def add_model(
        self, folder: Path, name: Word, *, base: Word | None = None, progress: Callable[[str], None] = lambda _: None
    ) -> Asset:
        """Register a model folder, or the folder of an adapter.

        Args:
            base: the registered model of which the folder has an adapter.
            progress: called with the number of stored files and bytes.
        """

    @verb("POST /assets/rewards", Role.SUBMITTER, ".catalog.add_reward", heavy=True, command="asset add", seals=True)
    def add_reward(self, path: Path, name: Word, *, entry: str | None, dialect: str, guideline: Path | None) -> Asset:
        """Register the source file of a reward and, optionally, the guideline that the reward implements."""

    @verb("POST /assets/harnesses", Role.SUBMITTER, ".catalog.add_harness", heavy=True, command="asset add", seals=True)
    def add_harness(self, folder: Path, name: Word) -> Asset:
        """Register a harness with its packages and the data of its tasks."""

    @verb("POST /assets/made-models", Role.SUBMITTER, "app.models", heavy=True, command="init", seals=True)
    def create_model(self, name: Word, config: Path, seed: int) -> tuple[Asset, str]:
        """Create a small base model with random weights, in a one-stage run; return the model and the run's id."""

    @verb(
        "GET /assets",
        Role.VIEWER,
        ".ledger.assets",
        command="asset ls",
        key=lambda one: (one.kind, one.name, one.version),
    )
    def assets(self, kind: Name | None) -> list[Asset]:
        """Return every version of every asset, or of the assets of one kind."""

    @verb("GET /asset", Role.VIEWER, ".catalog.find", command="asset get")
    def asset(self, ref: Word) -> Asset:
        """Return an asset: `KIND:NAME@VERSION`, or the latest version of `KIND:NAME`.

        Raises:
            NotFoundError: there is no such asset; the message names the nearest existing asset.
        """

    @verb("GET /asset-status", Role.VIEWER, "app.queries", key=lambda one: (one.kind, one.name, one.version))
    def asset_status(self) -> list[AssetStatus]:
        """Return the status of every asset version that has a status."""

    @verb("POST /recalled", Role.VIEWER, "app.queries")
    def recalled(self, *digests: Word) -> dict[str, AssetStatus]:
        """Return a map from digest to recall, for digests whose bytes were recalled or made from recalled bytes."""

    @verb("POST /assets/marks", Role.APPROVER, "app.models", heavy=True, command="asset recall", seals=True)
    def mark(self, ref: Word, status: str, reason: str) -> tuple[Asset, Marked]:
        """Set or clear the status of an asset version; return the version, its status and its uses.

        Args:
            status: `approved`, `recalled`, or empty to clear the status.
        """

    @verb("GET /curves", Role.VIEWER, "app.models", heavy=True)
    def curves(self, ref: Word) -> list[Curve]:
        """Return the metrics of an imported run."""

    @verb("POST /imports/trl", Role.SUBMITTER, "app.models", heavy=True, command="import trl-output", seals=True)
    def import_trl_output(self, folder: Path, name: Word | None) -> Imported:
        """Register the output folder (`output_dir`) of a TRL or transformers trainer."""

    @verb(
        "POST /imports/mlflow",
        Role.SUBMITTER,
        "app.models",
        heavy=True,
        command="import mlflow",
        sent={"folder": FileRef, "name": str | None},
        meant="app.models:what_was_read",
        seals=True,
    )
    def import_mlflow(self, where: str, run: str | None, name: Word | None) -> Imported:
        """Register a run from an MLflow store."""

    @verb("POST /imports/wandb", Role.SUBMITTER, "app.models", heavy=True, command="import wandb-export", seals=True)
    def import_wandb_export(self, folder: Path, name: Word | None) -> Imported:
        """Register the files of a W&B run."""


class Models(Verbs):
    """Verbs for sampling from a model, exporting one, and sweeps."""

    @verb("POST /answers", Role.SUBMITTER, "app.models", heavy=True, command="sample", streams="answers")
    def ask(
        self,
        model: Word,
        prompts: Sequence[str],
        *,
        samples: int,
        max_new_tokens: int | None,
        temperature: float,
        seed: int,
        runtime: Mapping[str, Any],
        timeout: float | None,
        chat: bool | None,
        system: str | None,
        stop: Sequence[str] = (),
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
    ) -> Asked:
        """Sample responses from a model, which is named as on the command line; nothing is recorded.

        Args:
            chat: whether the prompts are a user's messages (true) or plain text (false); None: the form of the model's
                training rows, or else chat if the model has a chat template.
            stop: a response ends with the token that completes one of these in its text.
            top_k: draw among the k most likely tokens; 0: all tokens.
            top_p: draw among the most likely tokens that together have this probability.
            min_p: draw among the tokens whose probability is at least this share of the highest one.
        """

    @verb("POST /exports", Role.SUBMITTER, "app.export", heavy=True, writes="folder")
    def export(
        self,
        model: Word,
        folder: Path,
        *,
        dtype: str | None,
        form: str | None = None,
        progress: Callable[[str], None],
    ) -> Exported:
        """Write a model as a Hugging Face folder, or its adapter as a folder of peft.

        Args:
            form: required for a model with an adapter: `adapter`, or `merged` for one model.
            progress: called with the name of each file.
        """

    @verb("POST /sweeps/plans", Role.VIEWER, "app.runs", heavy=True, command="sweep", run_file=True)
    def plan_sweep(
        self, path: Path, overrides: Sequence[Override], *, seeds: int, metric: str | None, better: str | None
    ) -> Sweep:
        """Resolve every point of a sweep without writing anything; one infeasible point rejects the whole sweep."""

    @verb(
        "POST /sweeps/runs",
        Role.SUBMITTER,
        "app.runs",
        heavy=True,
        command="sweep",
        sent={**SWEEP, "place": int, "seed": int},
        meant="app.runs:sent_point",
    )
    def submit_point(self, point: Point) -> Submitted:
        """Submit the run for one point of a sweep, or attach to the existing run."""

    @verb(
        "POST /sweeps/ranks",
        Role.VIEWER,
        "app.runs",
        heavy=True,
        command="sweep",
        sent={**SWEEP, "runs": list[tuple[int, int, str]]},
        meant="app.runs:sent_sweep",
    )
    def rank(self, sweep: Sweep, runs: Mapping[tuple[int, int], str]) -> Ranked:
        """Return the settings of a sweep, ranked by the measurements so far.

        Args:
            runs: a map from (place of a setting, seed) to run id.
        """


@dataclass(frozen=True, slots=True)
class Whoami:
    """The caller, and the caller's roles in the current project and in others."""

    principal: str
    auth: str  # how the caller was identified: os | token
    project: str
    role: str | None  # viewer | submitter | approver | admin; None: no role in this project
    projects: Mapping[str, str]  # project → role, for every project in which the caller has a role


@dataclass(frozen=True, slots=True)
class Issued:
    """A token that was issued."""

    secret: str  # shown once and not stored
    token: Token


class Access(Verbs):
    """Verbs for projects, members and tokens."""

    @verb("GET /whoami", Role.VIEWER, "app.access")
    def whoami(self) -> Whoami:
        """Return the caller, and the caller's roles."""

    @verb("POST /projects", Role.ADMIN, "app.access", command="project add", seals=True)
    def add_project(self, name: Word) -> Whoami:
        """Create a project with the caller as its admin.

        Raises:
            InputError: the project name is invalid, or the caller is connected to a project other than `default`.
            ConflictError: a project of that name exists.
        """

    @verb("GET /images", Role.VIEWER, ".ledger.images", command="project images")
    def images(self) -> list[str] | None:
        """Return the images that runs of the project may name, `NAME@sha256:…` or `NAME@*`.

        If no image was ever listed, there is no list: runs on a server may then name no image, and users of a local
        workspace may name any image.
        """

    @verb("POST /images", Role.ADMIN, "app.access", command="project allow-image", seals=True)
    def allow_image(self, image: Word) -> list[str] | None:
        """Allow an image for runs of the project; return the allowed images.

        Raises:
            InputError: the text is neither a reference with a digest nor NAME@*.
        """

    @verb("POST /images/removal", Role.ADMIN, "app.access", command="project remove-image", seals=True)
    def remove_image(self, image: Word) -> list[str] | None:
        """Disallow an image for new runs of the project; return the allowed images.

        Raises:
            NotFoundError: the project does not allow this image.
        """

    @verb("GET /members", Role.ADMIN, ".ledger.roles", command="member ls", key=lambda one: (one[0],))
    def members(self) -> dict[str, str]:
        """Return the members of the project, as a map from principal to role."""

    @verb("PUT /members/{principal}", Role.ADMIN, "app.access", command="member set", seals=True)
    def set_member(self, principal: Principal, role: str | None) -> dict[str, str]:
        """Set, change or remove the role of a principal in the project; return the members.

        Raises:
            InputError: the principal or role is invalid.
            ConflictError: the project would have no admin.
        """

    @verb("GET /tokens", Role.ADMIN, ".ledger.tokens", command="token ls", key=lambda one: (one.created_at, one.id))
    def tokens(self) -> list[Token]:
        """Return the tokens of the project, including expired and revoked ones."""

    @verb("POST /tokens", Role.ADMIN, "app.access", command="token issue", seals=True)
    def issue_token(self, principal: Principal, role: str | None, days: float, channel: Name | None = None) -> Issued:
        """Create a token that identifies a principal and limits its role in the project.

        Args:
            role: the highest role that the token grants; None: the principal's current role.
            channel: the token is a key that only calls the served model of this channel; its principal needs no role.

        Raises:
            InputError: the principal or role is invalid, the principal has no role, or `days` exceeds the maximum.
            NotFoundError: there is no such channel.
        """

    @verb("POST /tokens/{token_id}/rotation", Role.ADMIN, "app.access", command="token rotate", seals=True)
    def rotate_token(self, token_id: TokenId, days: float) -> Issued:
        """Create a token that replaces another token, which is revoked immediately."""

    @verb("DELETE /tokens/{token_id}", Role.ADMIN, "app.access", command="token revoke", seals=True)
    def revoke_token(self, token_id: TokenId) -> list[Token]:
        """Revoke a token; return the tokens of the project.

        Raises:
            NotFoundError: the project has no token with this id.
        """
