"""A workspace that is served to browsers, with a run in it of which every text tries to be markup."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

import pytest
import web_pages
from cli_world import World
from server_bench import Answer, ServerBench, serving
from web_pages import TWO, rich_world

from posttrain.app.workspace import Workspace
from posttrain.domain.canonical import digest_json
from posttrain.domain.ids import Role
from posttrain.domain.records import RunRecord, StageRecord

ATTACK = (
    "</pre></style></title></textarea><script>window.__pwned=1;document.title='pwned'</script>"
    '<img src=x onerror="window.__pwned=1"><svg onload=\'window.__pwned=1\'></svg>"\'><a href="javascript:alert(1)">'
    "{{7*7}}</a>&"
)
CHANNEL = "<img src=x onerror='window.__pwned=1'><svg onload=window.__pwned=1>\"{{7*7}}&"  # no `/`: paths have that
NAMED = '"><svg onload=window.__pwned=1>'  # as long as an id may be
POLICY = """\
gates:
  - {name: accuracy, metric: heldout/accuracy, at_least: 0.9}
suites:
  heldout: {data: dataset:heldout, evaluators: any}
approvers: [user:ann, user:bob]
approvals: 1
"""


@dataclass
class Browser:
    """What a browser keeps and sends."""

    bench: ServerBench
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str) -> Answer:
        """A page."""
        return self._asked("GET", path, None, {})

    def post(self, path: str, fields: dict[str, str], **headers: str) -> Answer:
        """A form, from a page of the server unless headers say otherwise."""
        known = {"origin": self.bench.url, "content-type": "application/x-www-form-urlencoded"}
        known |= {name.replace("_", "-"): value for name, value in headers.items()}
        sent = {name: value for name, value in known.items() if value}
        return self._asked("POST", path, urlencode(fields).encode(), sent)

    def token(self, path: str) -> str:
        """What the forms of a page carry."""
        found = re.search(r'name="form_token" value="([0-9a-f]{64})"', self.get(path).body.decode())
        assert found
        return found[1]

    def log_in(self, token: str, wanted: str = "") -> Answer:
        """As a person does."""
        return self.post("/login", {"form_token": self.token("/login"), "token": token, "next": wanted})

    def _asked(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> Answer:
        shown = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        answer = self.bench.ask(method, path, None, body, {**headers, **({"cookie": shown} if shown else {})})
        for name, value in re.findall(r"((?:__Host-)?posttrain-[\w-]+)=([^;,]*)", answer.headers.get("set-cookie", "")):
            if value in ("", '""'):
                self.cookies.pop(name, None)
            else:
                self.cookies[name] = value
        return answer


@dataclass
class ConsoleWorld:
    """A served workspace, and what is in it."""

    bench: ServerBench
    world: World
    run: str  # with everything in it; released
    hostile: str  # a run whose row no command would let in

    def ask_approval(self) -> None:
        """A run whose release to the channel `guarded` waits for an approver."""
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.world.root)
            self.world.write("waits.yaml", TWO.replace("channel: prod", "channel: guarded").replace("17", "18"))
            assert self.world("run", "waits.yaml", "--timeout", "200").exit_code == 12

    def browser(self, name: str = "ann", role: Role = Role.APPROVER, project: str = "default") -> Browser:
        """Of somebody who logged in."""
        made = Browser(self.bench)
        answer = made.log_in(self.bench.person(name, role, project))
        assert answer.status == 303, answer.body
        return made


@contextmanager
def console_world(folder: Path, ledger: str = "") -> Iterator[ConsoleWorld]:
    """A run with curves, samples and scores, two releases of a channel, and a run that waits.

    Args:
        ledger: address of a database in PostgreSQL; empty: SQLite.
    """
    with pytest.MonkeyPatch.context() as patch:
        if ledger:
            patch.setenv("POSTTRAIN_LEDGER", ledger)
        patch.setattr(web_pages, "EVIL", ATTACK)
        patch.setattr(web_pages, "SAID", f"{ATTACK} \u202etxt.exe \x1b[31m")
        world = rich_world(folder, patch, TWO)
        world.ok("run", "run.yaml")
        run = world.newest()
        workspace = Workspace(folder / ".posttrain")
        hostile = _hostile(workspace, run)
        for attempt in workspace.ledger.attempts(run, "grpo"):
            log = workspace.jobs.folders.of(attempt).log
            log.write_text(f"{log.read_text()}{ATTACK}\n" * 3)
        world.ok("channel", "set-policy", "guarded", world.write("policy.yaml", POLICY))
        with serving(workspace) as bench:
            yield ConsoleWorld(bench, world, run, hostile)


def _hostile(workspace: Workspace, run: str) -> str:
    ledger = workspace.ledger
    made = {stage.name: stage.outputs for stage in ledger.stages(run)}
    hostile = RunRecord("hostile-22222222", ATTACK, digest_json("none"), "running", ATTACK, 1.0, message=ATTACK)
    stage = StageRecord(
        hostile.id, "sft", 0, "sft", "ready", message=ATTACK, next_action=ATTACK, cached_from=f"{run}/sft"
    )
    with ledger.transaction(f"user:{ATTACK}") as transaction:
        transaction.insert_run(hostile, [stage])
        transaction.append_release("prod", made["sft"]["model"]["digest"], run, "promote", expected=1, lift=ATTACK)
        transaction.append_release(CHANNEL, made["sft"]["model"]["digest"], NAMED, "promote", expected=0)
        record = transaction.snapshot.channel_record(CHANNEL)
        transaction.set_channel(record, "channel.frozen", ATTACK, frozen="all")
    return hostile.id
