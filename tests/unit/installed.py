"""Packages as pip leaves them: written by hand, so that no test needs a network."""

from __future__ import annotations

import sys
import textwrap
import tomllib
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))
from pages import blocks

from posttrain.domain import plugins

POINTS = "entry_points.txt"


def metadata_of(name: str, version: str, points: str, requires: tuple[str, ...] = ()) -> dict[str, str]:
    """File of a `.dist-info` folder → its text."""
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    return {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        POINTS: textwrap.dedent(points),
    }


def files_of(
    name: str, version: str, points: str, sources: Mapping[str, str], requires: tuple[str, ...] = ()
) -> dict[str, str]:
    """Path below site-packages → text."""
    folder = f"{name.replace('-', '_')}-{version}.dist-info"
    about = {f"{folder}/{file}": text for file, text in metadata_of(name, version, points, requires).items()}
    files = {path: textwrap.dedent(text) for path, text in sources.items()} | about
    return {**files, f"{folder}/RECORD": "".join(f"{path},,\n" for path in (*files, f"{folder}/RECORD"))}


def install(
    site: Path, name: str, version: str, points: str, sources: Mapping[str, str], requires: tuple[str, ...] = ()
) -> None:
    """Write a package below a folder of `sys.path`."""
    for path, text in files_of(name, version, points, sources, requires).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)


def wheel(folder: Path, name: str, version: str, points: str, sources: Mapping[str, str]) -> Path:
    """A wheel that pip installs."""
    path = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        for member, text in files_of(name, version, points, sources).items():
            archive.writestr(member, text)
    return path


def on_path(monkeypatch: pytest.MonkeyPatch, *sites: Path) -> None:
    """Let this process import from these folders, and look for entry points anew."""
    for site in reversed(sites):
        site.mkdir(parents=True, exist_ok=True)
        monkeypatch.syspath_prepend(site)
    plugins._scan.cache_clear()


Package = tuple[str, str, str, dict[str, str]]  # name, version, entry points, sources


def package_of(page: str) -> Package:
    """The package that a page of the documentation shows."""
    return _package({block.file: block.text for block in blocks("toml", "python", "yaml") if block.page == page})


def package_in(folder: Path) -> Package:
    """The package in a folder."""
    files = [path for path in folder.rglob("*") if path.suffix in (".toml", ".py")]
    return _package({str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in files})


def _package(files: Mapping[str, str]) -> Package:
    project = tomllib.loads(files["pyproject.toml"])["project"]
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in project["entry-points"].items()
    )
    sources = {file: text for file, text in files.items() if "/" in file}
    return project["name"], project["version"], points, sources


def run_of(page: str) -> str:
    """The run file that a page shows."""
    return next(block.text for block in blocks("yaml") if (block.page, block.file) == (page, "run.yaml"))
