"""Workspaces for end-to-end tests: a template with model, data and rewards, and one undisturbed run. Both are made once
per session (by whichever worker comes first) and copied by the tests.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import make_template, once
from workbench import Reference, Workbench

from s3_server import KEYS, s3_server, use_s3


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An S3 server with the bucket `far`: the variables with which a process reaches it."""
    with s3_server("far") as address:
        use_s3(monkeypatch, address)
        yield {"AWS_ENDPOINT_URL": address, **{f"AWS_{name}": value for name, value in KEYS.items()}}


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session have in common."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def template(shared: Path) -> Workbench:
    """A workspace with a base model, two data sets and a reward, and no run but the model's."""
    return once(shared / "template", make_template)[0]


@pytest.fixture(scope="session")
def reference(shared: Path, template: Workbench) -> Reference:
    """The run that nobody disturbed."""

    def make(bench: Workbench) -> dict[str, Any]:
        bench.run("run", "run.yaml")
        run_id = bench.run_id()
        bench.check(run_id)
        return {"run_id": run_id, "outputs": bench.outputs(run_id)}

    bench, known = once(shared / "reference", make, origin=template)
    return Reference(bench, **known)


@pytest.fixture
def bench(reference: Reference, tmp_path: Path) -> Iterator[Workbench]:
    """A copy of the workspace in which the undisturbed run has ended: what it computed is in the stage cache."""
    copy = reference.bench.copy(tmp_path / "bench")
    yield copy
    copy.clean()


@pytest.fixture
def empty(template: Workbench, tmp_path: Path) -> Iterator[Workbench]:
    """A copy of the workspace without runs."""
    copy = template.copy(tmp_path / "bench")
    yield copy
    copy.clean()
