"""A channel with a policy, as people and as those who would go around it meet it: run files, locks, commands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from cli_world import GOOD_REWARD, RUN, World, make_world

from posttrain.app.workspace import open_workspace
from posttrain.control import actions, verdicts
from posttrain.store.audit import verify_rows

ACCURACY = {"name": "accuracy", "metric": "heldout/accuracy", "at_least": 0.9}
STEADY = {
    **{"name": "no-regression", "metric": "heldout/accuracy", "not_worse_than": "channel", "margin": 0.04},
    "if_channel_empty": "pass",
}
POLICY: dict[str, Any] = {
    "gates": [ACCURACY, STEADY],
    "suites": {"heldout": {"data": "dataset:heldout@1", "evaluators": "any"}},
}
EASY = "".join(json.dumps({"prompt": f"Q: easy {i}", "answer": str(i)}) + "\n" for i in range(200))


def policy_file(world: World, name: str = "policy.yaml", **changes: Any) -> str:
    return world.write(name, yaml.safe_dump({**POLICY, **changes}))


def run_file(world: World, change: Callable[[dict[str, Any]], object] = lambda raw: None, name: str = "mine") -> str:
    """The run file with something changed in it."""
    raw = yaml.safe_load(RUN)
    change(raw)
    return world.write(f"{name}.yaml", yaml.safe_dump(raw, sort_keys=False))


def without_gates(raw: dict[str, Any]) -> None:
    raw.pop("gates")


def refused(world: World, *words: str, code: int) -> str:
    """What a command says that must be refused in one line."""
    result = world(*words)
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1), (words, result.stdout, result.stderr)
    return str(result.stderr)


def better(world: World, quality: float) -> str:
    """A run of another reward, whose model is as good as this; its id. Whether it shipped is for the caller to see."""
    world.ok("asset", "add", "reward:sort", world.write(f"r{quality}.py", GOOD_REWARD.replace("1.0", str(quality))))
    world("run", "run.yaml")
    return world.newest()


def next_of(world: World, run: str) -> list[str]:
    """What `why` says to type next, as it is pasted."""
    *_, last = world.ok("why", run).splitlines()
    following, program, *command = last.split()
    assert (following, program) == ("next:", "posttrain")
    return command


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A channel with a policy that pins its evaluator. Nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("guarded"), patch)
        made.prepare()
        made.ok("asset", "add", "dataset:easy", made.write("easy.jsonl", EASY))
        pinned = made.json("plan", "run.yaml")["evaluators"]["heldout"]
        suites = {"heldout": {"data": "dataset:heldout@1", "evaluators": [pinned]}}
        made.ok("channel", "set-policy", "prod", policy_file(made, suites=suites))
        yield made


def test_a_policy_is_set_shown_and_remembered(world: World) -> None:
    assert "no policy; next: posttrain channel set-policy prod POLICY.yaml" in world.ok("channel", "policy", "prod")
    said = world("channel", "set-policy", "prod", policy_file(world, approvers=["user:ann", "user:Bjørn Ωmega"]))
    assert "2 gates on 1 suite" in said.stdout
    for note in ("channel prod is new", "suites.heldout: any evaluator is accepted"):
        assert note in said.stderr
    for person in ("user:ann", "user:Bjørn Ωmega"):
        assert f"warning: approvers: {person} has done nothing in this project so far" in said.stderr
    first = world.json("get", "prod")
    assert (first["live"], first["history"], first["frozen"], first["protected"]) == (None, [], "", False)
    assert "channel prod has no release yet" in world.ok("get", "prod")
    assert "channel prod: no release yet (a policy)" in world.ok("ls")
    assert "did you mean 'prod'?" in refused(world, "get", "prd", code=2)
    assert "did you mean 'prod'?" in refused(world, "lineage", "prd", code=2)
    slip = world("channel", "set-policy", "slip", policy_file(world, gates=[{**ACCURACY, "metric": "heldout/acuracy"}]))
    assert (
        "gates.accuracy.metric: no evaluate stage measures 'acuracy' on heldout (did you mean 'accuracy'?)"
        in slip.stderr
    )
    for command in ("rollback", "lineage", "verify"):
        assert "channel prod has no release yet" in refused(world, command, "prod", code=2)
    shown = world.json("channel", "policy", "prod")
    heldout = world.json("asset", "get", "dataset:heldout@1")["digest"]
    assert shown["digest"] == first["policy"]
    assert shown["policy"]["suites"]["heldout"] == {
        "data": "dataset:heldout@1",
        "digest": heldout,
        "evaluators": "any",
    }
    again = world.write("again.yaml", world.ok("channel", "policy", "prod"))
    assert "has this policy already" in world.ok("channel", "set-policy", "prod", again)
    world.ok("channel", "set-policy", "prod", policy_file(world, gates=[ACCURACY]))
    world.ok("channel", "remove-policy", "prod")
    history = world.json("channel", "policy", "prod", "--history")["history"]
    assert [row["digest"] for row in history] == [first["policy"], history[1]["digest"], None]
    assert all(row["by"].startswith("user:") for row in history)
    assert world.ok("channel", "policy", "prod", "--history").count("user:") == 3
    workspace = open_workspace()
    verify_rows(workspace.ledger)
    workspace.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gates": []}, "gates: must contain at least one gate, got none"),
        ({"gates": [ACCURACY, ACCURACY]}, "names must be unique, got 'accuracy' twice"),
        ({"gates": [{**ACCURACY, "metric": "other/accuracy"}]}, "must be SUITE/METRIC of a suite below `suites`"),
        ({"gates": [{**ACCURACY, "metric": "accuracy"}]}, "must be SUITE/METRIC"),
        ({"gates": [{**ACCURACY, "at_least": None, "better_than": "base"}]}, "compare with channel or with a number"),
        ({"suites": {"heldout": {"data": "dataset:heldout@1"}}}, "suites.heldout.evaluators"),
        *(
            (
                {"suites": {"heldout": {"data": "dataset:heldout@1", "evaluators": wrong}}},
                "suites.heldout.evaluators: must be any, or digests (sha256:…) as `posttrain plan -v` shows them, got",
            )
            for wrong in ([], "all", ["any"], [f"sha256:{'A' * 64}"], 3, None)
        ),
        ({"suites": {}}, "must be SUITE/METRIC"),
        ({"suites": {"heldout": {"data": "heldout.jsonl", "evaluators": "any"}}}, "must be a registered data set"),
        (
            {"suites": {"heldout": {"data": "dataset:heldot", "evaluators": "any"}}},
            "suites.heldout.data: dataset:heldot: no dataset",
        ),
        ({"suites": {"heldout": {**POLICY["suites"]["heldout"], "digest": f"sha256:{'0' * 64}"}}}, "heldout.digest"),
        ({"approvers": ["ann"]}, "approvers: must be principals such as user:ann, got 'ann'"),
        ({"approvers": ["user:ann", "user:ann"]}, "approvers: must be different principals"),
        ({"quarantine": {"lift": "anybody"}}, "quarantine.lift: must be one of"),
        ({"gate": []}, "gate: unknown key (did you mean 'gates'?)"),
    ],
)
def test_a_policy_that_says_too_little_is_refused(guarded: World, changes: dict[str, Any], words: str) -> None:
    before = guarded.json("get", "prod")["policy"]
    assert words in refused(
        guarded, "channel", "set-policy", "prod", policy_file(guarded, "bad.yaml", **changes), code=2
    )
    assert guarded.json("get", "prod")["policy"] == before


@pytest.mark.parametrize("name", ["Prod", "-x", "", "a/b", "x" * 64, "prød"])
def test_a_channel_is_called_as_run_files_can_name_it(guarded: World, name: str) -> None:
    for command in (("freeze", "--", name), ("set-policy", "--", name, "policy.yaml")):
        assert "must be 1-63 of a-z" in refused(guarded, "channel", *command, code=2)


@pytest.mark.parametrize("command", ["freeze", "unfreeze", "protect", "unprotect", "remove-policy"])
def test_a_slip_opens_and_closes_no_channel(guarded: World, command: str) -> None:
    said = refused(guarded, "channel", command, "prdo", code=2)
    assert "channel 'prdo' is unknown (did you mean 'prod'?)" in said


@pytest.mark.slow
def test_the_gates_of_the_policy_are_judged_though_no_run_file_writes_them(world: World) -> None:
    plain = world.json("plan", "run.yaml")
    assert "policy" not in plain["manifest"], "a run without a policy is the run that it was before there were any"
    assert "release needs at least one gate" in refused(world, "plan", run_file(world, without_gates), code=2)
    world.ok("channel", "set-policy", "prod", policy_file(world))
    plan = world.json("plan", run_file(world, without_gates))
    whose = "the policy of channel prod"
    assert plan["gates"] == [{"name": "accuracy", "from": whose}, {"name": "no-regression", "from": whose}]
    assert f"gate:     accuracy: {whose}" in world.ok("plan", "mine.yaml")
    assert "prod now points at" in world.ok("run", "mine.yaml")
    why = world.json("why", world.newest())
    bound = {key: why["gates"][key] for key in ("channel", "release", "policy")}
    channel = world.json("get", "prod")
    assert bound == {"channel": "prod", "release": 0, "policy": channel["policy"]}
    assert [v["gate"] for v in why["gates"]["verdicts"]] == ["accuracy", "no-regression"]
    assert channel["deployments"] == [
        {"channel": "prod", "role": "live", "release_sequence": 1, "weight": 1.0, "generation": 1}
    ]
    assert f"policy of channel prod  {channel['policy'][:19]}" in world.ok("lineage", "prod")
    assert "everything matches" in world.ok("verify", "prod")


def test_a_run_may_add_gates_and_make_them_stricter(guarded: World) -> None:
    stricter = {**ACCURACY, "at_least": 0.95, "confidence": 0.99}
    more = {"name": "half", "metric": "heldout/accuracy", "at_least": 0.5}
    plan = guarded.json("plan", run_file(guarded, lambda raw: raw.update(gates=[more, stricter])))
    assert [(row["name"], row["from"]) for row in plan["gates"]] == [
        ("half", "run file"),
        ("accuracy", "run file, stricter than the policy of channel prod"),
        ("no-regression", "the policy of channel prod"),
    ]
    assert plan["manifest"]["gates"][1]["at_least"] == 0.95


@pytest.mark.parametrize(
    ("gate", "words"),
    [
        ({**ACCURACY, "at_least": 0.5}, "gates.accuracy.at_least: the policy of channel prod requires 0.9, got 0.5"),
        (
            {**ACCURACY, "confidence": 0.6},
            "gates.accuracy.confidence: the policy of channel prod requires 0.95, got 0.6",
        ),
        ({**ACCURACY, "min_items": 2}, "gates.accuracy.min_items: the policy of channel prod requires 20, got 2"),
        (
            {**ACCURACY, "metric": "heldout/truncated"},
            "gates.accuracy.metric: the policy of channel prod requires heldout",
        ),
        (
            {**ACCURACY, "at_least": None, "at_most": 0.99},
            "gates.accuracy.at_least: the policy of channel prod requires",
        ),
        ({**STEADY, "margin": 0.5}, "gates.no-regression.margin: the policy of channel prod requires 0.04, got 0.5"),
        ({**STEADY, "not_worse_than": "base", "if_channel_empty": None}, "no-regression.not_worse_than: the policy of"),
        ({**STEADY, "direction": "lower"}, "gates.no-regression.direction: the policy of channel prod requires higher"),
    ],
)
def test_a_weaker_gate_of_the_same_name_is_refused(guarded: World, gate: dict[str, Any], words: str) -> None:
    path = run_file(guarded, lambda raw: raw.update(gates=[{k: v for k, v in gate.items() if v is not None}]))
    for command in ("plan", "lock", "run"):
        assert words in refused(guarded, command, path, code=2)


def test_no_option_goes_around_a_policy(guarded: World) -> None:
    weak = "gates=[{name: accuracy, metric: heldout/accuracy, at_least: 0.1}]"
    said = refused(guarded, "run", "run.yaml", "--set", weak, code=2)
    assert "gates.accuracy.at_least: the policy of channel prod requires 0.9, got 0.1" in said
    path = run_file(guarded, lambda raw: raw.update(policy="none"))
    assert "policy: unknown key" in refused(guarded, "run", path, code=2)
    path = run_file(guarded, lambda raw: raw["release"].update(policy="none"))
    assert "release.policy: unknown key" in refused(guarded, "run", path, code=2)


def test_an_empty_channel_passes_only_where_the_policy_says_so(world: World) -> None:
    strict = {**STEADY, "if_channel_empty": "fail"}
    world.ok("channel", "set-policy", "prod", policy_file(world, gates=[ACCURACY, strict]))
    assert "gates.no-regression.if_channel_empty: the policy of" in refused(world, "run", "run.yaml", code=2)
    assert world("run", run_file(world, without_gates)).exit_code == 3
    assert world.json("get", "prod")["live"] is None


def easy_data(raw: dict[str, Any]) -> None:
    raw["data"]["heldout"] = "dataset:easy"


def renamed(raw: dict[str, Any]) -> None:
    raw["stages"]["evaluate"]["suites"] = {"easy": {"data": "heldout"}}
    raw["gates"] = []


def another_model(raw: dict[str, Any]) -> None:
    raw["stages"]["evaluate"]["model"] = "sft"


def another_evaluator(raw: dict[str, Any]) -> None:
    raw["stages"]["evaluate"]["suites"]["heldout"]["extract"] = "A: (.*)"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            easy_data,
            "stages.evaluate.suites.heldout.data: the policy of channel prod requires dataset:heldout@1 (sha256",
        ),
        (renamed, "requires suite 'heldout' (dataset:heldout@1) measured on the released model, got easy"),
        (another_model, "requires suite 'heldout' (dataset:heldout@1) measured on the released model, got none"),
        (another_evaluator, "stages.evaluate.suites.heldout: the policy of channel prod requires evaluator sha256:"),
    ],
)
def test_a_suite_that_is_swapped_is_refused(guarded: World, change: Callable[[Any], object], words: str) -> None:
    assert words in refused(guarded, "run", run_file(guarded, change), code=2)
    assert guarded.json("ls")["runs"] == []


def test_an_evaluator_is_its_code_its_settings_and_its_rewards(guarded: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def evaluator(change: Callable[[dict[str, Any]], object]) -> str:
        raw: dict[str, Any] = {**yaml.safe_load(RUN), "release": {"channel": "free", "model": "grpo"}}
        change(raw)
        path = guarded.write("free.yaml", yaml.safe_dump(raw, sort_keys=False))
        return str(guarded.json("plan", path)["evaluators"]["heldout"])

    def suite(**settings: Any) -> Callable[[dict[str, Any]], object]:
        return lambda raw: raw["stages"]["evaluate"]["suites"]["heldout"].update(settings)

    def others(raw: dict[str, Any]) -> None:
        raw["seed"], raw["data"]["again"] = 5, "dataset:heldout"
        raw["stages"]["evaluate"]["suites"] = {"heldout": {"data": "again"}, "easy": {"data": "heldout"}}

    first = evaluator(lambda raw: None)
    assert evaluator(others) == first, "neither the seed, nor words of the file, nor other suites"
    changed = {
        evaluator(suite(max_new_tokens=5)),
        evaluator(suite(reward="exact")),
        evaluator(lambda raw: raw["stages"]["evaluate"].update(runtime={"dtype": "bfloat16"})),
    }
    monkeypatch.setattr("posttrain.execution.trainers.native.NativeTrainer.code_digest", lambda self: "sha256:other")
    assert len({first, evaluator(lambda raw: None), *changed}) == 5


def edited(world: World, change: Callable[[dict[str, Any]], object]) -> str:
    """A lock of the run file, changed afterwards."""
    world.ok("lock", "run.yaml")
    value = json.loads((world.root / "run.lock.json").read_text())
    change(value)
    return world.write("forged.lock.json", json.dumps(value))


def no_policy(value: dict[str, Any]) -> None:
    value.pop("policy")


def weaker(value: dict[str, Any]) -> None:
    value["gates"][0]["at_least"] = 0.1


def fewer(value: dict[str, Any]) -> None:
    value["gates"] = value["gates"][:1]


def stage(value: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in value["stages"] if one["name"] == name)  # type: ignore[no-any-return]


def other_evidence(value: dict[str, Any]) -> None:
    """The evaluation measures the base model, and the gate believes it to be the candidate's."""
    stage(value, "evaluate")["inputs"]["model"] = stage(value, "sft")["inputs"]["model"]


def other_baseline(value: dict[str, Any]) -> None:
    stage(value, "baseline-evaluate")["inputs"]["model"] = stage(value, "sft")["inputs"]["model"]


def no_baseline(value: dict[str, Any]) -> None:
    stage(value, "gate")["inputs"].pop("channel")


def other_suite(value: dict[str, Any]) -> None:
    stage(value, "evaluate")["inputs"]["suites.heldout"]["digest"] = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_policy, "the policy of channel prod is sha256:"),
        (weaker, "gates.accuracy.at_least: the policy of channel prod requires 0.9, got 0.1"),
        (fewer, "gates: the policy of channel prod requires 'no-regression'"),
        (other_evidence, "stages.gate.evidence.evaluate: must measure the released model"),
        (
            other_baseline,
            "stages.gate.baseline.evaluate: must be the same measurement of the model that channel prod",
        ),
        (
            no_baseline,
            "stages.gate.baseline.evaluate: must be the same measurement of the model that channel prod",
        ),
        (other_suite, "stages.evaluate.suites.heldout.data: the policy of channel prod requires dataset:heldout@1"),
    ],
)
def test_a_lock_that_was_edited_is_refused(guarded: World, change: Callable[[Any], object], words: str) -> None:
    assert words in refused(guarded, "run", edited(guarded, change), code=2)
    assert guarded.json("ls")["runs"] == []


def test_a_lock_of_before_the_policy_is_refused_and_says_what_to_do(world: World) -> None:
    world.ok("lock", "run.yaml")
    world.ok("run", "run.lock.json")
    world.ok("channel", "set-policy", "prod", policy_file(world))
    assert "attached" in world.ok("run", "run.lock.json"), "its run is there and has ended"
    said = refused(world, "run", "run.lock.json", "--again", code=2)
    assert "this manifest was planned without one; plan the run file again" in said


@pytest.mark.slow
def test_a_report_of_another_policy_moves_nothing(world: World) -> None:
    """Judged, then the policy becomes stricter, or there is one at all: the report says under which it was judged."""
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("channel", "remove-policy", "prod")
    world.ok("channel", "freeze", "prod")
    assert world("run", "run.yaml").exit_code == 9
    run = world.newest()
    world.ok("channel", "unfreeze", "prod")
    world.ok("channel", "set-policy", "prod", policy_file(world))
    said = refused(world, "promote", run, code=9)
    assert "the run was judged without a policy; plan and judge it again: posttrain run RUN.yaml" in said
    assert "prod now points at" in world.ok("run", "run.yaml"), "the same file is another run under a policy"
    assert "policy" in [row["path"] for row in world.json("diff", run, world.newest())["differences"]]
    assert "policy" in world.ok("diff", run, world.newest())
    first = world.json("get", "prod")
    world.ok("channel", "freeze", "prod")
    other = better(world, 0.97)
    world.ok("channel", "unfreeze", "prod")
    world.ok("channel", "set-policy", "prod", policy_file(world, gates=[{**ACCURACY, "at_least": 0.92}, STEADY]))
    assert f"was judged under {first['policy'][:19]}" in refused(world, "promote", other, code=9)
    world.ok("channel", "set-policy", "prod", policy_file(world))
    assert "release 2" in world.ok("promote", other), "the policy is again the one that it was judged under"


def test_a_policy_that_changes_while_a_run_is_judged_stops_its_release(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def meanwhile(place: str) -> None:
        if place == "gate.after_commit":
            world.ok("channel", "set-policy", "prod", policy_file(world))

    monkeypatch.setattr(verdicts, "crashpoint", meanwhile)
    monkeypatch.setattr("posttrain.app.workspace._BESIDE", 0)  # commands of two threads share one standard output
    said = refused(world, "run", "run.yaml", code=9)
    assert "the run was judged without a policy" in said
    assert "plan and judge it again: posttrain run RUN.yaml\n" in said
    assert world.json("get", world.newest())["reason"] == "PolicyNotMet"
    assert world.json("get", "prod")["live"] is None
    assert list(next_of(world, world.newest())) == ["run", "RUN.yaml"], "which helps"
    world.ok("run", "run.yaml")
    assert world.json("get", "prod")["history"][-1]["run_id"] == world.newest()


def test_a_forged_run_that_went_past_the_plan_does_not_ship(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    path = edited(world, weaker)
    with monkeypatch.context() as blind:
        blind.setattr("posttrain.preflight.locks._refuse_unmet", lambda *_: None)
        said = refused(world, "run", path, code=9)
    assert "gates.accuracy.at_least: the policy of channel prod requires 0.9, got 0.1" in said
    assert "gates.accuracy.at_least" in refused(world, "promote", world.newest(), code=9)
    assert world.json("get", "prod")["live"] is None


@pytest.mark.slow
def test_a_channel_that_came_back_takes_no_old_report(world: World) -> None:
    """A is live, C is judged against it, B ships and is rolled back: A is live again, and C's report is old."""
    world.ship()
    world.ok("channel", "freeze", "prod", "--reason", "an incident")
    judged = better(world, 0.97)
    assert world.json("get", judged)["reason"] == "ChannelFrozen"
    world.ok("channel", "unfreeze", "prod")
    better(world, 0.975)
    before = world.json("get", "prod")
    world.ok("rollback", "prod")
    assert world.json("get", "prod")["live"] == before["history"][0]["model_digest"]
    said = refused(world, "promote", judged, code=9)
    assert "must still point at release 1, with which the gates compared, got release 3" in said
    assert "posttrain run RUN.yaml --again" in said
    assert [row["sequence"] for row in world.json("get", "prod")["history"]] == [1, 2, 3]


@pytest.mark.slow
def test_of_two_who_promote_at_once_one_does(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ship()
    world.ok("channel", "freeze", "prod")
    one, two = better(world, 0.97), better(world, 0.975)
    world.ok("channel", "unfreeze", "prod")
    hashed = verdicts.check_weights

    def meanwhile(*words: Any) -> None:
        """While the first hashes its weights, the second comes and goes."""
        monkeypatch.setattr("posttrain.control.actions.check_weights", hashed)
        world.ok("promote", two)
        hashed(*words)

    monkeypatch.setattr("posttrain.control.actions.check_weights", meanwhile)
    said = refused(world, "promote", one, code=9)
    assert "channel prod moved: expected release 1 live, found release 2" in said
    assert [row["run_id"] for row in world.json("get", "prod")["history"]][1:] == [two]


def test_a_report_about_one_channel_promotes_to_another_only_where_it_holds(world: World) -> None:
    world.ship()
    run = world.newest()
    world.ok("channel", "set-policy", "stage", policy_file(world))
    said = refused(world, "promote", run, "--channel", "stage", code=9)
    assert "the run was judged without a policy" in said
    world.ok("channel", "remove-policy", "stage")
    assert "stage points at" in world.ok("promote", run, "--channel", "stage"), "it was empty when prod was"


@pytest.mark.slow
def test_a_frozen_channel_goes_back_but_not_on(world: World) -> None:
    world.ship()
    second = better(world, 0.97)
    assert "rollbacks are allowed" in world.ok("channel", "freeze", "prod", "--reason", "the fair")
    twice = world("channel", "freeze", "prod", "--reason", "another")
    assert "was frozen already" in twice.stdout
    assert twice.stdout.count("the fair; rollbacks are allowed") == 1
    assert "warning: the reason is not recorded" in twice.stderr
    assert ": the fair" in world.ok("get", "prod")
    assert "frozen: nothing is released to it, rollbacks are allowed" in world.ok("get", "prod")
    assert "(release 2, frozen)" in world.ok("ls")
    assert any("release.channel: prod is frozen" in line for line in world.json("plan", "run.yaml")["warnings"])
    assert "channel prod stays frozen" in world.ok("rollback", "prod")
    back = "posttrain rollback prod --to 2 --lift-quarantine REASON brings it back; or judge again"
    assert back in refused(world, "promote", second, "--lift-quarantine", "it was the traffic", code=9)
    assert "channel prod: is frozen (rollbacks are allowed)" in refused(world, "run", "run.yaml", "--again", code=9)
    run = world.newest()
    assert world.json("get", run)["reason"] == "ChannelFrozen"
    assert next_of(world, run) == ["channel", "unfreeze", "prod"]
    world.ok("channel", "freeze", "prod", "--rollbacks")
    lifting = ("rollback", "prod", "--to", second, "--lift-quarantine", "it was the traffic")
    assert "channel prod: is frozen; posttrain channel unfreeze prod" in refused(world, *lifting, code=9)
    world.ok(*next_of(world, run), "--reason", "it is over")
    assert next_of(world, run) == ["promote", run], "the channel is open by now"
    assert "release 4" in world.ok(*lifting)


@pytest.mark.slow
def test_what_was_rejected_by_a_frozen_channel_is_brought_live_by_what_why_says(world: World) -> None:
    world.ok("run", "run.yaml")
    world.ok("channel", "freeze", "prod")
    run = better(world, 0.97)
    world.ok(*next_of(world, run))
    world.ok(*next_of(world, run))
    assert world.json("get", "prod")["live"] == world.json("get", run)["stages"][1]["outputs"]["model"]["digest"]
    assert next_of(world, run) == ["get", "prod"], "nothing is left to do"
    assert world.json("ls")["runs"][0]["next_action"] == "posttrain get prod"
    assert run in world.ok(*next_of(world, run))


@pytest.mark.slow
def test_a_release_that_another_overtook_says_where_to_look(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("run", "run.yaml")

    def meanwhile(place: str) -> None:
        if place == "gate.after_commit":
            monkeypatch.setattr(verdicts, "crashpoint", lambda place: None)
            assert better(world, 0.975)

    monkeypatch.setattr(verdicts, "crashpoint", meanwhile)
    monkeypatch.setattr("posttrain.app.workspace._BESIDE", 0)  # commands of two threads share one standard output
    world.ok("asset", "add", "reward:sort", world.write("third.py", GOOD_REWARD.replace("1.0", "0.97")))
    said = refused(world, "run", "run.yaml", code=9)
    assert "judge again: posttrain run RUN.yaml --again; next: posttrain get prod" in said
    assert world.json("ls")["runs"][1]["reason"] == "ChannelMoved"


@pytest.mark.slow
def test_a_channel_that_an_older_version_protected_is_changed_by_nobody_until_it_is_unprotected(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("run", "run.yaml")
    second = better(world, 0.97)
    workspace = open_workspace()
    with workspace.ledger.transaction(workspace.actor) as transaction:
        transaction.set_channel(transaction.snapshot.channel_record("prod"), "channel.protected", protected=True)
    workspace.close()
    assert "protected: releases and changes" in world.ok("get", "prod")
    world.ok("rollback", "prod", "--reason", "it was worse")
    for words in (
        ("set-policy", "prod", policy_file(world, gates=[ACCURACY])),
        ("remove-policy", "prod"),
    ):
        said = refused(world, "channel", *words, code=9)
        assert "is protected, so a change of its policy needs an approval, and no other user can give it" in said
        assert "run posttrain channel unprotect prod first" in said
    assert "has this policy already" in world.ok("channel", "set-policy", "prod", policy_file(world))
    assert world("run", "run.yaml", "--again").exit_code == 9
    run = world.newest()
    assert world.json("get", run)["reason"] == "Quarantined"
    lift = ("--lift-quarantine", "hush")
    for words in (("promote", run, *lift), ("rollback", "prod", "--to", second, *lift)):
        assert world(*words).exit_code == 9
    assert len(world.json("get", "prod")["history"]) == 3
    world.ok("channel", "unprotect", "prod", "--reason", "by its admin")
    assert "release 4" in world.ok("promote", run, "--lift-quarantine", "the traffic was at fault")


@pytest.mark.slow
def test_a_policy_may_keep_what_was_rolled_back_off_for_good(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world, quarantine={"lift": "never"}))
    world.ok("run", "run.yaml")
    second = better(world, 0.97)
    world.ok("rollback", "prod")
    world("run", "run.yaml", "--again")
    for words in (("promote", world.newest(), "--lift-quarantine", "hush"), ("rollback", "prod", "--to", second)):
        said = refused(world, *words, code=9)
        assert "its policy never lifts a quarantine (quarantine.lift: never)" in said


def test_a_policy_that_is_set_while_somebody_rolls_back_is_not_passed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.ship()
    second = better(world, 0.97)
    world.ok("rollback", "prod")
    document, real = policy_file(world, quarantine={"lift": "never"}), actions.refuse_lift

    def overtaken(*given: Any) -> None:
        real(*given)
        world.ok("channel", "set-policy", "prod", document)

    monkeypatch.setattr(actions, "refuse_lift", overtaken)
    said = refused(world, "rollback", "prod", "--to", second, "--lift-quarantine", "hush", code=9)
    assert "channel prod has changed since it was read; check it and decide again" in said
    assert len(world.json("get", "prod")["history"]) == 3


@pytest.mark.slow
def test_a_policy_that_cannot_be_read_ships_nothing(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("run", "run.yaml")
    digest = world.json("get", "prod")["policy"].removeprefix("sha256:")
    (blob,) = [p for p in (world.root / ".posttrain" / "blobs").rglob("*") if p.is_file() and digest.endswith(p.name)]
    kept = blob.read_bytes()
    blob.write_bytes(kept.replace(b"0.9", b"0.1"))
    for words in (("plan", "run.yaml"), ("channel", "policy", "prod")):
        assert "cannot be read" in refused(world, *words, code=8)
    assert "policy of channel prod: " in world("verify", "prod").stdout
    blob.unlink()
    assert "cannot be read" in refused(world, "run", "run.yaml", code=8)
    world.ok("channel", "set-policy", "prod", "policy.yaml")
    assert blob.read_bytes() == kept, "setting it again brings it back"


def test_whoever_may_only_read_sees_the_policy_and_sets_none(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    monkeypatch.setattr("posttrain.store.database.writable", lambda file: False)
    assert world.json("channel", "policy", "prod")["policy"]["gates"][0]["name"] == "accuracy"
    for words in (("remove-policy", "prod"), ("freeze", "prod")):
        assert "it is read-only" in refused(world, "channel", *words, code=10)


def test_a_reason_may_be_any_text(world: World) -> None:
    world.ok("channel", "set-policy", "prod", policy_file(world))
    world.ok("channel", "freeze", "prod", "--reason", "día \u202e \udcff\n naïve")
    workspace = open_workspace()
    (told,) = workspace.ledger.events_about("prod", "channel.frozen")
    assert told.payload["why"] == "día \u202e ?\n naïve"
    workspace.seal()
    verify_rows(workspace.ledger)
    workspace.close()
