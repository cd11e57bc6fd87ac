"""The console asks `Control` as whoever is logged in, does nothing by GET, and lets no other site do anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest
from console_bench import ATTACK, CHANNEL, Browser, ConsoleWorld, console_world
from server_bench import KEY, Answer, serving
from starlette.responses import Response

from posttrain.access.authenticators import session
from posttrain.app.workspace import Workspace
from posttrain.domain.ids import Role

HOME = "/projects/default"
REFUSED = 403


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    server = request.getfixturevalue("postgres") if request.param == "postgresql" else None
    address = server.create() if server else ""
    with console_world(tmp_path_factory.mktemp("console"), address) as made:
        yield made
    if server:
        server.drop(address)


@pytest.fixture(scope="module")
def ann(world: ConsoleWorld) -> Browser:
    return world.browser()


def pages(world: ConsoleWorld) -> list[str]:
    evil = quote(CHANNEL, safe="")
    return [
        *(
            f"{HOME}/runs",
            f"{HOME}/runs?q={quote(ATTACK)}",
            f"{HOME}/runs?before={world.run}",
            f"{HOME}/runs/{world.run}",
        ),
        *(f"{HOME}/runs/{world.hostile}", f"{HOME}/runs/{world.run}/report", f"{HOME}/runs/{world.run}/report?part=1"),
        *(
            f"{HOME}/runs/{world.run}/card",
            f"{HOME}/runs/{world.run}/log",
            f"{HOME}/compare",
            f"{HOME}/compare?runs={quote(ATTACK)}",
        ),
        f"{HOME}/compare?runs={world.run}/base-eval&runs={world.run}",
        *(f"{HOME}/channels", f"{HOME}/channels/prod", f"{HOME}/channels/{evil}", f"{HOME}/channels/guarded"),
        *(f"{HOME}/runs-table", f"{HOME}/runs-table?sort={quote(ATTACK)}&where={quote(ATTACK)}", f"{HOME}/approvals"),
        *(f"{HOME}/audit", f"{HOME}/audit?of=prod", f"{HOME}/audit?of={world.run}"),
        *(f"{HOME}/channels/prod/chat", f"{HOME}/channels/{evil}/chat?other=prod"),
        *(f"{HOME}/channels/prod/rollback", f"{HOME}/channels/prod/rollback?to=1", "/login"),
    ]


def text_of(answer: Answer) -> str:
    return answer.body.decode()


class Elements(HTMLParser):
    """What a browser would make of a page, as far as it could do harm."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        if tag in ("img", "iframe", "object", "embed", "base", "meta") and not (
            tag == "meta" and "http-equiv" not in known
        ):
            self.found.append(tag)
        if tag == "script" and not str(known.get("src", "")).startswith("/console.js?"):
            self.found.append("script")
        self.found += [f"{tag} {name}" for name, _ in attrs if name.startswith("on") or name == "style"]
        self.found += [
            f"{tag} {name}={value[:20]}"
            for name, value in attrs
            if name in ("href", "src", "action") and value and not re.match(r"(/(?!/)|#|data:,)", value)
        ]


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_page_has_its_headers_and_nothing_of_a_run_is_markup(world: ConsoleWorld, ann: Browser) -> None:
    for path in [*pages(world), f"{HOME}/runs/nothing", f"{HOME}/nothing", "/console.css", "/console.js"]:
        found = ann.get(path)
        policy = found.headers["content-security-policy"]
        assert "default-src 'none'" in policy, path
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["cache-control"] == "no-store"
        assert "referrer-policy" in found.headers
        if found.headers["content-type"].startswith("text/html"):
            assert Elements(text_of(found)).found == [], path
    assert "&lt;script&gt;window.__pwned" in text_of(ann.get(f"{HOME}/runs/{world.hostile}"))


def test_a_run_is_shown_with_stages_curves_samples_gates_and_cost(world: ConsoleWorld, ann: Browser) -> None:
    whole = text_of(ann.get(f"{HOME}/runs/{world.run}")) + text_of(ann.get(f"{HOME}/runs/{world.run}/report"))
    for words in ("GatePassed", "1,020 tokens", "curves", "responses during training", "Lineage", "to spare", "<svg"):
        assert words in whole, words
    assert "grpo says hello" in text_of(ann.get(f"{HOME}/runs/{world.run}/log"))
    compared = text_of(ann.get(f"{HOME}/compare?runs={world.run}/base-eval&runs={world.run}"))
    assert "difference from A" in compared


def test_a_table_of_runs_is_sorted_and_filtered_by_metrics(world: ConsoleWorld, ann: Browser) -> None:
    def listed(query: str) -> list[str]:
        return re.findall(r'name="runs" value="([^"]+)"', text_of(ann.get(f"{HOME}/runs-table?{query}")))

    every = listed("")
    assert {world.run, world.hostile} <= set(every)
    for sort in ("heldout/accuracy", "-heldout/accuracy"):  # a run that measured nothing is after the others
        assert listed(f"sort={sort}").index(world.run) < listed(f"sort={sort}").index(world.hostile)
    assert listed("sort=tokens") == sorted(every, key=lambda one: one == world.run)
    assert listed("sort=-tokens")[0] == world.run
    assert listed(f"where={quote('heldout/accuracy>=0.9')}") == [world.run]
    assert listed(f"where={quote('heldout/accuracy>=0.9 succeeded tokens<1e6')}") == [world.run]
    assert listed(f"where={quote('heldout/accuracy<0.9')}") == []
    assert listed(f"where={world.run[:8]}") == [world.run]
    assert listed(f"where={quote('heldout/accuracy > .9')}") == [world.run]
    assert "is not a condition" in text_of(ann.get(f"{HOME}/runs-table?where=state=succeeded"))
    shown = text_of(ann.get(f"{HOME}/runs-table?sort=-heldout/accuracy"))
    assert 'aria-sort="descending"' in shown
    assert '<td class="num">0.98</td>' in shown


def test_the_audit_names_data_people_and_evidence(world: ConsoleWorld, ann: Browser) -> None:
    shown = text_of(ann.get(f"{HOME}/audit?of={world.run}"))
    people, rest = shown.split("On which evidence")
    evidence, data = rest.split("From which data and models it was made")
    assert "release <b>1</b>" in people
    for words in ("heldout/accuracy", ">pass</span>"):
        assert words in evidence, words
    assert "dataset:train@1" in data
    assert world.run in data  # its manifest
    unjudged = text_of(ann.get(f"{HOME}/audit?of=prod"))  # a person released the model of another stage
    assert "release <b>2</b>" in unjudged
    assert "No gate has judged it" in unjudged
    registered = text_of(ann.get(f"{HOME}/audit?of=model:sort/grpo@1"))  # its own lineage names no release
    assert "release <b>1</b>" in registered
    assert f"{world.run}/evaluate" in registered.split("On which evidence")[1].split("From which data")[0]
    assert "is not a model" in text_of(ann.get(f"{HOME}/audit?of=dataset:train@1"))
    assert ann.get(f"{HOME}/audit?of=nothing").status == 404
    assert f"{HOME}/audit?of=prod" in text_of(ann.get(f"{HOME}/audit"))


def test_a_run_is_opened_by_what_one_types(world: ConsoleWorld, ann: Browser) -> None:
    assert ann.get(f"{HOME}/runs?q=sort").headers["location"] == f"{HOME}/runs/{world.run}"
    assert ann.get(f"{HOME}/runs?q=nothing-like-it").status == 200


def test_no_page_answers_500_on_odd_ids(world: ConsoleWorld, ann: Browser) -> None:
    odd = [
        "%00",
        "%ff",
        "..",
        "%2e%2e%2f",
        "a%0d%0aset-cookie:x",
        "x" * 3000,
        quote("' OR 1=1 --"),
        "%E2%80%AE",
        "*",
        "%25",
    ]
    for word in odd:
        for path in (
            f"/runs/{word}",
            f"/runs/{word}/report",
            f"/runs/{word}/card",
            f"/runs/{word}/log",
            f"/channels/{word}",
            f"/runs?q={word}",
        ):
            assert ann.get(HOME + path).status < 500, path
        for path in (f"/compare?runs={word}&runs={word}", f"/runs?before={word}", f"/channels/prod/rollback?to={word}"):
            assert ann.get(HOME + path).status < 500, path
        assert ann.get(f"{HOME}/live?of={word}").status < 500
        assert ann.get(f"/projects/{word}/runs").status < 500
        assert ann.get(f"/login?next={word}").status in (200, 422)


# --- who is let in ----------------------------------------------------------------------------------------------------


def test_nobody_sees_anything_without_a_session(world: ConsoleWorld) -> None:
    nobody = Browser(world.bench)
    for path in pages(world)[:-1]:
        found = nobody.get(path)
        assert (found.status, found.body) == (303, b""), path
        assert found.headers["location"].startswith("/login")
    assert nobody.get("/").headers["location"] == "/login"
    assert nobody.get(f"{HOME}/live?of=runs").status == 401
    nobody.cookies["posttrain-default"] = "A" * 43
    assert nobody.get(f"{HOME}/runs").status == 303


def test_a_token_is_no_cookie_and_a_cookie_is_no_token(world: ConsoleWorld) -> None:
    token = world.bench.person("tom", Role.VIEWER)
    tom = Browser(world.bench)
    answer = tom.log_in(token)
    assert token not in json.dumps(dict(answer.headers))
    kept = answer.headers["set-cookie"]
    assert "HttpOnly" in kept
    assert "SameSite=strict" in kept
    secret = tom.cookies["posttrain-default"]
    assert world.bench.ask("GET", "/v1/projects/default/whoami", secret).status == 401
    shown = Browser(world.bench, {"posttrain-default": token})
    assert shown.get(f"{HOME}/runs").status == 303


@pytest.mark.parametrize("token", ["", "nonsense", "posttrain_" + "x" * 43, KEY])
def test_only_a_good_token_logs_in(world: ConsoleWorld, token: str) -> None:
    found = Browser(world.bench).log_in(token)
    assert found.status == 401
    assert not token or token not in text_of(found)


def test_after_login_one_is_where_one_wanted_to_be_and_nowhere_else(world: ConsoleWorld) -> None:
    token = world.bench.person("una", Role.VIEWER)
    for wanted, goes in [
        (f"{HOME}/channels", f"{HOME}/channels"),
        ("https://evil.example/", f"{HOME}/runs"),
        ("//evil.example/", f"{HOME}/runs"),
        ("/projects//evil.example", f"{HOME}/runs"),
        ("/projects/x\r\nset-cookie: y=z", f"{HOME}/runs"),
    ]:
        assert Browser(world.bench).log_in(token, wanted).headers["location"] == goes


def test_a_session_ends_with_its_token_and_by_leaving(world: ConsoleWorld) -> None:
    admin = world.bench.control(KEY)
    token = world.bench.person("vic", Role.VIEWER)
    one, other = Browser(world.bench), Browser(world.bench)
    one.log_in(token)
    other.log_in(token)
    secret = one.cookies["posttrain-default"]
    left = one.post(f"{HOME}/logout", {"form_token": one.token(f"{HOME}/runs")})
    assert left.status == 303
    assert "posttrain-default" not in one.cookies
    one.cookies["posttrain-default"] = secret
    assert one.get(f"{HOME}/runs").status == 303
    assert other.get(f"{HOME}/runs").status == 200
    known = next(one for one in admin.tokens() if one.actor == "user:vic")
    admin.revoke_token(known.id)
    assert other.get(f"{HOME}/runs").status == 303


def test_servers_of_one_ledger_share_sessions(world: ConsoleWorld, ann: Browser) -> None:
    with serving(Workspace(world.world.root / ".posttrain")) as other:
        assert Browser(other, dict(ann.cookies)).get(f"{HOME}/runs/{world.run}").status == 200


def test_what_another_project_has_is_not_there(world: ConsoleWorld) -> None:
    ben = world.browser("ben", Role.ADMIN, "b")
    assert world.run not in text_of(ben.get("/projects/b/runs"))
    for path in (f"/runs/{world.run}", f"/runs/{world.run}/report", "/channels/prod", f"/runs/{world.run}/log"):
        there, absent = ben.get(f"/projects/b{path}"), ben.get(f"/projects/b{path[:-3]}xyz")
        assert there.status == 404, path
        assert absent.status == 404
    assert ben.get(f"/projects/b/compare?runs={world.run}&runs={world.hostile}").status == 404
    assert ben.get(f"/projects/b/live?of=run/{world.run}").status == 404
    assert ben.get(f"{HOME}/runs").status == 303
    borrowed = Browser(world.bench, {"posttrain-default": ben.cookies["posttrain-b"]})
    assert borrowed.get(f"{HOME}/runs").status == 303


def test_whoever_lost_their_role_sees_nothing_more(world: ConsoleWorld) -> None:
    wes = world.browser("wes", Role.VIEWER)
    assert wes.get(f"{HOME}/runs").status == 200
    world.bench.control(KEY).set_member("user:wes", None)
    assert wes.get(f"{HOME}/runs").status == REFUSED
    assert wes.get(f"{HOME}/live?of=runs").status == REFUSED


# --- what is done -----------------------------------------------------------------------------------------------------


def rollback(world: ConsoleWorld, who: Browser, **changed: str) -> dict[str, str]:
    live = world.bench.workspace.ledger.history("prod")[-1]
    token = who.token(f"{HOME}/channels/prod")
    return {"form_token": token, "to": "", "since": str(live.sequence), "reason": "worse", **changed}


def test_a_form_of_another_page_does_nothing(world: ConsoleWorld, ann: Browser) -> None:
    place, before = f"{HOME}/channels/prod/rollback", world.bench.workspace.ledger.history("prod")
    other = world.browser("xan", Role.APPROVER)
    good = rollback(world, ann)
    for fields, headers in [
        ({**good, "form_token": ""}, {}),
        ({**good, "form_token": "0" * 64}, {}),
        ({**good, "form_token": other.token(f"{HOME}/runs")}, {}),
        (good, {"origin": ""}),
        (good, {"origin": "null"}),
        (good, {"origin": "https://evil.example"}),
        (good, {"origin": world.bench.url + ".evil.example"}),
        (good, {"origin": world.bench.url.replace("http:", "https:")}),
        (good, {"origin": "http://[::1"}),
        (good, {"sec_fetch_site": "cross-site"}),
        (good, {"sec_fetch_site": "same-site"}),
    ]:
        assert ann.post(place, fields, **headers).status == REFUSED, (fields, headers)
    assert ann.post(place, good, content_type="text/plain").status == 422
    assert ann.post(place, {**good, "reason": "x" * 70_000}).status == 422
    foreign = Browser(world.bench)
    token = foreign.token("/login")
    given = {"form_token": token, "token": world.bench.tokens["ann"]}
    assert foreign.post("/login", given, origin="https://evil.example").status == REFUSED
    assert foreign.post("/login", {**given, "form_token": ""}).status == REFUSED
    assert ann.post(f"{HOME}/logout", {}, origin="https://evil.example").status == REFUSED
    assert world.bench.workspace.ledger.history("prod") == before
    assert ann.get(f"{HOME}/runs").status == 200


def test_looking_changes_nothing(world: ConsoleWorld, ann: Browser) -> None:
    ledger = world.bench.workspace.ledger
    before = len(ledger.events(limit=10_000))
    for path in [*pages(world), f"{HOME}/logout", f"{HOME}/runs/{world.hostile}/stop"]:
        ann.get(path)
    assert len(ledger.events(limit=10_000)) == before


def test_whoever_has_less_than_a_form_needs_is_refused(world: ConsoleWorld) -> None:
    viewer = world.browser("yve", Role.VIEWER)
    before = world.bench.workspace.ledger.history("prod")
    token = viewer.token(f"{HOME}/runs")
    page = text_of(viewer.get(f"{HOME}/channels/prod"))
    assert "/rollback" not in page
    assert viewer.post(f"{HOME}/channels/prod/rollback", rollback(world, viewer)).status == REFUSED
    assert viewer.post(f"{HOME}/runs/{world.hostile}/stop", {"form_token": token}).status == REFUSED
    assert world.bench.workspace.ledger.history("prod") == before


def test_a_rollback_wants_a_reason_and_the_release_that_was_seen(world: ConsoleWorld) -> None:
    zoe, ledger = world.browser("zoe"), world.bench.workspace.ledger
    place, before = f"{HOME}/channels/prod/rollback", ledger.history("prod")
    shown = text_of(zoe.get(place))
    assert "Live after the rollback" in shown
    assert before[0].model_digest.removeprefix("sha256:")[:12] in shown
    missing = zoe.post(place, rollback(world, zoe, reason="  "))
    assert (missing.status, "needs a reason" in text_of(missing)) == (422, True)
    assert zoe.post(place, rollback(world, zoe, since="1")).status == 409
    assert ledger.history("prod") == before
    done = zoe.post(place, rollback(world, zoe, reason=f"worse {ATTACK}"))
    assert (done.status, done.headers["location"]) == (303, f"{HOME}/channels/prod")
    entry = ledger.history("prod")[-1]
    assert (entry.action, entry.actor, entry.model_digest) == ("rollback", "user:zoe", before[0].model_digest)
    told = ledger.events_about("prod", "channel.rollback")[-1]
    assert (told.payload["why"], told.auth) == (f"worse {ATTACK}", session.SESSION)
    assert "worse &lt;/pre&gt;" in text_of(zoe.get(f"{HOME}/channels/prod"))


def test_an_approver_lets_a_release_go_and_another_one_rejects_it(world: ConsoleWorld) -> None:
    world.ask_approval()
    ledger = world.bench.workspace.ledger
    ann, viewer = world.browser("ann"), world.browser("lou", Role.VIEWER)
    shown = text_of(ann.get(f"{HOME}/channels/guarded"))
    (request,) = re.findall(r'name="request" value="(sha256:[0-9a-f]{64})"', shown)
    assert "Waits for approval" in shown
    assert 'name="request"' not in text_of(viewer.get(f"{HOME}/channels/guarded"))
    assert request in text_of(ann.get(f"{HOME}/approvals"))
    assert 'name="request"' not in text_of(viewer.get(f"{HOME}/approvals"))
    assert "guarded" in text_of(viewer.get(f"{HOME}/approvals"))
    place = f"{HOME}/channels/guarded/approvals"
    said = {"form_token": ann.token(f"{HOME}/channels"), "request": request, "verdict": "reject", "reason": ATTACK}
    assert viewer.post(place, {**said, "form_token": viewer.token(f"{HOME}/channels")}).status == REFUSED
    for changed in ({"verdict": "erase"}, {"request": "sha256:" + "0" * 64}, {"request": ""}):
        assert ann.post(place, {**said, **changed}).status == 422
    assert ann.post(place, said).headers["location"] == f"{HOME}/channels/guarded"
    assert "rejected by user:ann: &lt;/pre&gt;" in text_of(ann.get(f"{HOME}/channels/guarded"))
    assert ann.post(place, {**said, "verdict": "approve"}).status == 303
    bob = world.browser("bob")
    given = {**said, "verdict": "approve", "form_token": bob.token(f"{HOME}/channels"), "reason": "the numbers hold"}
    assert bob.post(place, {**given, "inbox": "1"}).headers["location"] == f"{HOME}/approvals"
    assert "approved by user:bob: the numbers hold" in text_of(bob.get(f"{HOME}/channels/guarded"))
    assert ledger.history("guarded") == []  # whoever drives the run releases it


def test_a_long_list_comes_in_pages(world: ConsoleWorld, ann: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.console.pages.PAGE", 1)
    seen, place = [], f"{HOME}/runs"
    while place:
        shown = text_of(ann.get(place))
        older = re.search(r'rel="next" href="([^"]+)"', shown)
        place = older[1] if older else ""
        seen.append(place)
    assert len(seen) == len(world.bench.workspace.ledger.runs()) + 1


@pytest.mark.slow
def test_the_server_draws_its_own_pages_without_anything_large(world: ConsoleWorld) -> None:
    """Curves, gates and comparisons are a worker's: numpy alone is 40 MB."""
    program = Path(__file__).parent / "console_pages.py"
    words = [str(world.world.root / ".posttrain"), world.run, world.bench.person("max", Role.APPROVER)]
    asked = [sys.executable, str(program), *words]
    shown = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=500)
    assert shown.stdout.splitlines()[-1] == "[]", shown.stdout


def test_over_tls_cookies_and_forms_are_of_tls(world: ConsoleWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.operations.Server.secure", True)
    token = world.bench.person("ida", Role.VIEWER)
    ida = Browser(world.bench)
    fields = {"form_token": ida.token("/login"), "token": token}
    assert ida.post("/login", fields).status == REFUSED, "from a page without TLS"
    answer = ida.post("/login", fields, origin=world.bench.url.replace("http:", "https:"))
    assert answer.status == 303
    kept = answer.headers["set-cookie"]
    assert kept.startswith("__Host-posttrain-default=")
    assert "Secure" in kept
    assert ida.get(f"{HOME}/runs").status == 200


def test_a_page_of_a_run_comes_from_the_host_that_has_its_jobs(
    world: ConsoleWorld, ann: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer(*_: object, **__: object) -> Response:
        return Response("drawn elsewhere", media_type="text/html")

    monkeypatch.setattr("posttrain.server.connections.Peers.answer", answer)
    for path in (f"/runs/{world.run}", f"/runs/{world.run}/report", f"/live?of=run/{world.run}"):
        found = ann.get(HOME + path)
        assert text_of(found) == "drawn elsewhere"
        assert "default-src 'none'" in found.headers["content-security-policy"]
    assert "elsewhere" not in text_of(ann.get(f"{HOME}/runs"))


def test_a_run_is_stopped_and_retried_by_a_submitter(world: ConsoleWorld) -> None:
    sue = world.browser("sue", Role.SUBMITTER)
    token = sue.token(f"{HOME}/runs/{world.hostile}")
    found = sue.post(f"{HOME}/runs/{world.hostile}/stop", {"form_token": token})
    assert found.headers["location"] == f"{HOME}/runs/{world.hostile}"
    assert world.bench.workspace.ledger.run(world.hostile).desired == "stopped"
    assert sue.post(f"{HOME}/runs/{world.run}/retry", {"form_token": token}).status in (409, 422), "it succeeded"
    assert sue.get(f"{HOME}/runs/{world.hostile}/stop").status == 404


# --- what follows -----------------------------------------------------------------------------------------------------


def test_a_stream_tells_that_a_page_is_another_and_ends_with_the_session(world: ConsoleWorld) -> None:
    import http.client

    gus = world.browser("gus", Role.SUBMITTER)
    cookie = "; ".join(f"{name}={value}" for name, value in gus.cookies.items())
    connection = http.client.HTTPConnection("127.0.0.1", world.bench.port, timeout=300)
    connection.request("GET", f"{HOME}/live?of=channels", headers={"cookie": cookie})
    stream = connection.getresponse()
    assert stream.headers["content-type"].startswith("text/event-stream")
    assert stream.readline() == b": following\n"
    world.bench.control(world.bench.person("pol", Role.APPROVER)).freeze("prod", rollbacks=False, why="a look")
    assert next(line for line in stream if line.startswith(b"event:")) == b"event: changed\n"
    world.bench.control(KEY).set_member("user:gus", None)
    rest = stream.read()  # until it ends
    assert b"changed" in rest
    connection.close()
    world.bench.control(world.bench.tokens["pol"]).unfreeze("prod", why="")


def test_too_many_followers_are_refused(world: ConsoleWorld, ann: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("posttrain.server.console.routes.MOST", 0)
    assert ann.get(f"{HOME}/live?of=runs").status == 503


def test_the_api_takes_no_cookie(ann: Browser) -> None:
    assert ann.get("/v1/projects/default/whoami").status == 401
