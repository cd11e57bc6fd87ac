"""Who may do what: projects, members and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from posttrain.api.verbs import Verbs, verb
from posttrain.domain.ids import Role

if TYPE_CHECKING:
    from posttrain.domain.ids import Principal, TokenId, Word
    from posttrain.domain.records import Token


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
