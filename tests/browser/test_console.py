"""The console in a real Chromium: on a phone and on a desk, light and dark, by keys and clicks; nothing of a run runs.

Screenshots go to `$SCREENSHOTS` (default: `.screenshots/` here), for people to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from console_bench import ATTACK, CHANNEL, ConsoleWorld, console_world
from server_bench import KEY
from stub_model import KEY as MODEL_KEY, stub_model
from test_pages import FAINT, LEAST_CONTRAST, SCHEMES, SHOTS, WIDE

from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.workspace.served import Served, announce_model

pytestmark = pytest.mark.browser
WIDTHS = (390, 1280)
HIDE = """() => { Object.defineProperty(document, 'hidden', {value: true});
  document.dispatchEvent(new Event('visibilitychange')); }"""
SHARES = """() => [...document.querySelectorAll('.row .why')].map(
  e => e.getBoundingClientRect().width / e.parentElement.getBoundingClientRect().width)"""
ANSWERED = "() => [...document.querySelectorAll('.theirs')].every(e => e.textContent.includes(' / '))"
STARTED = "() => [window.__pwned, document.title.startsWith('pwned')]"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleWorld]:
    with console_world(tmp_path_factory.mktemp("console")) as made:
        yield made


@pytest.fixture
def token(world: ConsoleWorld) -> str:
    return world.bench.person("ann", Role.APPROVER)


@pytest.fixture
def page(chromium: Any, world: ConsoleWorld, token: str) -> Iterator[Any]:
    """A page of somebody who is logged in, which tells of everything that goes wrong in it."""
    chromium.clear_cookies()
    made = chromium.new_page()
    made.troubles = []
    made.on("console", lambda message: made.troubles.append(f"console: {message.text}"))
    made.on("pageerror", lambda error: made.troubles.append(f"error: {error}"))
    made.on("dialog", lambda dialog: (made.troubles.append("a dialog opened"), dialog.dismiss()))
    made.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((world.bench.url, "data:,"))
            else made.troubles.append(f"request: {request.url[:90]}")
        ),
    )
    made.set_viewport_size({"width": 1280, "height": 800})
    made.goto(f"{world.bench.url}/")
    made.fill("#token", token)
    made.click("button.main")
    made.wait_for_url("**/projects/default/runs")
    yield made
    made.close()


def places(world: ConsoleWorld) -> dict[str, str]:
    evil = quote(ATTACK, safe="")
    return {
        "runs": "/runs",
        "run": f"/runs/{world.run}",
        "run-hostile": f"/runs/{world.hostile}",
        "report": f"/runs/{world.run}/report",
        "log": f"/runs/{world.run}/log",
        "choose": f"/compare?runs={quote('<script>window.__pwned=1</script>')}",
        "compare-runs": f"/compare?runs={world.run}/base-eval&runs={world.run}",
        "channels": "/channels",
        "channel": "/channels/prod",
        "channel-hostile": f"/channels/{quote(CHANNEL, safe='')}",
        "channel-guarded": "/channels/guarded",
        "rollback": "/channels/prod/rollback",
        "chat": f"/channels/{quote(CHANNEL, safe='')}/chat?other=prod",
        "search": f"/runs?q={evil}",
        "error": f"/runs/{evil}",
        "table": f"/runs-table?where={evil}",
        "approvals": "/approvals",
        "audit": f"/audit?of={world.run}",
    }


NAMES = [
    *(
        "runs",
        "run",
        "run-hostile",
        "report",
        "log",
        "choose",
        "compare-runs",
        "channels",
        "channel",
        "channel-hostile",
    ),
    *("channel-guarded", "rollback", "chat", "search", "error", "table", "approvals", "audit"),
]


def shown(page: Any, world: ConsoleWorld, name: str) -> None:
    """Open a page, and wait until it has what it asks for itself."""
    page.goto(f"{world.bench.url}/projects/default{places(world)[name]}")
    if page.query_selector("[data-load]"):
        page.wait_for_selector("#report" if name in ("run-hostile", "report") else "[data-loaded]", timeout=120_000)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_readable_and_nothing_of_a_run_runs(page: Any, world: ConsoleWorld, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.emulate_media(color_scheme=scheme)
    assert list(places(world)) == NAMES
    for name in NAMES:
        shown(page, world, name)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"console-{name}-{width}-{scheme}.png", full_page=True)
        page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert page.evaluate(STARTED) == [None, False], name
        found = [*page.evaluate(WIDE), *page.evaluate(FAINT, LEAST_CONTRAST)]
        assert found == [], (name, width, scheme, found)
        for odd in ("main script", "main img", "main iframe", "a[href^='javascript:']"):
            assert page.query_selector(odd) is None, (name, odd)
    allowed = [one for one in page.troubles if "status of 404" in one or "status of 422" in one]
    assert [one for one in page.troubles if one not in allowed] == []


def test_curves_take_a_log_scale_and_zoom_together(page: Any, world: ConsoleWorld) -> None:
    page.set_viewport_size({"width": 1280, "height": 900})
    shown(page, world, "run")
    card = page.locator(".card:has(.scales)").first
    linear, log = card.locator(".panel:has(.log) > .lin").first, card.locator(".panel > .log").first
    assert linear.is_visible()
    assert not log.is_visible()
    page.check(".scale-log")
    assert log.is_visible()
    assert not linear.is_visible()
    page.uncheck(".scale-log")
    whole = [one.get_attribute("viewBox") for one in card.locator(".lin .plot").all()]
    linear.scroll_into_view_if_needed()
    box = linear.bounding_box()
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 60)
    page.mouse.up()
    zoomed = [one.get_attribute("viewBox") for one in card.locator(".lin .plot").all()]
    assert all(one != before for one, before in zip(zoomed, whole, strict=True))
    assert len(set(zoomed)) == 1  # they share the axis of steps
    linear.dblclick()
    assert {tuple(map(float, one.get_attribute("viewBox").split())) for one in card.locator(".lin .plot").all()} == {
        tuple(map(float, one.split())) for one in whole
    }
    page.keyboard.press("+")  # zooms by the keyboard, in every card
    near = [one.get_attribute("viewBox") for one in page.locator("svg.axes .plot").all()]
    assert all(one != before for one, before in zip(near[: len(whole)], whole, strict=True))
    page.wait_for_selector("#following:not([hidden])")
    world.bench.control(world.bench.person("dee", Role.SUBMITTER)).note(world.run, "seen by all")
    page.wait_for_selector("text=seen by all", timeout=120_000)
    assert [one.get_attribute("viewBox") for one in page.locator("svg.axes .plot").all()] == near  # a refresh keeps it
    page.keyboard.press("0")
    assert len({one.get_attribute("viewBox") for one in card.locator(".lin .plot").all()} & set(near)) == 0
    assert page.troubles == []


def test_a_change_is_seen_without_a_reload(page: Any, world: ConsoleWorld) -> None:
    page.wait_for_selector("#following:not([hidden])")
    page.evaluate("() => { window.stayed = true; }")
    run = RunRecord("arrives-22222222", "arrives", "sha256:" + "0" * 64, "pending", "ben", 2.0)
    with world.bench.workspace.ledger.transaction("user:ben") as transaction:
        transaction.insert_run(run, [StageRecord(run.id, "hold", 0, "wait", "pending")])
    page.wait_for_selector("text=arrives-22222222", timeout=120_000)
    assert page.evaluate("() => window.stayed")
    page.goto(f"{world.bench.url}/projects/default/runs/{run.id}")
    page.evaluate("() => { window.stayed = true; }")
    page.wait_for_selector("#following:not([hidden])")
    world.bench.control(world.bench.person("cy", Role.SUBMITTER)).stop(run.id)
    page.wait_for_selector("#status:has-text('stop')", timeout=120_000)
    assert page.evaluate("() => window.stayed")
    page.evaluate(HIDE)
    assert page.query_selector("#following:not([hidden])") is None, "nobody looks"


def test_a_page_is_left_when_its_session_is_over(page: Any, world: ConsoleWorld) -> None:
    admin = world.bench.control(KEY)
    page.goto(f"{world.bench.url}/projects/default/channels")
    page.wait_for_selector("#following:not([hidden])")
    known = [one for one in admin.tokens() if one.actor == "user:ann" and not one.revoked_at]
    for one in known:
        admin.revoke_token(one.id)
    page.wait_for_url("**/login?next=%2Fprojects%2Fdefault%2Fchannels", timeout=120_000)
    page.fill("#token", world.bench.person("ann", Role.APPROVER))
    page.click("button.main")
    page.wait_for_url("**/projects/default/channels")


def test_the_keyboard_alone_is_enough(page: Any, world: ConsoleWorld) -> None:
    page.keyboard.press("?")
    page.wait_for_selector("#keys[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#keys:not([open])", state="attached")
    page.keyboard.press("/")
    assert page.evaluate("() => document.activeElement.id") == "filter"
    page.keyboard.type(world.run[:9])
    page.keyboard.press("Escape")
    assert page.evaluate("() => [...document.querySelectorAll('[data-row]')].filter(r => !r.hidden).length") == 1
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"**/runs/{world.run}")
    page.keyboard.press("g")
    page.keyboard.press("c")
    page.wait_for_url("**/channels")
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url("**/runs")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("() => document.activeElement.textContent.trim().slice(0, 20)"))
        outline = page.evaluate("() => getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("() => document.activeElement === document.body")
    assert {"Runs", "Channels", "Compare", "default", "Compare the chosen r"} <= reached


def test_a_rollback_by_click_says_what_will_serve_and_wants_a_reason(page: Any, world: ConsoleWorld) -> None:
    ledger = world.bench.workspace.ledger
    before = ledger.history("prod")
    page.goto(f"{world.bench.url}/projects/default/channels/prod")
    page.click("text=Roll back…")
    page.wait_for_selector("text=Live after the rollback")
    assert before[0].model_digest.removeprefix("sha256:")[:12] in page.inner_text(".after")
    page.click("button.danger")  # the field is required: nothing is sent
    assert len(ledger.history("prod")) == len(before)
    page.fill("#reason", f"worse in production {ATTACK}")
    page.click("button.danger")
    page.wait_for_url("**/channels/prod")
    entry = ledger.history("prod")[-1]
    assert (entry.action, entry.model_digest, entry.actor) == ("rollback", before[0].model_digest, "user:ann")
    assert "worse in production" in page.inner_text("#channel")
    assert page.evaluate(STARTED) == [None, False]
    assert page.troubles == []


def test_what_is_quarantined_is_readable_at_any_width(page: Any, world: ConsoleWorld) -> None:
    page.goto(f"{world.bench.url}/projects/default/channels/prod")
    if page.query_selector("text=Quarantined") is None:  # the test before this one rolled back already
        world.bench.control(KEY).rollback("prod", None, None, "worse")
        page.reload()
    for width, scheme in ((390, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        SHOTS.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=SHOTS / f"console-quarantine-{width}-{scheme}.png", full_page=True)
        shares = page.evaluate(SHARES)
        assert shares
        assert min(shares) > (0.85 if width == 390 else 0.3), (width, shares)
        assert [*page.evaluate(WIDE), *page.evaluate(FAINT, LEAST_CONTRAST)] == []


def test_a_release_is_approved_by_click(page: Any, world: ConsoleWorld) -> None:
    world.ask_approval()
    place = f"{world.bench.url}/projects/default/channels/guarded"
    page.goto(place)
    page.wait_for_selector("[data-loaded] >> text=PASS", timeout=120_000)
    assert "heldout/accuracy" in page.inner_text("[data-loaded]"), "scores"
    for width, scheme in ((390, "light"), (1280, "dark")):
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=SHOTS / f"console-approval-{width}-{scheme}.png", full_page=True)
        assert [*page.evaluate(WIDE), *page.evaluate(FAINT, LEAST_CONTRAST)] == []
    page.fill("[name=reason]", "the numbers hold")
    page.press("[name=reason]", "Enter")  # says nothing yet: whoever writes why they reject approves nothing by it
    assert "has none" in page.inner_text("#channel")
    page.click("button[value=approve]")
    page.wait_for_selector("text=approved by user:ann: the numbers hold")
    page.goto(f"{world.bench.url}/projects/default/runs")
    page.wait_for_selector("section:has-text('Waiting') >> text=release")


def test_it_works_without_a_script(chromium: Any, world: ConsoleWorld, token: str) -> None:
    chromium.clear_cookies()
    page = chromium.new_page()
    page.route("**/console.js*", lambda route: route.abort())
    page.goto(f"{world.bench.url}/")
    page.fill("#token", token)
    page.click("button.main")
    page.click(f"a[href$='/runs/{world.run}']")
    page.click("text=report")
    page.wait_for_selector("text=Lineage")
    page.goto(f"{world.bench.url}/projects/default/compare")
    page.check(f"input[value='{world.run}']")
    page.click("button.main")
    page.close()


def test_two_models_are_talked_to_side_by_side_as_they_answer(page: Any, world: ConsoleWorld) -> None:
    root = world.bench.workspace.root
    with stub_model() as model:
        conceal = [announce_model(root, "default", name, Served(model.url, MODEL_KEY)) for name in ("prod", CHANNEL)]
        page.set_viewport_size({"width": 1280, "height": 844})
        page.goto(f"{world.bench.url}/projects/default/channels/prod")
        page.click("text=Talk to it")
        page.select_option("#other", CHANNEL)
        page.click("text=Start a new conversation")
        for place, message in enumerate(("sort 3 1 2", ATTACK), start=1):
            page.fill("#message", message)
            page.click("button:has-text('Send')")
            page.wait_for_function(f"() => document.querySelectorAll('.theirs').length === {2 * place}")
            page.wait_for_function(ANSWERED)
        assert page.locator(".talk").first.locator(".theirs").all_inner_texts()[0] == "sort 3 1 2 / sort 3 1 2"
        assert len(model.asked[-1]["messages"]) == 3
        assert page.evaluate(STARTED) == [None, False]
        page.screenshot(path=SHOTS / "console-talk.png", full_page=True)
        for one in conceal:
            one()
        page.fill("#message", "anyone there?")
        page.click("button:has-text('Send')")
        page.wait_for_selector("[role=alert]:not([hidden])")
    page.troubles.clear()
