"""The generated pages have every field, verb, option, exit code and state that there is, with its default and meaning.

What they are held against is found in another way than the pages are made: JSON schemas, and what `--help` prints.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from handbook import api, blocks, codes, fields, kinds, verbs
from handbook.meanings import MEANINGS
from handbook.weaving import woven
from typer.testing import CliRunner

import posttrain
from posttrain.cli.main import app
from posttrain.domain import errors
from posttrain.domain.lifecycle import TABLES, Reason
from posttrain.domain.runspec import RunSpec
from posttrain.domain.waits import Wait
from posttrain.engine.config import STAGE_CONFIGS, HarnessConfig

ROOT = Path(__file__).resolve().parents[2]


@cache
def schemas() -> dict[str, dict[str, Any]]:
    """Model → its properties, of everything that run.yaml is made of."""
    found: dict[str, dict[str, Any]] = {}
    for model in (RunSpec, *STAGE_CONFIGS.values(), HarnessConfig, Wait):
        schema = model.model_json_schema(mode="validation")
        for name, part in {**schema.get("$defs", {}), model.__name__: schema}.items():
            if "properties" in part:
                found[name] = {"properties": part["properties"], "required": part.get("required", [])}
    return found


@cache
def sections() -> dict[str, dict[str, list[str]]]:
    """Model → field → the cells beside it, as the page has them."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in re.split(r"^\(fields-", fields.page(), flags=re.MULTILINE)[1:]:
        rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", part, re.MULTILINE)
        found[part.partition(")")[0]] = {name: re.split(r" (?<!\\)\| ?", cells) for name, cells in rows}
    return found


def test_every_field_of_the_models_is_on_the_page_and_no_other() -> None:
    for model, known in schemas().items():
        shown = sections()[model.lower()]
        assert set(shown) == set(known["properties"]) - ({"params"} if model == "StageSpec" else set()), model
        for name, cells in shown.items():
            written, property_ = cells[1], known["properties"][name]
            assert (written == "required") == (name in known["required"]), (model, name)
            usual = property_.get("default")
            if isinstance(usual, str | int | float) and not isinstance(usual, bool):
                forms = (str(usual), f"{usual!r}".replace("e-0", ".0e-"))
                assert written.strip("`").replace("\\n", "\n") in forms, (model, name)


def test_every_field_is_explained() -> None:
    fields_of = {model: sections()[model.lower()] for model in schemas()}
    silent = [
        f"{model}.{name}" for model, rows in fields_of.items() for name, cells in rows.items() if not cells[2].strip()
    ]
    assert not silent, f"write a comment beside {', '.join(silent)}"


def test_no_meaning_is_kept_for_a_field_that_is_gone() -> None:
    known = {f"{model}.{name}" for model, schema in schemas().items() for name in schema["properties"]}
    known |= {key.partition(".")[2] for key in known}
    for model in (RunSpec, *STAGE_CONFIGS.values()):
        known |= {f"{base.__name__}.{name}" for base in model.__mro__ for name in getattr(base, "model_fields", {})}
    known |= {f"InferenceRuntimeConfig.{name}" for name in schemas()["InferenceRuntimeConfig"]["properties"]}
    assert set(MEANINGS) <= known


def test_bounds_and_choices_are_those_of_the_models() -> None:
    shown = sections()
    assert shown["grpoconfig"]["group_size"][:2] == ["whole number, ≥ 2, ≤ 10⁶", "`8`"]
    assert shown["grpoconfig"]["advantage"][0] == "`grpo` · `dr_grpo` · `rloo`"
    assert shown["optimizerconfig"]["learning_rate"][:2] == ["number, > 0, ≤ 1", "`1.0e-5`"]
    assert shown["budget"]["tokens"][0].startswith("whole number (`5000000`, `5e6`), ≥ 1, < 2⁵³")
    assert shown["runtimeconfig"]["micro_batch_tokens"][:2] == ["whole number, ≥ 1, ≤ 10⁹ or `auto`", "`auto`"]
    assert "[OptimizerConfig](#fields-optimizerconfig)" in shown["sftconfig"]["optimizer"][0]


@cache
def helps() -> dict[str, str]:
    """ "asset add" → what `posttrain asset add --help` prints, in one line."""
    found, waiting = {}, [([], typer.main.get_command(app))]
    for words, command in waiting:
        children = getattr(command, "commands", {})
        waiting += [([*words, name], child) for name, child in children.items()]
        if not children:
            shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=1000)
            found[" ".join(words)] = " ".join(shown.output.split())
    return found


def test_every_verb_is_on_the_page() -> None:
    assert set(re.findall(r"^## posttrain (.+)$", verbs.page(), re.MULTILINE)) == set(helps())


def test_every_option_and_its_text_is_on_the_page() -> None:
    page = verbs.page()
    for verb, printed in helps().items():
        section = re.split(r"^## ", page.split(f"## posttrain {verb}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
        switches = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", printed.partition("Options:")[2])) - {"--help"}
        rows = re.findall(r"^\| (.+?) \| .* \| (.*) \|$", section, re.MULTILINE)[1:]
        assert switches <= set(re.findall(r"--[a-z][a-z-]+", " ".join(words for words, _ in rows))), verb
        for words, told in rows:
            assert re.sub(r"\\(?=\|)", "", told) in printed, (verb, words)
        assert section.strip().partition("\n\n")[0] in printed, verb


def test_every_exit_code_failure_verdict_and_state_is_on_the_page() -> None:
    text = codes.page()
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, errors.PosttrainError) and kind is not errors.PosttrainError:
            assert re.search(rf"^\| {kind.exit_code} \|.*`{kind.__name__}`", text, re.MULTILINE), kind
    assert {0, 1, 130, 141} <= set(codes.exit_codes())
    for failure in errors.FailureClass:
        assert f"| `{failure.value}` | {failure.error.exit_code} |" in text
    for table in TABLES.values():
        for state, onward in table.items():
            row = f"| `{state}` | {', '.join(f'`{name}`' for name in sorted(onward)) or 'nothing: final'} |"
            assert row in text


def test_every_public_name_of_the_package_is_on_the_page() -> None:
    shown = set(re.findall(r"^## (\w+)$", api.page(), re.MULTILINE))
    assert shown == {name for name in posttrain.__all__ if not name.startswith("_")}


@pytest.mark.slow
def test_the_pages_are_the_same_at_every_build() -> None:
    names = "api, codes, fields, picture, verbs"
    command = [sys.executable, "-c", f"from handbook import {names}; print(*[made.page() for made in ({names})])"]
    made = [
        subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True)
        for seed in ("1", "2")
    ]
    assert made[0].stdout == made[1].stdout
    assert len(made[0].stdout) > 20_000


def test_a_diagram_becomes_a_table_and_a_folder_no_link() -> None:
    diagram = "```mermaid\nstateDiagram-v2\n    [*] --> a\n    a --> b\n    a --> c\n    c --> [*]\n```\n"
    shown = woven(f"{diagram}[roles/](../src/posttrain/engine/roles)", ROOT / "docs")
    assert "| a | b, c |" in shown
    assert "| c | *ends* |" in shown
    assert shown.endswith("\nroles/")


@pytest.mark.parametrize("page", blocks.pages())
def test_what_lies_on_disk_is_what_the_code_makes(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert blocks.made(page, text) == text, "run python -m handbook.blocks"


def test_a_changed_table_and_a_missing_end_are_noticed() -> None:
    text = (ROOT / "docs" / "run-yaml" / "sft.md").read_text(encoding="utf-8")
    stale = text.replace("| `batch_size` | whole number, ≥ 1, ≤ 10⁶ | `64` |", "| `batch_size` | whole number | `32` |")
    assert stale != text
    assert blocks.made("run-yaml/sft.md", stale) == text
    with pytest.raises(ValueError, match=r"docs/run-yaml/sft.md must have a <!-- fields:end --> after every"):
        blocks.made("run-yaml/sft.md", text.replace("<!-- fields:end -->", ""))


def test_a_table_has_a_row_for_each_field_and_its_links_lead_to_pages() -> None:
    for name, model in kinds.TABLES.items():
        rows = re.findall(
            r"^\| `([\w.]+)` \| (.+) \| (.+) \| (.+) \|$", kinds.table(name, "run-yaml/x.md"), re.MULTILINE
        )
        found = {row[0].partition(".")[0] for row in rows}
        expected = {info.alias or field for field, info in model.model_fields.items()}
        assert found == expected - ({"params"} if name == "stage" else set()), name
        assert len({row[0] for row in rows}) == len(rows), name
        assert not any("#fields-" in row[1] or "as below" in row[2] for row in rows), name


def test_the_commands_of_the_groups_are_all_commands() -> None:
    table = verbs.overview()
    assert re.findall(r"^## (.+)$", table, re.MULTILINE) == ["Run", "Look", "Ship", "Serve", "Share", "Keep"]
    rows = re.findall(r"^\| `(.+)` \| (.+) \|$", table, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(helps())
    assert all(purpose in helps()[name] for name, purpose in rows)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"docs/architecture.md must have <!-- lifecycle:begin -->"):
        blocks.made("architecture.md", "<!-- lifecycle:end --> <!-- lifecycle:begin -->")


def test_the_diagrams_are_the_tables() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for machine, table in TABLES.items():
        drawn = re.search(rf"^### {machine}\n\n```mermaid\nstateDiagram-v2\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
        assert drawn
        arrows = set(re.findall(r"^    (\w+) --> (\w+)$", drawn[1], re.MULTILINE))
        assert arrows == {(source, target) for source in table for target in table[source]}


def test_every_reason_has_its_row() -> None:
    page = (ROOT / "docs" / "reference" / "reasons.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `([\w:]+)` \| .+ \| .+ \| .+ \|$", page, re.MULTILINE) == [one.value for one in Reason]
