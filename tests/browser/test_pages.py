"""Report, comparison and trace in a real Chromium: on a phone and on a desk, light and dark; with hostile texts inside.

Screenshots go to `$SCREENSHOTS` (default: `.screenshots/` here), for people to look at.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from web_pages import LONG_RUN, rich_world

pytestmark = pytest.mark.browser
SHOTS = Path(os.environ.get("SCREENSHOTS") or Path(__file__).resolve().parents[2] / ".screenshots")
WIDTHS = (360, 1280)
SCHEMES = ("light", "dark")
LEAST_CONTRAST = 4.5  # of text, WCAG 2 AA

# What reaches beyond the window without lying in something that scrolls by itself
WIDE = """() => {
  const scrolls = e => { for (let p = e; p && p !== document.body; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const found = [...document.body.querySelectorAll('*')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e));
  const page = document.documentElement.scrollWidth > innerWidth ? ['the page scrolls sideways'] : [];
  const said = e => `<${e.tagName.toLowerCase()}> is too wide: ${e.textContent.slice(0, 60)}`;
  return [...page, ...found.slice(0, 5).map(said)];
}"""
# Text that can hardly be told from what is behind it
FAINT = """least => {
  const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = c => { const [r, g, b] = c.map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b; };
  const behind = e => { for (; e; e = e.parentElement) { const c = parse(getComputedStyle(e).backgroundColor);
    if (c.length && (c.length < 4 || c[3] > .9)) return c.slice(0, 3); } return [255, 255, 255]; };
  const told = new Set();
  for (const e of document.body.querySelectorAll('*')) {
    if (e.closest('svg') || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
    const pair = [light(parse(getComputedStyle(e).color).slice(0, 3)), light(behind(e))].sort((a, b) => b - a);
    const contrast = (pair[0] + .05) / (pair[1] + .05);
    const name = `<${e.tagName.toLowerCase()} class="${e.className}">`;
    if (contrast < least) told.add(`${name} has contrast ${contrast.toFixed(1)}`);
  }
  return [...told].slice(0, 5);
}"""
# Letters of pictures smaller than one can read
TINY = """() => [...document.querySelectorAll('svg text')].filter(e => {
    const box = e.getBoundingClientRect(); return box.width && box.height < 9; })
  .slice(0, 3).map(e => `letters ${e.getBoundingClientRect().height.toFixed(1)} px high: ${e.textContent}`)"""
FOREIGN = "() => ['script', 'img', 'iframe', 'object', 'embed', 'form', 'link'].filter(t => document.querySelector(t))"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The three pages of a run of many steps, whose texts try to be markup."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("pages")
        world = rich_world(folder, patch, LONG_RUN)
        world.ok("run", "run.yaml")
        run = world.newest()
        world.ok("compare", f"{run}/base-eval", run, "--html", "compare.html")
        world.ok("trace", run, "--out", ".")
        report = folder / ".posttrain" / "runs" / run / "report.html"
        yield {"report": report, "compare": folder / "compare.html", "trace": folder / f"{run}-trace.html"}


def problems(context: Any, path: Path, width: int, scheme: str, shot: Path | None = None) -> list[str]:
    """What is wrong with a page in a window."""
    found: list[str] = []
    page = context.new_page()
    try:
        page.set_viewport_size({"width": width, "height": 800})
        page.emulate_media(color_scheme=scheme)
        page.on("console", lambda message: found.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: found.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (found.append("a dialog opened"), dialog.dismiss()))
        own = path.resolve().as_uri()
        page.on("request", lambda request: None if request.url == own else found.append(f"request: {request.url[:80]}"))
        page.goto(own)
        if shot is not None:
            shot.parent.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=shot, full_page=True)
        page.evaluate("() => document.querySelectorAll('details').forEach(d => { d.open = true; })")
        if page.title() == "pwned":
            found.append("a text of the run became a script")
        found += [f"<{name}> is in the page" for name in page.evaluate(FOREIGN)]
        found += [*page.evaluate(WIDE), *page.evaluate(FAINT, LEAST_CONTRAST), *page.evaluate(TINY)]
    finally:
        page.close()
    return found


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["report", "compare", "trace"])
def test_a_page_is_readable_and_harmless(
    chromium: Any, written: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    shot = SHOTS / f"{name}-{width}-{scheme}.png"
    assert problems(chromium, written[name], width, scheme, shot) == []
    assert written[name].stat().st_size < 2_000_000
    assert shot.stat().st_size > 10_000


def test_dark_is_dark(chromium: Any, written: dict[str, Path]) -> None:
    page = chromium.new_page()
    colours = []
    for scheme in SCHEMES:
        page.emulate_media(color_scheme=scheme)
        page.goto(written["report"].resolve().as_uri())
        colours.append(page.evaluate("() => getComputedStyle(document.body).backgroundColor"))
    page.close()
    light, dark = ([int(part) for part in colour[4:-1].split(",")] for colour in colours)
    assert min(light) > 200
    assert max(dark) < 60


def test_what_is_wrong_is_noticed(chromium: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><title>x</title><body style='background:#fff'><div style='width:900px'>wide</div>"
        "<p style='color:#ddd'>faint</p><svg width=300 viewBox='0 0 3000 50'><text y=20>tiny</text></svg>"
        "<img src=nothing.png><script>document.title = 'pwned'; console.log('hello'); undefinedName()</script>"
    )
    found = " | ".join(problems(chromium, path, 360, "light"))
    for words in (
        *("scrolls sideways", "too wide", "contrast 1.4", "px high: tiny", "<script> is in the page", "console: hello"),
        *("request: file:", "became a script", "error: undefinedName"),
    ):
        assert words in found, words
