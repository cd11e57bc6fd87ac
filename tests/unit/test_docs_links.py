"""Every link and anchor of README and docs leads somewhere, every page is in the navigation, words are in order.

`make site` has Sphinx check links a second time; it does not see README and CONTRIBUTING.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from documents import PAGES, ROOT
from pages import rendered

DOCS = ROOT / "docs"
_CODE = re.compile(r"^( *)```.*?^\1```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@cache  # rendering fields.md takes a quarter of a second, and it links to itself 180 times
def anchors(page: Path) -> set[str]:
    """What `page.md#…` may name: its headings, and the labels that it sets."""
    text = rendered(page)
    headings = re.findall(
        r"^#{1,4} +(.+)$", re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {slug(heading) for heading in headings} | set(re.findall(r"^\(([\w-]+)\)=$", text, re.MULTILINE))


def slug(heading: str) -> str:
    """As GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def test_files_that_the_architecture_names_exist() -> None:
    text = (DOCS / "architecture.md").read_text()
    one = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    several = {
        f"{room}{name}.py"
        for room, names in re.findall(r"`((?:\w+/)+)\{([\w,]+)\}\.py`", text)
        for name in names.split(",")
    }
    assert (len(one) > 50, len(several) > 5) == (True, True)
    files = [
        f"/{path.relative_to(ROOT).as_posix()}"
        for room in ("src", "tests", "handbook")
        for path in (ROOT / room).rglob("*.py")
    ]
    assert [name for name in sorted(one | several) if not any(file.endswith(f"/{name}") for file in files)] == []


def broken(page: Path, text: str | None = None) -> list[str]:
    """Targets of a page's links that are not there."""
    found = []
    for target in _LINK.findall(_CODE.sub("", rendered(page) if text is None else text)):
        file, _, anchor = target.partition("#")
        goal = (page.parent / file).resolve() if file else page
        if re.match(r"https?:", target):
            continue
        missing = not goal.exists() or not goal.is_relative_to(ROOT)
        if missing or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            found.append(target)
    return found


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_the_changelog_links_only_what_the_site_has() -> None:
    """The site includes it from another folder and rewrites links to `docs/` only."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    relative = [link for link in _LINK.findall(_CODE.sub("", text)) if not re.match(r"https?:", link)]
    assert [link for link in relative if not link.startswith("docs/")] == []
    assert ":relative-docs: docs/" in (DOCS / "changelog.md").read_text(encoding="utf-8")


def test_a_broken_link_is_noticed() -> None:
    page = DOCS / "results.md"
    text = (
        "[a](nowhere.md) [b](gates.md#levels) [c](gates.md#nothing) [d](#nothing) `[e](code.md)` [f](../../outside.md)"
    )
    assert broken(page, text) == ["nowhere.md", "gates.md#nothing", "#nothing", "../../outside.md"]


def test_every_page_is_in_the_navigation_once() -> None:
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    decisions = [f"adr/{path.stem}" for path in sorted((DOCS / "adr").glob("*.md"))]
    named = [*(name for name in named if name != "adr/*"), *(decisions if "adr/*" in named else [])]
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"index"}
    assert len(set(named)) == len(named)
    assert set(named) == pages


def test_the_glossary_says_each_word_once_in_order() -> None:
    words = re.findall(r"^(\w[\w ]*)\n: \S", (DOCS / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert words == sorted(set(words))
    wanted = [
        "run",
        "stage",
        "attempt",
        "asset",
        "channel",
        "gate",
        "suite",
        "evaluator",
        "probe",
        "baseline",
        "lineage",
        "manifest",
        "digest",
        "pool",
    ]
    assert set(wanted) <= set(words)


def test_every_decision_has_a_number_of_its_own_and_says_it() -> None:
    decisions = sorted((DOCS / "adr").glob("*.md"))
    numbers = [path.name[:4] for path in decisions]
    assert len(set(numbers)) == len(numbers)
    assert all(number.isdigit() for number in numbers)
    for path in decisions:
        assert path.read_text(encoding="utf-8").startswith(f"# {path.name[:4]}"), path.name


def test_nothing_that_is_built_is_in_the_repository() -> None:
    """A site, say: what `.gitignore` names is not tracked."""
    listed = ["git", "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout == ""
