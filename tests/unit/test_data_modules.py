"""A reward that an installed package has: found and read without importing it, pinned to its version."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from posttrain.data.catalog import Catalog
from posttrain.data.refs import Source, imported_reward, parse_ref
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.rewards import Signature
from posttrain.sandbox.port import RewardCall
from posttrain.sandbox.process import open_reward
from posttrain.store.blobs import open_blobs
from posttrain.store.database import Database
from posttrain.store.ledger import Ledger

RULES = "def exact(completions, answer, **kwargs):\n    return [float(c == a) for c, a in zip(completions, answer)]\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages, with one that must not be imported by a plan."""
    folder = tmp_path / "site"
    package = folder / "rated_things" / "sub"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("raise SystemExit('a plan must not import')\n")
    (package / "__init__.py").write_text("from rated_things.sub.rules import exact\n_names = {'rules': ['lazy']}\n")
    (package / "rules.py").write_text(RULES)
    (package / "odd.py").write_text("def unknown(x, y): ...\n")
    release(folder, "1.2")
    monkeypatch.syspath_prepend(str(folder))
    return folder


def release(folder: Path, version: str) -> None:
    for old in folder.glob("*.dist-info"):
        old.rename(folder / f"rated_things-{version}.dist-info")
    info = folder / f"rated_things-{version}.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rated-things\nVersion: {version}\n")
    (info / "top_level.txt").write_text("rated_things\n")


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    ledger = Ledger(Database(tmp_path / "ledger.db"))
    yield Catalog(ledger, open_blobs(f"memory://{uuid.uuid4()}"), "user:ada")
    ledger.close()


def test_found_without_importing(site: Path) -> None:
    found = imported_reward("rated_things.sub:exact")
    assert (found.distribution, found.version) == ("rated-things", "1.2")
    assert found.signature == Signature(("completions", "answer"), ("completions", "answer"), "kwargs")
    assert imported_reward("rated_things.sub.rules:exact").signature == found.signature
    assert imported_reward("rated_things.sub:lazy").signature == "lazy is imported from elsewhere"
    assert "rated_things" not in sys.modules


def test_version_and_content_are_its_identity(site: Path, catalog: Catalog) -> None:
    resolve = catalog.resolver(site)
    first = resolve("reward", "rated_things.sub:exact")
    assert (first.form, first.name, first.meta["entry"]) == ("file", "rated_things.sub:exact", "exact")
    assert resolve("reward", "rated_things.sub:exact").digest == first.digest
    release(site, "1.3")
    second = resolve("reward", "rated_things.sub:exact")
    (site / "rated_things" / "sub" / "rules.py").write_text(RULES.replace("==", "!="))
    third = resolve("reward", "rated_things.sub:exact")
    assert len({first.digest, second.digest, third.digest}) == 3


def test_what_is_published_imports_it_and_refuses_another_version(site: Path, catalog: Catalog, tmp_path: Path) -> None:
    (site / "rated_things" / "__init__.py").write_text("")
    ref = catalog.resolver(site)("reward", "rated_things.sub:exact")
    manifest = MagicMock()
    manifest.assets.return_value = [("grpo", "reward", ref)]
    catalog.publish(manifest)
    source = tmp_path / "imported_reward.py"
    source.write_bytes(imported_reward("rated_things.sub:exact").source)
    script = f"import sys; sys.path[:0] = [{str(site)!r}, {str(tmp_path)!r}]; import imported_reward as r; "
    run = [sys.executable, "-c", script + "print(r.exact(['1'], ['1']))"]
    assert subprocess.run(run, capture_output=True, text=True, check=True).stdout == "[1.0]\n"
    release(site, "2.0")
    failed = subprocess.run(run, capture_output=True, text=True, check=False)
    assert "ImportError: rated-things must be 1.2, as planned; plan the run again" in failed.stderr


def test_an_installed_package_s_function_scores_in_the_cell(tmp_path: Path) -> None:
    found = imported_reward("posttrain.domain.rewards:entry_name")  # any function will do that is there
    source = tmp_path / "imported_reward.py"
    source.write_bytes(
        found.source + b"\n\ndef score(completion):\n    return float(entry_name([completion], 'x') == completion)\n"
    )
    reward = open_reward(source, "score", timeout=300)
    try:
        assert reward.score(RewardCall(["Q"], ["f"], [{"prompt": "Q"}]))[0].score == 1.0
    finally:
        reward.close()


@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("rated_things.sub:exakt", r"rated_things\.sub has no exakt \(did you mean 'exact'\?\)"),
        ("rated_things.none:exact", r"no installed package has a module rated_things\.none; install it"),
        ("absent_package:exact", "no installed package has a module absent_package"),
        ("os.path:join", r"os\.path is in the standard library"),
        (
            "rated_things.sub.odd:unknown",
            r"rated_things\.sub\.odd:unknown: parameters \(x, y\) match no known dialect",
        ),
    ],
)
def test_refused(site: Path, catalog: Catalog, word: str, match: str) -> None:
    with pytest.raises(InputError, match=match):
        catalog.resolver(site)("reward", word)


def test_as_a_ref() -> None:
    ref = parse_ref("trl.rewards:accuracy_reward", "reward")
    assert (ref.source, str(ref), ref.on_disk) == (Source.MODULE, "trl.rewards:accuracy_reward", False)
    with pytest.raises(InputError, match=r"unknown kind 'rewrd' .*did you mean 'reward'"):
        parse_ref("rewrd:sort", "reward")
    with pytest.raises(InputError, match=r"unknown kind 'trl\.rewards'"):
        parse_ref("trl.rewards:accuracy_reward", "dataset")


def test_registering_one_says_where_it_is_written(catalog: Catalog) -> None:
    with pytest.raises(
        NotFoundError, match=r"name it in run\.yaml, as in rewards: \{mine: trl\.rewards:accuracy_reward\}"
    ):
        catalog.add_reward(Path("trl.rewards:accuracy_reward"), "x")
