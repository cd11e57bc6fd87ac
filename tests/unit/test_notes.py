"""`posttrain note`, `run --note`, `--tag`: what people write down of a run, and lists by tags."""

from __future__ import annotations

import html
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cli_world import World, make_world
from console_bench import Browser, ConsoleWorld, console_world
from server_bench import KEY, ServerBench, serving
from test_server_pages import P, add_runs

from posttrain.app.workspace import init_workspace, open_workspace
from posttrain.domain.errors import ConflictError, InputError, IntegrityError, NotFoundError
from posttrain.domain.ids import Role
from posttrain.store.snapshot import Snapshot

HOME = "/projects/default"


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with serving(init_workspace(tmp_path / ".posttrain")) as made:
        yield made


WAITS = "name: {}\nowner: ada\nseed: 1\nstages: {{w: {{kind: wait, for: 1s}}}}\n"


def listed(world: World, *words: str) -> list[str]:
    return [run["name"] for run in json.loads(world.ok("ls", *words, "-o", "json"))["runs"]]


def test_notes_and_tags_are_shown_listed_by_proved_and_erased(world: World) -> None:
    for name, tags in (("a", ("keep", "lr-3")), ("b", ("keep",)), ("c", ())):
        path = world.write(
            f"{name}.yaml", f"name: {name}\nowner: ada\nseed: 1\nstages: {{w: {{kind: wait, for: 1s}}}}\n"
        )
        world.ok("run", path, "--note", f"run {name}", *(word for tag in tags for word in ("--tag", tag)))
    assert listed(world) == ["c", "b", "a"]
    assert listed(world, "--tag", "keep") == ["b", "a"]
    assert listed(world, "--tag", "keep", "--limit", "1") == ["b"]
    assert "posttrain note RUN --tag none" in world.ok("ls", "--tag", "none")
    assert "[keep, lr-3]" in world.ok("ls")
    told = world.ok("note", "a", "the one\nthat we keep", "--untag", "lr-3", "--tag", "best")
    assert re.fullmatch(r"run a-\w+: recorded; tags best, keep; posttrain get a-\w+ shows it\n", told)
    shown = world.ok("get", "a")
    assert "tags: best, keep\n" in shown
    assert "note: the one that we keep (user:" in shown
    found = json.loads(world.ok("get", "a", "-o", "json"))
    assert found["tags"] == ["best", "keep"]
    assert [one["text"] for one in found["notes"]] == ["run a", "the one\nthat we keep"]
    assert listed(world, "--tag", "lr-3") == []
    assert "--tag must be given once, got keep and best" in world("ls", "--tag", "keep", "--tag", "best").stderr
    assert "note: the one that we keep" in world.ok("why", "a")
    world.ok("note", "a", "--tag", "best")  # which it has
    workspace = open_workspace(world.root / ".posttrain")
    workspace.seal()
    kinds = ("run.noted", "run.tagged", "run.untagged")
    events = [one.kind for one in workspace.ledger.events() if one.kind in kinds and one.subject.startswith("a-")]
    workspace.close()
    assert events == ["run.tagged", "run.tagged", "run.noted", "run.untagged", "run.tagged", "run.noted"]
    world.ok("verify", "a")
    assert "its tags, keep, best" in world.ok("erase", "a", "--reason", "a test")
    assert "note: its words were erased" in world.ok("get", "a")
    assert "that we keep" not in world.ok("get", "a", "-o", "json")
    world.ok("verify", "a")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "nothing to record on run"),
        (("  ",), "nothing to record on run"),
        (("x" * 1001,), "at most 1000 characters, got 1001"),
        (("--tag", "t0", "--untag", "t0"), "both name 't0'"),
        (("--tag", "Upper"), "a tag must be 1 to 24 characters from"),
        (("--tag", "a/b"), "a tag must be 1 to 24 characters from"),
        (("--untag", "none"), "has no tag 'none' to remove; its tags: t0, t1"),
        (("a text", "--tag", "more", "--tag", "and-more"), "at most 8 tags, got 9"),
    ],
)
def test_what_cannot_be_written_down_changes_nothing(world: World, words: tuple[str, ...], said: str) -> None:
    path = world.write("a.yaml", WAITS.format("a"))
    world.ok("run", path, *(word for number in range(7) for word in ("--tag", f"t{number}")))
    before = json.loads(world.ok("note", "a", "--tag", "t0", "-o", "json"))
    failed = world("note", "a", *words)
    assert failed.exit_code == InputError.exit_code
    assert said in failed.stderr
    assert json.loads(world.ok("note", "a", "--tag", "t0", "-o", "json")) == before


def test_a_client_writes_down_and_lists_by_tags_in_pages(bench: ServerBench) -> None:
    add_runs(bench, range(6))
    control = bench.control(KEY)
    for number in (1, 3, 5):
        control.note(f"r-{number:08x}", "", ["odd"])
    assert [run.id for run in control.ls(20, tag="odd")] == ["r-00000005", "r-00000003", "r-00000001"]
    first = bench.ask("GET", f"{P}/runs?tag=odd&limit=2").json
    rest = bench.ask("GET", f"{P}/runs?tag=odd&limit=2&cursor={first['next']}").json
    assert ([run["id"] for run in rest["items"]], rest["next"]) == (["r-00000001"], None)
    assert bench.ask("GET", f"{P}/runs?limit=2&cursor={first['next']}").status == 422, "a cursor of another list"
    with pytest.raises(NotFoundError):
        control.note("r-99999999", "a text")
    sue = bench.control(bench.person("sue", Role.SUBMITTER))
    for _ in range(2):  # the same again changes nothing
        (tag, note) = sue.note("r-00000001", "seen")
    assert len(bench.workspace.ledger.notes("r-00000001")) == 2
    assert (tag.tag, note.text, note.actor) == ("odd", "seen", "user:sue")


def test_a_run_is_not_submitted_whose_notes_are_refused(world: World) -> None:
    path = world.write("a.yaml", WAITS.format("a"))
    for words in (("--tag", "Bad"), ("--note", "x" * 1001), [w for n in range(9) for w in ("--tag", f"t{n}")]):
        assert world("run", path, *words).exit_code == InputError.exit_code
    assert listed(world) == []


@pytest.mark.slow
def test_a_run_has_a_hundred_notes_at_most(bench: ServerBench) -> None:
    add_runs(bench, range(1))
    control = bench.control(KEY)
    for number in range(100):
        control.note("r-00000000", f"note {number}")
    with pytest.raises(InputError, match="at most 100 notes, got 101"):
        control.note("r-00000000", "one more")


@pytest.mark.parametrize(
    "forgery",
    [
        "UPDATE notes SET tag = 'other' WHERE tag != ''",
        pytest.param("UPDATE notes SET text = 'other' WHERE tag = ''", marks=pytest.mark.slow),
        pytest.param("DELETE FROM notes WHERE tag = ''", marks=pytest.mark.slow),
        "INSERT INTO notes SELECT project, run_id, 9, principal, at, 'forged', '' FROM notes LIMIT 1",
        "UPDATE signals SET reason = 'other'",
    ],
)
def test_verify_of_a_run_proves_its_notes_and_signals(world: World, forgery: str) -> None:
    path = world.write("a.yaml", "name: a\nowner: ada\nseed: 1\nstages: {w: {kind: wait, signal: go}}\n")
    world.ok("run", path, "--detach", "--note", "a text", "--tag", "keep")
    world.ok("signal", "a", "go", "--reason", "why not")
    world.ok("attach", "a")
    world.ok("verify", "a")
    with closing(sqlite3.connect(world.root / ".posttrain" / "ledger.db")) as connection:
        assert connection.execute(forgery).rowcount == 1
        connection.commit()
    assert world("verify", "a").exit_code == IntegrityError.exit_code


def test_two_who_write_at_once_lose_nothing(bench: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    add_runs(bench, range(1))
    ledger = bench.workspace.ledger
    with ledger.transaction("user:ann") as transaction:
        transaction.note("r-00000000", "one")
    monkeypatch.setattr(Snapshot, "notes", lambda *_, **__: [])  # the other had not written yet
    with ledger.transaction("user:bob") as transaction, pytest.raises(ConflictError):
        transaction.note("r-00000000", "two")
    monkeypatch.undo()
    assert [note.text for note in ledger.notes("r-00000000")] == ["one"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("notes")) as made:
        yield made


def text_of(browser: Browser, path: str) -> str:
    return browser.get(path).body.decode()


@pytest.mark.slow
def test_the_console_writes_shows_and_filters(served: ConsoleWorld) -> None:
    sue, viewer = served.browser("sue", Role.SUBMITTER), served.browser("yve", Role.VIEWER)
    page, attack = f"{HOME}/runs/{served.run}", "<script>alert(1)</script>"
    sent = {"form_token": sue.token(page), "text": attack, "tag": "keep"}
    assert sue.post(f"{page}/notes", sent).headers["location"] == page
    shown = text_of(viewer, page)
    assert (attack in shown, "&lt;script&gt;alert(1)" in shown, f"{HOME}/runs?tag=keep" in shown) == (False, True, True)
    assert f"{page}/notes" not in shown
    assert viewer.post(f"{page}/notes", {**sent, "form_token": viewer.token(f"{HOME}/runs")}).status == 403
    tagged, others = text_of(viewer, f"{HOME}/runs?tag=keep"), text_of(viewer, f"{HOME}/runs")
    assert f'value="{served.run}"' in tagged
    assert tagged.count("<li") < others.count("<li")
    assert viewer.get(f"{HOME}/runs?tag=Bad").status == 422, "which is no tag"


def test_the_console_pages_through_tagged_runs_whether_they_have_ended_or_not(
    served: ConsoleWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, viewer = served.bench.control(KEY), served.browser("zoe", Role.VIEWER)
    tagged = [run.id for run in control.ls(20)]
    for run_id in tagged:
        control.note(run_id, tags=["all"])
    assert len({run.state in ("succeeded", "failed") for run in control.ls(20)}) == 2
    monkeypatch.setattr("posttrain.server.console.pages.PAGE", 1)
    shown, path = list[str](), f"{HOME}/runs?tag=all"
    while path:
        text = text_of(viewer, path)
        shown += re.findall(r'name="runs" value="([^"]+)"', text)
        older = re.search(r'rel="next" href="([^"]+)"', text)
        path = older.group(1).replace("&amp;", "&") if older else ""
    assert [html.unescape(one) for one in shown] == tagged
