"""What every authenticator must do, and how roles and tokens are kept: SQLite here, PostgreSQL by `make postgres`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import ledger_workers as work
import pytest
from control_bench import ManualClock

from posttrain.access.authenticators import session, system
from posttrain.access.authenticators.fake import FakeAuthenticator
from posttrain.access.authenticators.system import SystemUser
from posttrain.access.authenticators.token import LONGEST, PREFIX, TokenAuthenticator, issue, rotate
from posttrain.access.ports import Authenticator, Identity, role_of
from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import AccessError, ConflictError, InputError, NotFoundError
from posttrain.domain.ids import Role
from posttrain.store.audit import verify_rows
from posttrain.store.erasure import erase_principal
from posttrain.store.ledger import Ledger
from posttrain.store.sealer import seal, verify_chain

DAY = 86400.0
HERE = {"default": Role.SUBMITTER}


@pytest.fixture
def ledger(ledger_at: str) -> Iterator[Ledger]:
    with work.opened(ledger_at) as ledger:
        ledger.clock = ManualClock()
        yield ledger


@dataclass
class Bench:
    """An authenticator, and what it knows."""

    authenticator: Authenticator
    good: str
    principal: str
    bad: tuple[str, ...]


@pytest.fixture(params=["system", "token", "session", "fake"])
def bench(request: pytest.FixtureRequest, ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> Bench:
    if request.param == "system":
        monkeypatch.setattr(system, "login_name", lambda: "ann")
        return Bench(SystemUser(), "", "user:ann", ("ann", "user:ann", "swordfish"))
    if request.param == "fake":
        known = {"swordfish": Identity("user:ann", "fake")}
        return Bench(FakeAuthenticator(known), "swordfish", "user:ann", ("", "sword", "swordfish "))
    good, _ = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    if request.param == "session":
        secret = session.begin(ledger, good)
        bad = ("", secret[:-1], secret + "A", f"{secret} ", good, digest_bytes(secret.encode()), "A" * 43)
        return Bench(session.SessionAuthenticator(ledger), secret, "service:ci", bad)
    changed = good[:-1] + ("A" if good[-1] != "A" else "B")
    stored = digest_bytes(good.encode())
    return Bench(
        TokenAuthenticator(ledger), good, "service:ci",
        ("", good[:-1], good + "A", good.upper(), f" {good}", changed, stored, "user:ann", PREFIX + "' OR 1=1 --" * 4),
    )  # fmt: skip


def test_who_shows_what_is_good_is_the_same_each_time(bench: Bench) -> None:
    found = bench.authenticator.authenticate(bench.good)
    assert found == bench.authenticator.authenticate(bench.good)
    assert (found.principal, found.auth) == (bench.principal, bench.authenticator.auth)
    assert 0 < len(found.auth) <= 16


def test_anything_else_is_refused_in_a_line_that_does_not_say_it(bench: Bench) -> None:
    for proof in bench.bad:
        with pytest.raises(AccessError) as caught:
            bench.authenticator.authenticate(proof)
        said = str(caught.value)
        assert "\n" not in said
        assert not proof or proof not in said


def everything(ledger: Ledger) -> str:
    """All that a ledger holds, as text."""
    from sqlalchemy import select

    from posttrain.store.schema import metadata

    with ledger.database.read(across="a test") as connection:
        rows = [list(map(str, row)) for table in metadata.sorted_tables for row in connection.execute(select(table))]
    return json.dumps(rows)


def test_a_token_is_kept_as_its_digest_only(ledger: Ledger) -> None:
    secret, token = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    assert len(secret) == len(PREFIX) + 43, "256 bits"
    assert secret != issue(ledger, "user:ann", "service:ci", HERE, DAY)[0]
    seal(ledger)
    kept = everything(ledger)
    assert secret not in kept
    assert secret.removeprefix(PREFIX) not in kept
    assert digest_bytes(secret.encode()) in kept
    assert (token.expires_at - token.created_at, token.revoked_at) == (DAY, None)
    assert [event.kind for event in ledger.events(subject_prefix=token.id)] == ["token.issued"]
    assert verify_chain(ledger).pending == 0
    verify_rows(ledger)


def test_a_token_ends_when_it_expires_and_when_it_is_revoked(ledger: Ledger) -> None:
    known = TokenAuthenticator(ledger)
    short, _ = issue(ledger, "user:ann", "service:ci", HERE, 60.0)
    long, token = issue(ledger, "user:ann", "service:ci", HERE, LONGEST)
    ledger.clock.time += 59.0  # type: ignore[attr-defined]
    assert known.authenticate(short).principal == "service:ci"
    ledger.clock.time += 1.0  # type: ignore[attr-defined]
    with pytest.raises(AccessError, match="has expired"):
        known.authenticate(short)
    assert known.authenticate(long).scopes == HERE
    with ledger.transaction("user:ann") as transaction:
        assert transaction.revoke_token(token.id)
    with pytest.raises(AccessError, match="was revoked"):
        known.authenticate(long)
    with ledger.transaction("user:ann") as transaction:
        assert not transaction.revoke_token(token.id)
        assert not transaction.revoke_token("t0")
    for seconds in (0.0, -1.0, LONGEST + 1, float("nan")):
        with pytest.raises(InputError, match="must be valid for at most 366 days"):
            issue(ledger, "user:ann", "service:ci", HERE, seconds)
    with pytest.raises(InputError, match="must have a scope"):
        issue(ledger, "user:ann", "service:ci", {}, DAY)
    verify_rows(ledger)


def test_a_rotated_token_is_good_for_nothing_at_once(ledger: Ledger) -> None:
    known = TokenAuthenticator(ledger)
    first, one = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    second, two = rotate(ledger, "user:bob", one.id, 2 * DAY)
    assert (two.actor, two.scopes, two.replaces) == ("service:ci", {"default": "submitter"}, one.id)
    with pytest.raises(AccessError, match="was revoked"):
        known.authenticate(first)
    assert known.authenticate(second).principal == "service:ci"
    with pytest.raises(InputError, match="is revoked and cannot be replaced"):
        rotate(ledger, "user:bob", one.id, DAY)
    with pytest.raises(NotFoundError, match="there is no token"):
        rotate(ledger, "user:bob", "t0", DAY)
    assert len([one for one in ledger.pending_events() if one.kind.startswith("token.")]) == 3
    erase_principal(ledger, "user:bob", "service:ci", "it is gone")
    with pytest.raises(AccessError, match="the token is unknown"):
        known.authenticate(second)


def test_who_has_no_role_is_admin_only_where_nobody_has_one_and_the_system_lets_them_in(ledger: Ledger) -> None:
    ann, eve = Identity("user:ann", "os"), Identity("user:eve", "os")
    with_token = Identity("user:ann", "token", {"default": Role.ADMIN})
    assert (role_of(ledger, ann), role_of(ledger, eve), role_of(ledger, with_token)) == (Role.ADMIN, Role.ADMIN, None)
    with ledger.transaction("user:ann") as transaction:
        transaction.set_role("user:bob", Role.SUBMITTER)
    assert (role_of(ledger, ann), role_of(ledger, eve)) == (Role.ADMIN, None), "whoever gives the first one is admin"
    assert role_of(ledger, Identity("user:bob", "os")) is Role.SUBMITTER
    assert role_of(ledger, with_token) is Role.ADMIN
    for scopes, role in (
        ({"default": Role.VIEWER}, Role.VIEWER),
        ({"default": Role.ADMIN}, Role.SUBMITTER),
        ({"other": Role.ADMIN}, None),
        ({}, None),
    ):
        assert role_of(ledger, Identity("user:bob", "token", scopes)) is role, "never more than the role, nor the scope"
    last = pytest.raises(ConflictError, match="must have an admin, and user:ann is the last")
    with last, ledger.transaction("user:bob") as transaction:
        transaction.set_role("user:ann", Role.VIEWER)
    with ledger.transaction("user:ann") as transaction:
        transaction.set_role("user:bob", Role.ADMIN)
        transaction.set_role("user:ann", None)
    assert (role_of(ledger, ann), role_of(ledger, Identity("user:bob", "os"))) == (None, Role.ADMIN)
    kinds = [one.kind for one in ledger.pending_events() if one.kind.startswith("role.")]
    assert kinds == ["role.granted", "role.granted", "role.granted", "role.withdrawn"]
    assert "ann" not in {one.subject for one in ledger.pending_events() if one.kind.startswith("role.")}
    seal(ledger)
    verify_rows(ledger)


def test_a_token_is_of_the_project_whose_admin_issues_it(ledger: Ledger) -> None:
    _, token = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    other = Ledger(ledger.database, ledger.clock, project="other")
    with pytest.raises(NotFoundError, match="there is no token"):
        rotate(other, "user:mallory", token.id, DAY)
    with other.transaction("user:mallory") as transaction:
        assert not transaction.revoke_token(token.id)
        assert transaction.snapshot.tokens() == []
    for scopes in (HERE, {**HERE, "other": Role.ADMIN}):
        with pytest.raises(InputError, match="must be for project other, got default"):
            issue(other, "user:mallory", "user:mallory", scopes, DAY)
    with ledger.snapshot() as now:
        assert [one.revoked_at for one in now.tokens()] == [None]


@pytest.mark.parametrize("name", ["user:bob\nroot", "bob", "user: bob", "erased:12"])
def test_a_token_is_for_somebody_who_can_be_named(ledger: Ledger, name: str) -> None:
    with pytest.raises(InputError, match="token: must be for user:NAME or service:NAME, without spaces"):
        issue(ledger, "user:ann", name, HERE, DAY)


def test_a_projects_images_are_said_by_events_and_are_its_own(ledger: Ledger) -> None:
    one, other = "localhost/train@*", f"localhost/eval@sha256:{'0' * 64}"
    with ledger.transaction("user:ann") as transaction:
        assert transaction.snapshot.images() is None, "nobody said"
        transaction.allow_image(one)
        transaction.allow_image(other)
        transaction.allow_image(one)
        assert transaction.snapshot.images() == [other, one]
    with ledger.transaction("user:ann") as transaction:
        transaction.remove_image(other)
    gone = pytest.raises(NotFoundError, match="does not allow image")
    with gone, ledger.transaction("user:ann") as transaction:
        transaction.remove_image(other)
    with ledger.transaction("user:ann") as transaction:
        transaction.remove_image(one)
        assert transaction.snapshot.images() == [], "somebody said: none"
    kinds = [found.kind for found in ledger.pending_events() if found.kind.startswith("project.")]
    assert kinds == ["project.images"] * 4
    many = pytest.raises(InputError, match="may allow at most 256 images, got 257")
    with many, ledger.transaction("user:ann") as transaction:
        for number in range(257):
            transaction.allow_image(f"localhost/x{number}@*")
    with Ledger(ledger.database, ledger.clock, project="other").snapshot() as now:
        assert now.images() is None
    seal(ledger)
    verify_rows(ledger)


def test_what_has_expired_is_not_rotated(ledger: Ledger) -> None:
    _, token = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    ledger.clock.sleep(DAY)
    with pytest.raises(InputError, match="has expired and cannot be replaced; issue a new one"):
        rotate(ledger, "user:ann", token.id, DAY)


def test_who_is_erased_has_neither_role_nor_token_and_the_last_admin_is_not_erased(ledger: Ledger) -> None:
    with ledger.transaction("user:root") as transaction:
        transaction.set_role("user:sue", Role.SUBMITTER)
    with pytest.raises(ConflictError, match="must have an admin, and this is the last one; name another admin first"):
        erase_principal(ledger, "user:sue", "user:root", "asked to")
    with ledger.transaction("user:root") as transaction:
        transaction.set_role("user:sue", Role.ADMIN)
    _, token = issue(ledger, "user:sue", "user:root", HERE, DAY)
    erase_principal(ledger, "user:root", "user:root", "asked to")
    with ledger.snapshot() as now:
        assert now.roles() == {"user:sue": Role.ADMIN}
        assert [one.revoked_at for one in now.tokens() if one.id == token.id] == [ledger.clock.now()]
    seal(ledger)
    verify_chain(ledger)
    verify_rows(ledger)


def test_whoever_has_an_erased_name_is_somebody_else_in_the_same_process_too(ledger: Ledger) -> None:
    for _ in range(2):
        with ledger.transaction("user:cy") as transaction:
            transaction.append_event("note", "x", {})
    gone = erase_principal(ledger, "user:root", "user:cy", "asked to").subject
    with ledger.transaction("user:cy") as transaction:
        transaction.append_event("note", "x", {})
    told = [one.actor for one in ledger.pending_events() if one.kind == "note"]
    assert told == [f"erased:{gone}", f"erased:{gone}", "user:cy"]


def test_an_erasure_says_how_whoever_erased_was_known(ledger: Ledger) -> None:
    theirs = Ledger(ledger.database, ledger.clock, auth="token")
    with theirs.transaction("user:cy") as transaction:
        transaction.append_event("note", "x", {})
    erase_principal(theirs, "user:root", "user:cy", "asked to")
    assert {one.auth for one in ledger.pending_events() if one.kind == "words.erased"} == {"token"}


def test_events_say_how_whoever_acted_was_known(ledger: Ledger) -> None:
    secret, _ = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    found = TokenAuthenticator(ledger).authenticate(secret)
    theirs = Ledger(ledger.database, ledger.clock, auth=found.auth)
    with theirs.transaction(found.principal) as transaction:
        transaction.append_event("note", "x", {})
    told = {(one.kind, one.actor, one.auth) for one in ledger.pending_events() if one.kind in ("note", "token.issued")}
    assert told == {("token.issued", "user:ann", "os"), ("note", "service:ci", "token")}


def test_a_session_ends_with_its_token_by_its_time_and_when_it_is_left(ledger: Ledger) -> None:
    known = session.SessionAuthenticator(ledger)
    token, told = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    left, late, revoked = (session.begin(ledger, token) for _ in range(3))
    assert known.authenticate(left) == Identity("service:ci", "session", HERE)
    session.end(ledger, left)
    with pytest.raises(AccessError, match="over"):
        known.authenticate(left)
    ledger.clock.sleep(session.SECONDS)
    with pytest.raises(AccessError, match="over"):
        known.authenticate(late)
    revoked = session.begin(ledger, token)  # the two that are over are forgotten
    assert known.authenticate(revoked).principal == "service:ci"
    ledger.clock.sleep(DAY - session.SECONDS - 1)
    with ledger.transaction("user:ann") as transaction:
        transaction.revoke_token(told.id)
    with pytest.raises(AccessError, match="was revoked"):
        known.authenticate(revoked)
    with pytest.raises(AccessError):
        session.begin(ledger, token[:-1])


def test_a_session_is_kept_as_its_digest_only(ledger: Ledger) -> None:
    token, _ = issue(ledger, "user:ann", "service:ci", HERE, DAY)
    secret = session.begin(ledger, token)
    kept = everything(ledger)
    assert digest_bytes(secret.encode()) in kept
    assert secret not in kept
    assert token not in kept
