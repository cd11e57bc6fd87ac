"""The parts of `Control` about data sets, models and rewards, and about projects, members and tokens."""

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
    """Versioned data sets, models, rewards, and runs of other programs."""

    @verb("POST /assets/datasets", Role.SUBMITTER, ".catalog.add_dataset", heavy=True, command="asset add", seals=True)
    def add_dataset(
        self, path: Path, name: Word, *more: Path, progress: Callable[[str], None] = lambda _: None
    ) -> Asset:
        """Register a data set: a file, a folder, or several files. `progress` is told how many rows were looked at."""

    @verb("POST /assets/external", Role.SUBMITTER, "app.models", heavy=True, command="asset add", seals=True)
    def add_external(self, uri: Word, name: Word, *, checksum: Word, version: Word) -> Asset:
        """Register a data set that stays where it is: one object, its checksum, its version in its store or empty."""

    @verb("POST /assets/models", Role.SUBMITTER, ".catalog.add_model", heavy=True, command="asset add", seals=True)
    def add_model(self, folder: Path, name: Word, *, progress: Callable[[str], None] = lambda _: None) -> Asset:
        """Register a model's folder. `progress` is told how many files and bytes were stored."""

    @verb("POST /assets/rewards", Role.SUBMITTER, ".catalog.add_reward", heavy=True, command="asset add", seals=True)
    def add_reward(self, path: Path, name: Word, *, entry: str | None, dialect: str, guideline: Path | None) -> Asset:
        """Register a reward's source file, with the guideline that it implements."""

    @verb("POST /assets/made-models", Role.SUBMITTER, "app.models", heavy=True, command="init", seals=True)
    def create_model(self, name: Word, config: Path, seed: int) -> tuple[Asset, str]:
        """Make a small base model from nothing, by a run of one stage; with that run's id."""

    @verb(
        "GET /assets",
        Role.VIEWER,
        ".ledger.assets",
        command="asset ls",
        key=lambda one: (one.kind, one.name, one.version),
    )
    def assets(self, kind: Name | None) -> list[Asset]:
        """Every version of every asset, or of those of one kind."""

    @verb("GET /asset", Role.VIEWER, ".catalog.find", command="asset get")
    def asset(self, ref: Word) -> Asset:
        """`KIND:NAME`, the latest, or `KIND:NAME@VERSION`. Raises NotFoundError with the nearest known one."""

    @verb("GET /asset-status", Role.VIEWER, "app.queries", key=lambda one: (one.kind, one.name, one.version))
    def asset_status(self) -> list[AssetStatus]:
        """Of every version that has one."""

    @verb("POST /recalled", Role.VIEWER, "app.queries")
    def recalled(self, *digests: Word) -> dict[str, AssetStatus]:
        """Of these bytes, those that were recalled or made from something recalled."""

    @verb("POST /assets/marks", Role.APPROVER, "app.models", heavy=True, command="asset recall", seals=True)
    def mark(self, ref: Word, status: str, reason: str) -> tuple[Asset, Marked]:
        """Say what is thought of a version: `approved`, `recalled`, or nothing any more; with where it is in use."""

    @verb("GET /curves", Role.VIEWER, "app.models", heavy=True)
    def curves(self, ref: Word) -> list[Curve]:
        """The metrics of an imported run."""

    @verb("POST /imports/trl", Role.SUBMITTER, "app.models", heavy=True, command="import trl-output", seals=True)
    def import_trl_output(self, folder: Path, name: Word | None) -> Imported:
        """Register what a TRL or transformers trainer left in its `output_dir`."""

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
        """Register a run of an MLflow store."""

    @verb("POST /imports/wandb", Role.SUBMITTER, "app.models", heavy=True, command="import wandb-export", seals=True)
    def import_wandb_export(self, folder: Path, name: Word | None) -> Imported:
        """Register a W&B run's files."""


class Models(Verbs):
    """A model asked, taken out, and runs of one file ranked."""

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
        """Ask a model by the words that a person has for it. Nothing is recorded.

        Args:
            chat: as a user's message or as plain text; None: as it was trained.
            stop: a response ends with the token that completes one of these in its text.
            top_k: draw among the k most likely tokens; 0: all.
            top_p: draw among the most likely ones that together have this probability.
            min_p: draw among those at least this times as likely as the likeliest.
        """

    @verb("POST /exports", Role.SUBMITTER, "app.export", heavy=True, writes="folder")
    def export(self, model: Word, folder: Path, *, dtype: str | None, progress: Callable[[str], None]) -> Exported:
        """Write a model as a Hugging Face folder. `progress` is told each file."""

    @verb("POST /sweeps/plans", Role.VIEWER, "app.runs", heavy=True, command="sweep", run_file=True)
    def plan_sweep(
        self, path: Path, overrides: Sequence[Override], *, seeds: int, metric: str | None, better: str | None
    ) -> Sweep:
        """Resolve every point of a sweep. Writes nothing; one point that cannot run refuses the sweep."""

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
        """The run of a point: a new one, or the one that exists."""

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
        """Rank its settings; `runs`: (place of a setting, seed) → run id."""


@dataclass(frozen=True, slots=True)
class Whoami:
    """Who asks, and what they may do in the present project."""

    principal: str
    auth: str  # how that is known: os | token
    project: str
    role: str | None  # viewer | submitter | approver | admin; None: none there
    projects: Mapping[str, str]  # project → role, of every one that they have a role in


@dataclass(frozen=True, slots=True)
class Issued:
    """A token that was issued."""

    secret: str  # shown once; it is kept nowhere
    token: Token


class Access(Verbs):
    """Projects, members and tokens."""

    @verb("GET /whoami", Role.VIEWER, "app.access")
    def whoami(self) -> Whoami:
        """Who asks."""

    @verb("POST /projects", Role.ADMIN, "app.access", command="project add", seals=True)
    def add_project(self, name: Word) -> Whoami:
        """Make a project, and whoever asks its admin; asked of the project `default`.

        Raises:
            InputError: no name for a project. ConflictError: there is one of that name.
        """

    @verb("GET /images", Role.VIEWER, ".ledger.images", command="project images")
    def images(self) -> list[str] | None:
        """The images that runs of the project may name, `NAME@sha256:…` or `NAME@*`. None: nobody said; then a server
        lets its runs name none, and whoever has the workspace before them may name any.
        """

    @verb("POST /images", Role.ADMIN, "app.access", command="project allow-image", seals=True)
    def allow_image(self, image: Word) -> list[str] | None:
        """Let runs of the project name an image; the images afterwards.

        Raises:
            InputError: neither a reference with a digest nor NAME@*.
        """

    @verb("POST /images/removal", Role.ADMIN, "app.access", command="project remove-image", seals=True)
    def remove_image(self, image: Word) -> list[str] | None:
        """Let no new run of the project name an image any more; the images afterwards.

        Raises:
            NotFoundError: it does not allow that one.
        """

    @verb("GET /members", Role.ADMIN, ".ledger.roles", command="member ls", key=lambda one: (one[0],))
    def members(self) -> dict[str, str]:
        """Principal → role, of everybody who was given one in the project."""

    @verb("PUT /members/{principal}", Role.ADMIN, "app.access", command="member set", seals=True)
    def set_member(self, principal: Principal, role: str | None) -> dict[str, str]:
        """Give somebody a role in the project, another one, or none; the members afterwards.

        Raises:
            InputError: no principal, or no role. ConflictError: the last admin would be gone.
        """

    @verb("GET /tokens", Role.ADMIN, ".ledger.tokens", command="token ls", key=lambda one: (one.created_at, one.id))
    def tokens(self) -> list[Token]:
        """Those of the project, also expired and revoked ones."""

    @verb("POST /tokens", Role.ADMIN, "app.access", command="token issue", seals=True)
    def issue_token(self, principal: Principal, role: str | None, days: float) -> Issued:
        """A token by which somebody is known, and with which they may do at most this here; None: what their role is.

        Raises:
            InputError: no principal, no role, too long a time.
        """

    @verb("POST /tokens/{token_id}/rotation", Role.ADMIN, "app.access", command="token rotate", seals=True)
    def rotate_token(self, token_id: TokenId, days: float) -> Issued:
        """A token in the place of another one, which is good for nothing from now on."""

    @verb("DELETE /tokens/{token_id}", Role.ADMIN, "app.access", command="token revoke", seals=True)
    def revoke_token(self, token_id: TokenId) -> list[Token]:
        """Let a token be good for nothing from now on; the tokens afterwards.

        Raises:
            NotFoundError: the project has none of that id.
        """
