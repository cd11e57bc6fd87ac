"""Which images a run may name: references by digest, what a project allows, and who may say so."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_world import World, make_world
from console_bench import Browser
from server_bench import KEY, ServerBench, serving

from posttrain.app.workspace import Workspace
from posttrain.domain.errors import AccessError, InputError, NotFoundError
from posttrain.domain.ids import Role
from posttrain.domain.jobspec import allows, image_reference, image_rule
from posttrain.domain.manifest import job_identity
from posttrain.store.audit import verify_rows
from posttrain.store.sealer import seal

DIGEST, OTHER = f"sha256:{'a1' * 32}", f"sha256:{'b2' * 32}"
IMAGE = f"registry.example.org/team/train@{DIGEST}"
FLOW = """\
from pathlib import Path

Path(__file__).with_name("imported").touch()


class flow:
    def __init__(self, config):
        raise RuntimeError("nobody runs this here")
"""
STAGE = {
    **{"kind": "dataflow", "recipe": "mine:flow", "model": "base", "data": "train", "reward": "exact", "steps": 2},
    **{"prompts_per_step": 2, "max_new_tokens": 4},
}


@pytest.mark.parametrize(
    "good",
    [IMAGE, f"localhost/train@{DIGEST}", f"localhost:5000/a/b-c__d.e@{DIGEST}", f"gpu-1.internal:5000/x@{DIGEST}"],
)
def test_an_image_is_named_by_its_digest(good: str) -> None:
    assert image_reference(good) == good
    assert image_rule(good) == good


@pytest.mark.parametrize(
    "bad",
    [
        *("", "train", f"train@{DIGEST}", f"@{DIGEST}", "localhost/train@sha256:abc", f"localhost/Train@{DIGEST}"),
        *(
            f"localhost/a b@{DIGEST}",
            f"localhost/../etc@{DIGEST}",
            f"-v=/:/x/y@{DIGEST}",
            f"{IMAGE}\n",
            "localhost/x@*",
        ),
        *(f"localhost/{'a' * 500}@{DIGEST}", f"localhost/x@{DIGEST}@{DIGEST}", f"docker://localhost/x@{DIGEST}"),
    ],
)
def test_what_is_no_reference_by_digest_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        image_reference(bad)


@pytest.mark.parametrize("tagged", ["localhost/train:latest", "localhost/train", "ghcr.io/a/b:v1.2"])
def test_a_tag_is_refused_with_what_to_do(tagged: str) -> None:
    with pytest.raises(ValueError, match="must be pinned by digest") as refused:
        image_reference(tagged)
    assert "podman image inspect" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_rule_is_one_image_or_every_digest_of_a_repository() -> None:
    whole = "registry.example.org/team/train@*"
    assert image_rule(whole) == whole
    assert allows([whole], IMAGE)
    assert allows([IMAGE], IMAGE)
    for rules in (
        [],
        [IMAGE.replace(DIGEST, OTHER)],
        ["registry.example.org/team@*"],
        ["registry.example.org/team/tra@*"],
    ):
        assert not allows(rules, IMAGE)
    for bad in (
        "*",
        "@*",
        "registry.example.org/*@*",
        "registry.example.org/*",
        "localhost/x:*",
        "localhost/x@sha256:*",
    ):
        with pytest.raises(InputError, match="image must be"):
            image_rule(bad)


def test_an_image_decides_a_result_by_its_digest_alone() -> None:
    def of(image: str | None) -> dict[str, Any]:
        return job_identity("sft", {}, 1, {}, image)

    assert of(IMAGE) == of(f"localhost/mirror@{DIGEST}")
    assert of(IMAGE) != of(IMAGE.replace(DIGEST, OTHER))
    assert of(None) == job_identity("sft", {}, 1, {}), "runs without one keep the keys that they had"
    assert of(IMAGE) != of(None)


# --- a run file that names one ----------------------------------------------------------------------------------------


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    made.ok("init", "--rewards", "trusted")
    made.executor.images = True
    return made


def naming(world: World, image: str | None, **stages: Any) -> str:
    text = (world.root / "run.yaml").read_text()
    text += f"image: {image}\n" if image else ""
    for name, stage in stages.items():
        text = text.replace("stages:\n", f"stages:\n  {name}: {json.dumps(stage)}\n")
    (world.root / "mine.py").write_text(FLOW)
    world.write("imaged.yaml", text)
    return str(world.root / "imaged.yaml")


def test_a_run_is_another_one_by_its_image(world: World) -> None:
    plain, one = world.json("plan", naming(world, None)), world.json("plan", naming(world, IMAGE))
    other = world.json("plan", naming(world, IMAGE.replace(DIGEST, OTHER)))
    assert len({plain["digest"], one["digest"], other["digest"]}) == 3
    assert "image" not in plain
    assert "image" not in plain["manifest"], "a run without one is what it was"
    assert one["image"] == one["manifest"]["image"] == IMAGE
    assert f"image: {IMAGE}" in " ".join(world.ok("plan", naming(world, IMAGE)).split())


def test_a_run_with_a_tag_is_refused_in_one_line(world: World) -> None:
    refused = world("plan", naming(world, "localhost/train:latest"))
    assert refused.exit_code == 2
    assert "image: must be pinned by digest" in refused.stderr
    assert refused.stderr.count("\n") == 1


def test_an_executor_without_images_refuses_one_when_it_is_planned(world: World) -> None:
    world.executor.images = False
    for verb in ("plan", "lock", "run"):
        refused = world(verb, naming(world, IMAGE))
        assert refused.exit_code == 2
        assert f"image: {IMAGE}: executor fake of this workspace cannot run images" in refused.stderr
    world.ok("plan", naming(world, None))


@pytest.mark.slow
def test_a_stage_is_not_taken_from_another_image(world: World) -> None:
    world.ok("run", "run.yaml")
    assert all(row["cached_from"] for row in world.json("plan", "run.yaml")["stages"] if row["kind"] == "sft")
    found = {row["name"]: row["cached_from"] for row in world.json("plan", naming(world, IMAGE))["stages"]}
    assert found["sft"] is None
    assert found["grpo"] is None
    assert found["baseline-evaluate"], "what measures is the same measure"
    world.ok("run", naming(world, IMAGE))
    asked = {request.image for request in world.executor.launched}
    assert asked == {"", IMAGE}, "each job is asked for with its run's image"
    imaged = [request.labels["stage"] for request in world.executor.launched if request.image]
    assert "sft" in imaged
    assert "evaluate" not in imaged, "whoever made the image would write what gates judge by"
    orders = [json.loads((one.folder / "job.json").read_text()) for one in world.executor.launched]
    assert [order["image"] for order in orders] == [request.image for request in world.executor.launched]
    own = [
        Path(order["cache_dir"]).parent == one.folder
        for order, one in zip(orders, world.executor.launched, strict=True)
    ]
    assert own == [bool(order["image"]) for order in orders], "whoever runs in none shares the workspace's cache"


@pytest.mark.slow
def test_a_run_shows_its_image_wherever_it_is_looked_at(world: World) -> None:
    world.broken["sft"] = [7] * 9  # as where the image cannot be had
    assert world("run", naming(world, IMAGE)).exit_code != 0
    run = world.newest()
    for verb in ("get", "why"):
        assert f"image: {IMAGE}" in world.ok(verb, run)
        assert world.json(verb, run)["image"] == IMAGE
    with serving(Workspace(world.root / ".posttrain")) as bench:
        browser = Browser(bench)
        browser.log_in(bench.person("ann", Role.VIEWER))
        assert IMAGE in browser.get(f"/projects/default/runs/{run}").body.decode()
        monitored = bench.control(bench.person("bob", Role.VIEWER)).status(run)
        assert monitored.image == IMAGE
    world.broken.clear()
    world.ok("run", "run.yaml")
    assert "image:" not in world.ok("get", world.newest())
    assert world.json("get", world.newest())["image"] is None


def test_whoever_has_the_workspace_names_any_image_until_somebody_says_which(world: World) -> None:
    world.ok("plan", naming(world, IMAGE))
    world.ok("project", "allow-image", "localhost/other@*")
    refused = world("plan", naming(world, IMAGE))
    assert refused.exit_code == 2
    assert (
        f"image: must be an image that project default allows, got {IMAGE} (it allows localhost/other@*); a project "
        f"admin can allow it: posttrain project allow-image {IMAGE}" in refused.stderr
    )
    world.ok("project", "allow-image", IMAGE)
    world.ok("plan", naming(world, IMAGE))
    assert world.json("project", "images") == ["localhost/other@*", IMAGE]
    world.ok("project", "remove-image", IMAGE)
    world.ok("project", "remove-image", "localhost/other@*")
    assert world.json("project", "images") == []
    assert "it allows none" in world("plan", naming(world, IMAGE)).stderr
    assert "does not allow image" in world("project", "remove-image", IMAGE).stderr


def test_a_lock_is_held_against_the_project_and_the_executor_too(world: World) -> None:
    world.ok("lock", naming(world, IMAGE), "--out", "x.lock.json")
    world.ok("project", "allow-image", "localhost/other@*")
    assert "must be an image that project default allows" in world("run", "x.lock.json").stderr
    world.ok("project", "allow-image", IMAGE)
    world.executor.images = False
    assert "of this workspace cannot run images" in world("run", "x.lock.json").stderr


def test_another_run_of_a_lock_is_held_against_the_project_too(world: World) -> None:
    world.ok("lock", naming(world, IMAGE), "--out", "x.lock.json")
    world.ok("run", "x.lock.json")
    world.ok("project", "allow-image", "localhost/other@*")
    assert world("run", "x.lock.json").exit_code == 0, "it is gone on with"
    assert "must be an image that project default allows" in world("run", "x.lock.json", "--again").stderr


def test_an_edited_lock_measures_nothing_that_its_stages_do_not(world: World) -> None:
    """A stage that says to leave measurements would run in no image, and write what gates read."""
    world.ok("lock", naming(world, IMAGE), "--out", "x.lock.json")
    lock = json.loads((world.root / "x.lock.json").read_text())
    [sft] = [stage for stage in lock["stages"] if stage["kind"] == "sft"]
    sft["outputs"] |= {"metrics": "file", "items": "file"}
    world.write("y.lock.json", json.dumps(lock))
    assert "stages.sft: outputs: a stage of kind sft must have model, got" in world("run", "y.lock.json").stderr
    assert not world.executor.launched


def test_rewards_that_nothing_confines_in_an_image_need_a_workspace_that_trusts_them(world: World) -> None:
    assert "rewards and observe run unconfined, because the workspace trusts them: in an image" in world.ok(
        "plan", naming(world, IMAGE)
    )
    world.ok("init", "--rewards", "confined")
    refused = world("plan", naming(world, IMAGE))
    assert refused.exit_code == 2
    assert (
        "rewards and observe must be confined, which is not possible here: in an image, rewards can access everything "
        "that their job can access" in refused.stderr
    )


# --- over a server ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(world: World) -> Iterator[ServerBench]:
    with serving(Workspace(world.root / ".posttrain")) as made:
        yield made


def test_admins_say_which_images_and_everybody_sees_them(bench: ServerBench) -> None:
    admin, ann = bench.control(KEY), bench.control(bench.person("ann", Role.APPROVER))
    assert ann.images() is None
    with pytest.raises(AccessError, match="posttrain project allow-image needs the role admin"):
        ann.allow_image(IMAGE)
    assert admin.allow_image(IMAGE) == [IMAGE]
    assert admin.allow_image(IMAGE) == [IMAGE]
    assert ann.images() == [IMAGE]
    with pytest.raises(AccessError, match="posttrain project remove-image needs the role admin"):
        ann.remove_image(IMAGE)
    with pytest.raises(InputError, match="must be pinned by digest"):
        admin.allow_image("localhost/train:latest")
    with pytest.raises(NotFoundError, match="does not allow image"):
        admin.remove_image("localhost/x@*")
    assert admin.remove_image(IMAGE) == []
    ledger = bench.workspace.ledger
    seal(ledger)
    verify_rows(ledger)


def test_an_image_is_allowed_in_one_project_alone(bench: ServerBench) -> None:
    bench.control(KEY).allow_image(IMAGE)
    other = bench.control(bench.person("may", Role.ADMIN, "other"), "other")
    assert other.images() is None
    other.allow_image("localhost/x@*")
    assert bench.control(KEY).images() == [IMAGE]


def test_from_afar_no_image_may_be_named_that_nobody_allowed(bench: ServerBench, world: World) -> None:
    ann, file = bench.control(bench.person("ann", Role.SUBMITTER)), Path(naming(world, IMAGE))
    with pytest.raises(InputError, match=r"must be an image that project default allows, got .* \(it allows none\)"):
        ann.plan(file)
    bench.control(KEY).allow_image(IMAGE)
    assert ann.plan(file).manifest.image == IMAGE


def test_from_afar_a_recipe_runs_in_an_image_or_not_at_all(bench: ServerBench, world: World) -> None:
    """And the server does not import it."""
    ann = bench.control(bench.person("ann", Role.SUBMITTER))
    for verb in (ann.plan, ann.lock, ann.submit):
        with pytest.raises(InputError, match="a server runs a custom dataflow only in an image"):
            verb(Path(naming(world, None, mine=STAGE)))
    boxed = Path(naming(world, IMAGE, mine=STAGE))
    with pytest.raises(InputError, match="must be an image that project default allows"):
        ann.submit(boxed)
    bench.control(KEY).allow_image(IMAGE)
    planned = ann.plan(boxed)
    assert planned.manifest.stage("mine").inputs["recipe"].meta["entry"] == "flow"
    assert ann.submit(boxed).run.name == "sort"
    assert not list(world.root.rglob("imported"))
    for away in ("../mine:flow", "/etc/hostname:flow", "sub/../../mine:flow"):
        with pytest.raises(InputError, match="dataflow: recipe: must match "):
            ann.plan(Path(naming(world, IMAGE, mine={**STAGE, "recipe": away})))
    lock = world.root / "x.lock.json"
    ann.lock(Path(naming(world, IMAGE, mine=STAGE))).write(lock)
    text = lock.read_text()
    lock.write_text(text.replace(f'"image":"{IMAGE}",', ""))
    with pytest.raises(InputError, match="a server runs a custom dataflow only in an image"):
        ann.submit(lock)
