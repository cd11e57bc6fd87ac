"""Every operation of a served workspace with generated data, asked by everybody: schemathesis over `/openapi.json`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings, strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.generation.case import Case
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from posttrain.access.authenticators.token import issue
from posttrain.app.control import control_of
from posttrain.app.workspace import Workspace
from posttrain.domain.canonical import canonical_json
from posttrain.domain.ids import Role
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import RunRecord, StageRecord
from posttrain.domain.runspec import Budget
from posttrain.store.trees import put_tree

SEED = 20261122
SECRET = "POSTTRAIN_SINK_WALK"  # the variable that holds what signs
CHECKS = (
    *(not_a_server_error, status_code_conformance, content_type_conformance),
    *(response_headers_conformance, response_schema_conformance),
)
ROLES: tuple[Role | None, ...] = (None, *Role)
_DAY = 86400.0
_PATIENCE = 300.0  # seconds that an answer may take on a machine that is busy
_LEFT_ALONE = ("project", "model")  # a model that is there is not asked: that takes a process and half a minute


@dataclass
class Planted:
    """What two projects have, of which everybody asks one."""

    known: dict[str, list[str]]  # parameter → what project A has of that name
    foreign: list[str]  # names and digests of project B, of which nothing may be told
    secrets: list[str]  # of which nobody is told
    tokens: dict[Role | None, str] = field(default_factory=dict)  # in project A


def plant(workspace: Workspace, folder: Path) -> Planted:
    """Fill the projects `a` and `b` alike."""
    found = {name: _project(workspace, name, folder) for name in ("a", "b")}
    mine, theirs = found["a"], found["b"]
    planted = Planted(
        mine,
        sorted(
            {word for words in theirs.values() for word in words} - {word for words in mine.values() for word in words}
        ),
        [str(workspace.root)],
    )
    seen = workspace.seen_by(workspace.actor, "a", "os")
    for role in ROLES:
        name = f"user:{role or 'nobody'}-of-a"
        with seen.ledger.transaction(seen.actor) as transaction:
            if role is not None:
                transaction.set_role(name, role)
        planted.tokens[role], _ = issue(seen.ledger, seen.actor, name, {"a": Role.ADMIN}, _DAY)
    planted.secrets += planted.tokens.values()
    workspace.seal()
    return planted


def _project(workspace: Workspace, project: str, folder: Path) -> dict[str, list[str]]:
    """Runs, assets, channels, sinks, members, a token; parameter → names."""
    mark = f"zebra{project}zebra"  # in every name, so that it is seen wherever it is told
    seen = workspace.seen_by(workspace.actor, project, "os")
    with seen.ledger.transaction(seen.actor) as transaction:
        transaction.add_project()
        transaction.set_role(f"user:{mark}", Role.ADMIN)
    manifest = Manifest(
        name=mark, owner=mark, seed=1, stages=(), gates=(), budget=Budget(), release=None, code={"x": mark}
    )
    digest = seen.blobs.put(canonical_json(manifest.to_json()))
    runs = [f"{mark}-{number:08x}" for number in range(30)]
    for number, run_id in enumerate(runs):
        with seen.ledger.transaction(seen.actor) as transaction:
            run = RunRecord(run_id, mark, digest, "pending", mark, float(number), repeat=number + 1)
            stage = StageRecord(run_id, "sft", 0, "sft", "pending", message=mark)
            transaction.insert_run(run, [stage])
            transaction.update_stage(stage, state="skipped", reason="ChannelEmpty", finished_at=1.0)
            run = transaction.update_run(run, state="running", reason="Running", message=mark)
            transaction.update_run(run, state="failed", reason="Lost", message=mark, finished_at=2.0)
    weights = folder / f"{mark}-model"
    weights.mkdir()
    (weights / "model.safetensors").write_text(mark)
    model, releases = put_tree(seen.blobs, weights), 5  # a healthy system has what it released
    for number in range(releases):
        with seen.ledger.transaction(seen.actor) as transaction:
            for name in (mark, f"{mark}-2"):
                transaction.append_release(name, model, runs[number], "promote", number)
    control = control_of(seen)
    rows = folder / f"{mark}.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{mark} {n}", "completion": "x"}) + "\n" for n in range(9)))
    reward = folder / f"{mark}.py"
    reward.write_text(f'"""{mark}."""\n\n\ndef score(completion, answer):\n    return 1.0\n')
    assets = [
        control.add_dataset(rows, mark),
        control.add_reward(reward, mark, entry=None, dialect="auto", guideline=None),
    ]
    control.freeze(f"{mark}-2", rollbacks=False, why=mark)
    sinks = [f"{mark}-{number}" for number in range(3)]
    for name in sinks:
        control.add_sink(
            name, "webhook", {"url": f"https://{mark}.invalid/x", "secret_env": SECRET}, {"on": ["run-ended"]}
        )
        control.pause_sink(name)
    token = control.issue_token(f"user:{mark}", "viewer", 1.0)
    refs, digests = [one.ref for one in assets], [model, *(one.digest for one in assets)]
    of_runs = ("run_id", "words", "what", "within", "target", "first", "second")
    return {
        **{name: [*runs[:3], *refs, mark] for name in of_runs},
        **{name: [mark, f"{mark}-2", *sinks] for name in ("name", "channel")},
        **{name: [*refs, *digests] for name in ("ref", "digest", "digests")},
        "principal": [f"user:{mark}"],
        "token_id": [token.token.id],
        "stage": [f"{runs[0]}/sft", "sft"],
    }


@dataclass(frozen=True)
class Walk:
    """Asks everything of one server.

    Args:
        examples: of each operation, each role, valid or not.
    """

    url: str
    planted: Planted
    examples: int

    def everywhere(self, role: Role | None, *, shown: bool = True) -> int:
        """Ask as one role of project A, without a token where none is shown; how many answers were looked at."""
        token = self.planted.tokens[role] if shown else None
        count = 0
        for result in self._operations():
            count += self._operation(result, token)
        return count

    def _operations(self) -> Iterator[Any]:
        document = requests.get(f"{self.url}/openapi.json", timeout=_PATIENCE).json()
        document.pop("security")  # who asks is decided here
        document = _without_tuples(document)
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            yield result.ok()

    def _operation(self, operation: Any, token: str | None) -> int:
        asked = [0]
        at = {"project": "a"} if "{project}" in operation.path else {}
        each = [
            operation.as_strategy(generation_mode=mode, path_parameters=at)
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        ]
        headers = {"authorization": f"Bearer {token}"} if token else {}
        session = requests.Session()

        @seed(SEED)
        @settings(
            max_examples=self.examples,
            derandomize=False,
            database=None,
            deadline=None,
            phases=(Phase.generate,),
            suppress_health_check=list(HealthCheck),
        )
        @given(case=st.one_of(*each), names=st.randoms(use_true_random=False), known=st.booleans())
        def ask(case: Case, names: Any, known: bool) -> None:
            if known:
                self._name(case, names)
            answer = case.call(base_url=self.url, headers=headers, session=session, timeout=_PATIENCE)
            case.validate_response(answer, checks=list(CHECKS))
            self._look_for_leaks(answer)
            asked[0] += 1

        with session:
            ask()
        return asked[0]

    def _name(self, case: Case, names: Any) -> None:
        """What the project has, in the place of what was made up."""
        parts = [case.path_parameters, case.query, case.body]
        for part in parts:
            for name in list(part) if isinstance(part, dict) else []:
                if name in self.planted.known and name not in _LEFT_ALONE and isinstance(part[name], str):
                    part[name] = names.choice(self.planted.known[name])

    def _look_for_leaks(self, answer: requests.Response) -> None:
        told = f"{answer.text}\n{answer.headers}"
        asked = f"{answer.request.url}\n{answer.request.body!r}"
        for word in self.planted.foreign:
            assert word not in told or word in asked, f"{answer.request.method} {answer.request.url} tells {word}"
        for word in self.planted.secrets:
            assert word not in told, f"{answer.request.method} {answer.request.url} tells {word!r} in {told[:300]!r}"


def _without_tuples(schema: Any) -> Any:
    """Arrays of fixed parts as arrays of any of these: schemathesis 4.32 rewrites `prefixItems`, and refuses that."""
    if isinstance(schema, dict):
        found = {name: _without_tuples(one) for name, one in schema.items() if name != "prefixItems"}
        if "prefixItems" in schema:
            found["items"] = {"anyOf": _without_tuples(schema["prefixItems"])}
        return found
    return [_without_tuples(one) for one in schema] if isinstance(schema, list) else schema
