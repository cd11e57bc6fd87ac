"""docs/run-yaml.md and docs/run-yaml: every kind has a page, with a valid stage and a table of its fields."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from handbook.kinds import TABLES

from posttrain.domain.placement import ROLES, Placement
from posttrain.engine.config import STAGE_CONFIGS, stage_config

DOCS = Path(__file__).resolve().parents[2] / "docs"
OVERVIEW = (DOCS / "run-yaml.md").read_text(encoding="utf-8")
PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted((DOCS / "run-yaml").glob("*.md"))}


def test_every_table_is_on_a_page_once() -> None:
    found = re.findall(r"^<!-- fields:(?!end)([\w-]+) -->$", "\n".join([OVERVIEW, *PAGES.values()]), re.MULTILINE)
    assert len(set(found)) == len(found)
    shown = {TABLES[name] for name in found}
    assert shown == set(TABLES.values())  # kinds of one configuration share their table


def test_every_kind_has_a_row_in_the_overview_and_a_valid_stage_on_its_page() -> None:
    pages = dict[str, str]()
    for names, page in re.findall(r"^\| \[(`.+?`)\]\(run-yaml/([\w-]+\.md)(?:#[\w-]+)?\) \|", OVERVIEW, re.MULTILINE):
        pages |= dict.fromkeys(re.findall(r"`(\w+)`", names), page)
    assert set(pages) == {*STAGE_CONFIGS, "wait"}
    for kind, page in pages.items():
        blocks = re.findall(r"^```yaml\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
        stages = [stage for text in blocks for stage in (yaml.safe_load(text).get("stages") or {}).values()]
        shown = [stage for stage in stages if stage["kind"] == kind]
        assert shown, kind
        for stage in shown if kind != "wait" else ():  # test_docs_blocks plans every block, a wait among them
            stage_config(kind, {name: value for name, value in stage.items() if name not in ("kind", "after")})


def test_the_overview_is_short() -> None:
    assert len(OVERVIEW.splitlines()) <= 150


def test_the_placements_of_the_reference_are_valid_and_every_role_is_named() -> None:
    examples = [line for line in PAGES["placement.md"].splitlines() if line.startswith("placement: ")]
    assert len(examples) == 4
    for line in examples:
        Placement.model_validate(yaml.safe_load(line)["placement"])
    assert {f"`{role}`" for role in ROLES} <= set(re.findall(r"`\w+`", PAGES["placement.md"]))
