"""A team goes from one release to the next without an outage: two hosts, of which one has the next release first.

The next release is this one with another version and a revision that adds to the schema, as a next one will: it is made
in a folder that comes before ours on the path of Python. The one before this is not tried: its schema was not yet
made for two releases.
"""

from __future__ import annotations

import http.client
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import RUN, make_template
from workbench import Finished, Workbench

import posttrain
from postgres_server import Server
from posttrain.store.schema import SCHEMA_VERSION

pytestmark = pytest.mark.postgres
NEXT = "0099"
REVISION = f'''
"""What a next release adds."""
import sqlalchemy as sa
from alembic import op

revision, down_revision = "{NEXT}", "{SCHEMA_VERSION}"


def upgrade() -> None:
    op.create_table("hopes", sa.Column("name", sa.Text(), primary_key=True))
    op.add_column("runs", sa.Column("hope", sa.Text()))
    op.create_index("runs_by_hope", "runs", ["hope"])
    op.execute("UPDATE schema_version SET usable_since = '{SCHEMA_VERSION}'")
'''


def next_release(folder: Path) -> Path:
    """Where Python finds the next release before this one."""
    package = folder / "posttrain"
    shutil.copytree(Path(posttrain.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "store" / "migrations" / "versions" / f"{NEXT}_next.py").write_text(REVISION)
    for path, old, new in (
        (package / "store/schema/__init__.py", f'"{SCHEMA_VERSION}"', f'"{NEXT}"'),
        (package / "_version.py", f'"{posttrain.__version__}"', '"99.0.0"'),
    ):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return folder


class Host:
    """A machine of the team, with whatever release is installed there."""

    def __init__(self, folder: Path, places: dict[str, str]) -> None:
        folder.mkdir()
        self.bench = Workbench(folder)
        self.bench.environment = dict(places)
        with socket.create_server(("127.0.0.1", 0)) as found:
            self.port = int(found.getsockname()[1])
        self.process: subprocess.Popen[str] | None = None
        self.person = self.bench  # who asks its server

    def install(self, release: Path | None) -> None:
        """Another release; None: this one."""
        self.bench.environment.pop("PYTHONPATH", None)
        if release is not None:
            self.bench.environment["PYTHONPATH"] = str(release)

    def serve(self) -> None:
        with (self.bench.folder / "serve.log").open("a") as log:
            self.process = subprocess.Popen(
                [self.bench.python, "-P", "-m", "posttrain", "serve", "--port", str(self.port)],
                cwd=self.bench.folder, env=self.bench.variables(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                text=True, start_new_session=True,
            )  # fmt: skip
        self.bench.started.append(self.process)
        self.bench.wait("a server that answers", lambda: self.version() is not None)

    def version(self) -> str | None:
        """Of the server that answers here and drives runs."""
        assert self.process is not None
        assert self.process.poll() is None, (self.bench.folder / "serve.log").read_text()
        asked = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            asked.request("GET", "/readyz")
            answer = asked.getresponse()
            return answer.getheader("posttrain-version") if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            asked.close()

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait()

    def log(self) -> str:
        return (self.bench.folder / "serve.log").read_text()


class Team:
    """Two hosts, and the next release."""

    def __init__(self, folder: Path, postgres: Server) -> None:
        self.postgres, self.address = postgres, postgres.create()
        places = {"POSTTRAIN_STORE": f"file://{folder}/store", "POSTTRAIN_LEDGER": self.address}
        (folder / "store").mkdir()
        self.one, self.two = Host(folder / "one", places), Host(folder / "two", places)
        self.next = next_release(folder / "next")
        make_template(self.one.bench)
        self.two.bench.run("init")

    def let_in(self) -> None:
        """People have tokens: a host's own key opens that host alone."""
        self.one.bench.run("member", "set", "user:ann", "admin")
        secret = self.one.bench.run("token", "issue", "user:ann", "-o", "json").json["secret"]
        for host in (self.one, self.two):
            host.person = Workbench(host.bench.folder.parent / f"person-{host.bench.folder.name}")
            host.person.folder.mkdir()
            url = f"http://127.0.0.1:{host.port}"
            host.person.environment = {"POSTTRAIN_SERVER": url, "POSTTRAIN_TOKEN": secret}

    def schema(self) -> str:
        return str(self.postgres.sql("SELECT version_num FROM schema_version", self.address)[0][0])

    def close(self) -> None:
        for host in (self.one, self.two):
            host.end()
            host.bench.clean()


@pytest.fixture
def team(tmp_path: Path, postgres: Server) -> Iterator[Team]:
    made = Team(tmp_path, postgres)
    yield made
    made.close()
    postgres.drop(made.address)


def named(name: str) -> dict[str, object]:
    return {**RUN, "name": name}


def submitted(bench: Workbench, name: str) -> str:
    bench.write(f"{name}.yaml", named(name))
    bench.run("run", f"{name}.yaml", "--detach")
    runs = bench.run("ls", "-o", "json").json["runs"]
    return str(next(run["id"] for run in runs if run["id"].startswith(name)))


def ended(bench: Workbench, run_id: str) -> str:
    def state() -> str:
        found = str(bench.run("get", run_id, "-o", "json").json["state"])
        return found if found in ("succeeded", "failed", "rejected", "stopped") else ""

    return str(bench.wait(f"the end of {run_id}", state))


def twice_at_once(bench: Workbench) -> list[Finished]:
    both = [bench.start("upgrade"), bench.start("upgrade")]
    return [bench.finish(one) for one in both]


def test_two_releases_work_side_by_side_and_either_may_end(team: Team) -> None:
    one, two = team.one, team.two
    one.serve()
    team.let_in()
    first = submitted(one.person, "first")
    one.bench.wait_job()
    two.install(team.next)
    refused = two.bench.run("serve", "--port", "0", code=None)
    assert refused.code != 0
    assert f"has schema {SCHEMA_VERSION}, this Posttrain needs {NEXT}; run `posttrain upgrade`" in refused.error
    crash = {"POSTTRAIN_CRASHPOINT": "upgrade.before_commit"}
    assert two.bench.run("upgrade", env=crash, code=None).code == -signal.SIGKILL
    assert team.schema() == SCHEMA_VERSION
    done = twice_at_once(two.bench)
    assert [one.code for one in done] == [0, 0], done
    assert sorted(re.sub(r" .*", "", one.out.split("\n")[0]) for one in done) == ["the", "upgraded"]
    assert team.schema() == NEXT
    two.serve()
    assert (one.version(), two.version()) == (posttrain.__version__, "99.0.0")
    second = submitted(two.person, "second")  # asked of the next release; the first still drives its own
    assert ended(one.person, first) == ended(two.person, second) == "succeeded"
    assert ended(two.person, first) == ended(one.person, second) == "succeeded"
    one.end()
    one.install(team.next)
    one.serve()
    assert one.version() == "99.0.0"
    third = submitted(one.person, "third")
    assert ended(one.person, third) == "succeeded"
    two.end()
    two.install(None)  # back to the release before, whose schema it still may use
    two.serve()
    assert two.version() == posttrain.__version__
    assert ended(two.person, third) == "succeeded"
    two.person.run("member", "set", "service:ci", "viewer")
    for host in (one, two):
        host.end()
        host.bench.run("verify", third)
        assert "Traceback" not in host.log()
        assert '"traceback"' not in host.log(), host.log()
