"""The documentation site in a real Chromium, opened from the disk: on a phone and on a desk, light and dark.

Every page is opened; the screenshots of some go to `$SCREENSHOTS` (default: `.screenshots/` here), for people to look
at.
"""

from __future__ import annotations

import filecmp
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_pages import FAINT, LEAST_CONTRAST, SCHEMES, SHOTS, TINY, WIDTHS

pytestmark = pytest.mark.browser
ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md"))
SHOWN = ("index", "get-started", "concepts", "howto/from-trl", "reference/fields", "reference/commands", "glossary")
# What reaches beyond the window without lying in a table or a block that scrolls by itself. Not asked of what stands
# beside the article: the navigation lies beyond the window until somebody asks for it
BROAD = """() => {
  const article = document.querySelector('article');
  const scrolls = e => { for (let p = e; p !== article; p = p.parentElement)
    if (['auto', 'scroll', 'hidden'].includes(getComputedStyle(p).overflowX)) return true; return false; };
  const found = [...article.querySelectorAll('*')].filter(
    e => e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e));
  const page = document.documentElement.scrollWidth > innerWidth ? ['the page scrolls sideways'] : [];
  return [...page, ...found.slice(0, 5).map(e => `<${e.tagName.toLowerCase()}>: ${e.textContent.slice(0, 60)}`)];
}"""
PATIENCE = 300  # seconds; it ends what hangs


def build(folder: Path, seed: str = "0") -> Path:
    """The site, as `make site` makes it."""
    words = ["--fail-on-warning", "--keep-going", "--quiet", "-c", "handbook", "-d", f"{folder}-doctrees", "docs"]
    subprocess.run(
        [sys.executable, "-m", "sphinx", *words, str(folder)],
        cwd=ROOT, check=True, timeout=PATIENCE, env={**os.environ, "PYTHONHASHSEED": seed},
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site") / "one")


@pytest.fixture
def page(chromium: Any, site: Path) -> Iterator[Any]:
    """A tab; at the end nothing was said on its console and nothing outside the site was asked for."""
    found: list[str] = []
    tab = chromium.new_page()
    tab.on("console", lambda message: found.append(f"console: {message.text}"))
    tab.on("pageerror", lambda error: found.append(f"error: {error}"))
    own = site.as_uri() + "/"
    tab.on("request", lambda request: None if request.url.startswith(own) else found.append(request.url[:80]))
    yield tab
    tab.close()
    assert found == []


def opened(page: Any, site: Path, name: str, width: int, scheme: str) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto((site / f"{name}.html").as_uri())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_fits_and_can_be_read(page: Any, site: Path, width: int, scheme: str) -> None:
    wrong = {}
    for name in SOURCES:
        opened(page, site, name, width, scheme)
        found = [*page.evaluate(BROAD), *page.evaluate(FAINT, LEAST_CONTRAST), *page.evaluate(TINY)]
        if found:
            wrong[name] = found
        if name in SHOWN:
            SHOTS.mkdir(parents=True, exist_ok=True)
            page.screenshot(path=SHOTS / f"site-{name.replace('/', '-')}-{width}-{scheme}.png")
    assert wrong == {}


def test_what_is_wrong_with_a_page_is_noticed(chromium: Any, tmp_path: Path) -> None:
    tab = chromium.new_page()
    tab.set_viewport_size({"width": 360, "height": 800})
    page = tmp_path / "bad.html"
    page.write_text(
        "<!doctype html><body style='overflow-x: hidden; background: #fff'><article>"
        "<div style='width: 900px'>wide</div><div style='overflow: auto'><p style='width: 900px'>scrolls</p></div>"
        "<p style='color: #ddd'>faint</p></article>"
    )
    tab.goto(page.as_uri())
    assert tab.evaluate(BROAD) == ["the page scrolls sideways", "<div>: wide"]
    assert "contrast 1.4" in tab.evaluate(FAINT, LEAST_CONTRAST)[0]
    tab.close()


def test_search_finds_a_word_without_a_server(page: Any, site: Path) -> None:
    opened(page, site, "index", 1280, "light")
    page.fill("input[name=q]", "rollback")
    page.press("input[name=q]", "Enter")
    found = '#search-results a[href^="howto/release.html"]'
    page.wait_for_selector(found, timeout=PATIENCE * 1000)
    page.click(found)
    assert page.url.startswith(site.as_uri())


def test_generated_words_are_found(page: Any, site: Path) -> None:
    page.goto((site / "search.html").as_uri() + "?q=micro_batch_tokens")
    page.wait_for_selector('#search-results a[href^="reference/fields.html"]', timeout=PATIENCE * 1000)


@pytest.mark.parametrize("width", WIDTHS)
def test_the_picture_of_the_concepts_is_seen(page: Any, site: Path, width: int) -> None:
    colours = set()
    for scheme in SCHEMES:
        opened(page, site, "concepts", width, scheme)
        box = page.locator("figure.picture svg").bounding_box()
        assert width * 0.3 < box["width"] < width
        assert box["height"] > box["width"]
        words = page.eval_on_selector_all("figure.picture text", "texts => texts.map(t => t.textContent)")
        assert {"manifest", "sft", "grpo", "evaluate", "baseline", "gate", "release", "channel: prod"} <= set(words)
        within = page.evaluate(
            """() => { const frame = document.querySelector('figure.picture svg').getBoundingClientRect();
            return [...document.querySelectorAll('figure.picture text')].filter(
              t => t.getBoundingClientRect().right > frame.right - 4).map(t => t.textContent); }"""
        )
        assert within == [], "text beyond its box"
        colours.add(page.eval_on_selector("figure.picture rect", "r => getComputedStyle(r).fill"))
    assert len(colours) == 2, "the picture is the same in the dark"


def test_dark_is_dark(page: Any, site: Path) -> None:
    seen = []
    for scheme in SCHEMES:
        opened(page, site, "index", 1280, scheme)
        colour = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        seen.append([int(part) for part in colour[4:-1].split(",")])
    assert min(seen[0]) > 200
    assert max(seen[1]) < 60


def test_a_phone_opens_the_navigation(page: Any, site: Path) -> None:
    opened(page, site, "index", 360, "light")
    link = page.locator(".sidebar-tree a", has_text="Coming from verl")
    assert link.bounding_box()["x"] < 0, "it lies beside the page until it is asked for"
    page.locator(".mobile-header label[for=__navigation]").click()
    link.click()
    assert page.url.endswith("howto/from-verl.html")


def test_two_builds_are_equal(site: Path, tmp_path: Path) -> None:
    other = build(tmp_path / "two", seed="7")
    names = sorted(str(path.relative_to(site)) for path in site.rglob("*") if path.is_file())
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*") if path.is_file())
    _, different, missing = filecmp.cmpfiles(site, other, names, shallow=False)
    assert (different, missing) == ([], [])


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    """Neither by a page nor by a style; what Chromium would ask for is watched in the tests above."""
    for path in (*site.rglob("*.html"), *site.rglob("*.css")):
        text = path.read_text(encoding="utf-8")
        for mark in ('src="http', 'rel="stylesheet" href="http', "url(http", "url(//", "@import", 'src="//'):
            assert mark not in text, f"{path.name}: {mark}"
