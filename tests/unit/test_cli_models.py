"""Models by the words people have for them: bases of runs, evaluated, exported."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from cli_world import BAD_REWARD, World, make_world, write_model

from posttrain.app.workspace import open_workspace
from posttrain.domain.errors import NotFoundError
from posttrain.web.pages import ModelCard, render_card

WHILE = "100"  # seconds of the world's clock, which runs fifty times as fast: the jobs of the world do not end by then


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = make_world(tmp_path, monkeypatch)
    made.prepare()
    return made


@pytest.fixture
def shipped(world: World) -> str:
    """The run whose model prod serves."""
    return world.ship()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A workspace whose model prod serves. Nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("seen"), patch)
        made.ship()
        yield made


def stage_model(world: World, run: str, stage: str) -> str:
    stages = {row["name"]: row for row in world.json("get", run)["stages"]}
    return str(stages[stage]["outputs"]["model"]["digest"])


def on(world: World, model: str, name: str = "next", **changes: object) -> str:
    """A run file that starts from `model` and trains nothing but one stage."""
    spec = yaml.safe_load(Path("run.yaml").read_text())
    spec |= {"name": name, "model": model} | changes
    spec["stages"]["grpo"]["model"] = "base"
    spec["stages"].pop("sft", None)
    return world.write(f"{name}.yaml", yaml.safe_dump(spec))


class TestBase:
    @pytest.mark.parametrize("word", ["channel:prod", "channel:prod@1", "run:sort", "run:sort/grpo", "run:{id}/grpo"])
    def test_a_released_model_goes_on(self, world: World, shipped: str, word: str) -> None:
        plan = world.json("plan", on(world, word.format(id=shipped)))
        inputs = {row["slot"]: row for row in plan["stages"][0]["inputs"]}
        assert inputs["model"]["digest"] == stage_model(world, shipped, "grpo")
        assert inputs["model"]["name"] == ("channel:prod@1" if "prod" in word else f"run:{shipped}/grpo")

    def test_a_stage_of_a_rejected_run_goes_on(self, world: World) -> None:
        world.write("reward.py", BAD_REWARD)
        world.ok("asset", "add", "reward:sort", "reward.py")
        assert world("run", "run.yaml").exit_code == 3
        run = world.newest()
        world.ok("run", on(world, "run:sort/sft", gates=[], release=None, rewards={"exact": "reward:sort"}))
        assert world.json("lineage", world.newest())["children"][0]["children"]
        tree = world.ok("lineage", world.newest())
        assert f"{run}/sft" in tree
        assert "model:tiny@1" in tree  # and what that was made from

    def test_lineage_goes_through_the_channel(self, world: World, shipped: str) -> None:
        world.ok("run", on(world, "channel:prod"))
        tree = world.ok("lineage", world.newest())
        assert f"model {shipped}/grpo" in tree
        assert f"model {shipped}/sft" in tree
        assert "model:tiny@1" in tree
        assert "everything matches" in world.ok("verify", world.newest())

    @pytest.mark.slow
    def test_a_word_that_moves_decides_nothing_by_itself(self, world: World, shipped: str) -> None:
        """The same model under another word is the same work."""
        world.ok("run", on(world, "channel:prod", name="one"))
        world.ok("run", on(world, "run:sort/grpo", name="two"))
        stages = {row["name"]: row for row in world.json("get", "two")["stages"]}
        assert stages["grpo"]["cached_from"]

    @pytest.mark.slow
    def test_the_same_command_attaches_while_its_run_goes_on_and_starts_another_when_it_has_ended(
        self, world: World, shipped: str
    ) -> None:
        path = on(world, "channel:prod")
        world.hold.add("grpo")
        assert world("run", path, "--timeout", WHILE).exit_code == 12
        first = world.newest()
        sft = move(world, shipped)
        attached = world("run", path, "--timeout", WHILE)
        assert f"attached to run {first}" in attached.stdout
        assert "warning: a model that the run file names has changed" in attached.stdout
        world.ok("stop", first)
        world.hold.clear()
        world.ok("run", path)
        assert world.newest() != first
        assert stage_input(world, world.newest()) == sft

    @pytest.mark.slow
    def test_a_lock_is_the_manifest_that_it_is(self, world: World, shipped: str) -> None:
        """Another run of the same words goes on, from where the channel points by now."""
        path = on(world, "channel:prod", seed=99)  # nothing of it is in the cache
        world.ok("lock", path, "--out", "next.lock.json")
        move(world, shipped)
        world.hold.add("grpo")
        assert world("run", path, "--timeout", WHILE).exit_code == 12
        other = world.newest()
        world.hold.clear()
        world("run", "next.lock.json")
        assert world.newest() != other
        assert stage_input(world, world.newest()) == stage_model(world, shipped, "grpo")

    @pytest.mark.parametrize(
        ("word", "line"),
        [
            ("channel:prd", "there is no channel 'prd' (did you mean 'prod'?)"),
            ("channel:prod@7", "channel prod has no release 7; the latest is 1"),
            ("channel:prod@0", "release must be a whole number >= 1, got '0'"),
            ("channel:", "must be channel:NAME or channel:NAME@RELEASE, got ''"),
            ("run:nobody/sft", "there is no run 'nobody'"),
            ("run:sort/evaluate", "has no stage 'evaluate' that makes a model (known: grpo, sft)"),
            ("run:sort/", "must be run:RUN or run:RUN/STAGE, got 'sort/'"),
        ],
    )
    def test_what_nobody_made_is_refused(self, seen: World, word: str, line: str) -> None:
        result = seen("plan", on(seen, word))
        assert result.exit_code == 2
        assert line in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_a_run_file_does_not_start_from_its_own_newest_run(self, world: World, shipped: str) -> None:
        """It would be another run each time, and never the one that it is repeated for."""
        for word in ("run:sort/sft", "run:sort-/sft", f"run:{shipped[:-1]}/sft"):
            result = world("plan", on(world, word, name="sort"))
            assert (result.exit_code, f"write run:{shipped}/sft" in result.stderr) == (2, True)
        world.ok("plan", on(world, f"run:{shipped}/sft", name="sort"))

    def test_a_bare_word_is_told_how_a_run_file_writes_it(self, world: World, shipped: str) -> None:
        for word, wanted in (
            ("prod", "is a channel; write channel:prod"),
            ("sort/sft", "is a run; write run:sort/sft"),
        ):
            result = world("plan", on(world, word))
            assert (result.exit_code, wanted in result.stderr) == (2, True)
        assert "did you mean 'prod'?" in world("sample", "prd", "1").stderr

    def test_a_stage_without_a_model_yet_is_refused(self, world: World) -> None:
        world.hold.add("grpo")
        world("run", "run.yaml", "--timeout", WHILE)
        result = world("plan", on(world, "run:sort"))
        assert result.exit_code == 2
        assert "stage grpo of run sort-" in result.stderr
        assert "has produced no model (running)" in result.stderr
        world.ok("plan", on(world, "run:sort/sft"))

    def test_a_run_stands_for_the_model_that_it_releases(self, world: World) -> None:
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec["stages"]["later"] = {"kind": "sft", "model": "grpo", "data": "train", "steps": 2}
        world.ok("run", world.write("two.yaml", yaml.safe_dump(spec)))
        assert world.json("export", "sort", "out")["name"] == f"run:{world.newest()}/grpo"

    @pytest.mark.slow
    def test_a_run_that_releases_nothing_stands_for_its_last_policy(self, world: World) -> None:
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec |= {"gates": [], "release": None}
        judge = {"kind": "reward_model", "model": "sft", "data": "pairs", "steps": 2}
        spec["stages"] = {"sft": spec["stages"]["sft"], "judge": judge}
        spec["stages"]["ppo"] = {"kind": "ppo", "model": "sft", "data": "train", "reward_model": "judge", "steps": 2}
        spec["data"]["pairs"] = "./pairs.jsonl"
        row = {"prompt": "Q", "chosen": "A", "rejected": "B"}
        world.write("pairs.jsonl", json.dumps(row) + "\n")
        world.ok("run", world.write("judged.yaml", yaml.safe_dump(spec)))
        assert world.json("export", "sort", "out")["name"] == f"run:{world.newest()}/ppo"
        stages = spec["stages"]
        spec["stages"] = {"sft": stages["sft"], "ppo": stages["ppo"], "judge": stages["judge"]}
        world.ok("run", world.write("judged.yaml", yaml.safe_dump({**spec, "name": "other"})))
        assert world.json("export", "other", "out2")["name"] == f"run:{world.newest()}/ppo"
        spec["stages"] = {"sft": stages["sft"], "judge": stages["judge"]}
        world.ok("run", world.write("judged.yaml", yaml.safe_dump({**spec, "name": "judge-only"})))
        assert world.json("export", "judge-only", "out3")["name"] == f"run:{world.newest()}/sft"

    def test_a_teacher_is_no_run_s_last_policy_and_stands_in_the_lineage(self, world: World) -> None:
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec |= {"gates": [], "release": None, "name": "taught"}
        large = {"kind": "sft", "model": "base", "data": "train", "steps": 3}
        taught = {"kind": "distill", "model": "sft", "teacher": "large", "data": "train", "steps": 2, "top_k": 8}
        spec["stages"] = {"sft": spec["stages"]["sft"], "taught": taught, "large": large}
        world.ok("run", world.write("taught.yaml", yaml.safe_dump(spec)))
        name = f"run:{world.newest()}/taught"
        assert world.json("export", "taught", "out4")["name"] == name
        told = world.ok("lineage", world.newest())
        assert f"{world.newest()}/large" in told, told
        assert told.count("made by: sft") == 2, "the student's, and the teacher's"
        spec["stages"]["taught"]["teacher"] = "model:tiny@1"
        world.ok("run", world.write("taught.yaml", yaml.safe_dump({**spec, "name": "by-ref"})))
        assert "model:tiny@1" in world.ok("lineage", world.newest())

    def test_a_model_is_no_data_set(self, world: World, shipped: str) -> None:
        path = on(world, "model:tiny", data={"train": "channel:prod", "heldout": "dataset:heldout"})
        result = world("plan", path)
        assert result.exit_code == 2
        assert "must name a dataset, but a channel names a model" in result.stderr


def move(world: World, shipped: str) -> str:
    """Let prod point at what the run's first stage made; its digest."""
    sft = stage_model(world, shipped, "sft")
    workspace = open_workspace()
    with workspace.ledger.transaction("test") as transaction:
        transaction.append_release("prod", sft, shipped, "promote", expected=1)
    workspace.close()
    return sft


def stage_input(world: World, run: str) -> str:
    workspace = open_workspace()
    manifest = workspace.stores.manifest(workspace.ledger.run(run))
    workspace.close()
    return str(manifest.stages[0].inputs["model"].digest)


class TestEval:
    def test_a_model_is_measured_without_a_run_file(self, world: World, shipped: str) -> None:
        found = world.json("eval", "prod", "heldout")
        assert found["scores"] == {"evaluate/heldout/accuracy": 0.98}
        assert (found["model"], found["digest"]) == ("channel:prod@1", stage_model(world, shipped, "grpo"))
        (row,) = found["intervals"]["rows"]
        assert (row["metric"], row["value"]) == ("heldout/accuracy", 0.98)
        assert 0.9 < row["low"] < 0.98 < row["high"] < 1.0
        assert "responses of at most 256 tokens" in world.ok("eval", "prod", "heldout")
        assert world.json("eval", "model:tiny", "dataset:heldout")["scores"] == {"evaluate/heldout/accuracy": 0.1}
        assert world.json("eval", f"{shipped}/sft", "./heldout.jsonl")["scores"] == {"evaluate/heldout/accuracy": 0.5}

    def test_the_same_question_is_the_same_run(self, world: World, shipped: str) -> None:
        first = world.json("eval", "prod", "heldout")["run"]
        assert world.json("eval", "prod", "heldout")["run"] == first
        assert f"attached to run {first}" in world.ok("eval", "prod", "heldout")
        assert world.json("eval", "prod", "heldout", "--again")["run"] != first

    def test_it_asks_about_what_the_channel_serves_now(self, world: World, shipped: str) -> None:
        """A question that nobody has answered yet was about another model."""
        world.hold.add("evaluate")
        assert world("eval", "prod", "heldout", "--seed", "5", "--timeout", WHILE).exit_code == 12
        sft = move(world, shipped)
        world.hold.clear()
        found = world.json("eval", "prod", "heldout", "--seed", "5", "--timeout", WHILE)
        assert (found["model"], found["digest"], found["attached"]) == ("channel:prod@2", sft, False)

    def test_its_exit_code_is_the_outcome(self, world: World, shipped: str) -> None:
        world.broken["evaluate"] = [1, 1]
        assert world("eval", "prod", "heldout").exit_code == 6

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("nobody", "heldout"), "model 'nobody': no channel (known: prod), and there is no run 'nobody'"),
            (("prod", "hedout"), "no dataset of that name is registered (did you mean 'heldout'?)"),
            (("prod", "heldout", "./heldout.jsonl"), "suites must have different names, got 'heldout' twice"),
            (("prod", "heldout", "--pass-at", "4"), "pass_at must be <= samples (0), got 4"),
            (("prod", "heldout", "--device", "tpu"), "device"),
            (("prod", "heldout", "--top-p", "0.9"), "top_p needs samples >= 1, got 0.9 with samples: 0; set samples"),
            (("prod", "heldout", "--stop", ""), "heldout.stop: must contain strings of 1 to 256 characters, got 0"),
        ],
    )
    def test_refused_in_one_line(self, seen: World, words: tuple[str, ...], line: str) -> None:
        result = seen("eval", *words)
        assert result.exit_code == 2
        *begins, error = result.stderr.splitlines()
        assert line in error
        assert [text.startswith("planning to measure") for text in begins] in ([], [True])


class TestCard:
    """What an exported model says of itself."""

    def test_a_rejected_run_and_a_rolled_back_release_say_so(self, world: World, shipped: str) -> None:
        world.ok("export", "prod", "live")
        assert "released to prod, release 1 (live)" in Path("live/README.md").read_text()
        move(world, shipped)
        world.ok("rollback", "prod")
        world.ok("export", "prod@2", "back")
        assert "release 2 (rolled back)" in Path("back/README.md").read_text()
        world.ok("asset", "add", "reward:sort", world.write("reward.py", BAD_REWARD))
        assert world("run", "run.yaml", "--seed", "9").exit_code == 3
        world.ok("export", world.newest(), "bad")
        assert ", in a run whose state is **rejected**" in Path("bad/README.md").read_text()
        said = json.loads(Path("bad/lineage.json").read_text())
        assert said["state"] == "rejected"
        assert "| accuracy | FAIL |" in Path("bad/README.md").read_text()

    def test_it_names_nobody(self, world: World, shipped: str) -> None:
        world.ok("export", "prod", "out")
        for name in ("README.md", "lineage.json"):
            text = Path("out", name).read_text()
            assert "user:" not in text
            assert not re.search(r"\bada\b", text)
            assert "ray_address" not in text

    def test_a_stage_that_changed_nothing_does_not_take_the_released_ones_name(self, world: World) -> None:
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec["stages"]["later"] = {"kind": "sft", "model": "sft", "data": "train", "steps": 2}
        spec["stages"]["evaluate"]["model"] = spec["release"]["model"] = "sft"  # both make a model of quality 0.5
        spec["gates"] = [{"name": "half", "metric": "heldout/accuracy", "at_least": 0.4}]
        world.ok("run", world.write("same.yaml", yaml.safe_dump(spec)))
        stages = {row["name"]: row for row in world.json("get", world.newest())["stages"]}
        assert stages["later"]["outputs"] == stages["sft"]["outputs"]
        world.ok("export", "prod", "out")
        card = Path("out/README.md").read_text()
        assert f"Made by `{world.newest()}/sft`" in card
        assert json.loads(Path("out/lineage.json").read_text())["scores"] == {"evaluate/heldout/accuracy": 0.5}

    def test_a_release_shows_what_was_measured_of_its_own_model(self, world: World) -> None:
        spec = yaml.safe_load(Path("run.yaml").read_text())
        spec["stages"]["before"] = {"kind": "evaluate", "model": "sft", "suites": {"heldout": {"data": "heldout"}}}
        world.ok("run", world.write("two.yaml", yaml.safe_dump(spec)))
        tree = world.ok("lineage", "prod")
        assert f"evaluation {world.newest()}/evaluate" in tree
        assert f"{world.newest()}/before" not in tree


class TestExport:
    def test_a_channel_leaves_as_it_is_with_its_card(self, world: World, shipped: str) -> None:
        done = world.json("export", "prod", "out")
        assert (done["name"], done["cast"], done["card"]) == ("channel:prod@1", False, True)
        workspace = open_workspace()
        listing = json.loads(workspace.blobs.get(done["digest"]))["files"]
        workspace.close()
        assert set(listing) | {"README.md", "lineage.json"} == set(done["files"])
        assert all((Path("out") / name).stat().st_size == file["size"] for name, file in listing.items())
        card = Path("out/README.md").read_text()
        head = yaml.safe_load(card.split("---")[1])
        assert head["library_name"] == "transformers"
        assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.98
        for word in (f"`{shipped}/grpo`", "prod, release 1", "| accuracy | PASS |", done["digest"], "dataset:train@1"):
            assert word in card
        billed = {stage["name"]: stage["seconds"] for stage in world.json("get", shipped)["stages"]}
        said = [float(found) for found in re.findall(r"tokens in ([\d.e-]+) s", card)]
        assert said == pytest.approx([billed["sft"], billed["grpo"]], abs=6e-4)
        lineage = json.loads(Path("out/lineage.json").read_text())
        assert lineage["scores"] == {"evaluate/heldout/accuracy": 0.98}
        assert lineage["lineage"]["children"][0]["digest"] == done["digest"]

    @pytest.mark.parametrize(("said", "stored"), [(None, "BF16"), ("float32", "BF16"), ("bfloat16", "F32")])
    def test_the_type_is_that_of_the_weights_whatever_the_configuration_says(
        self, world: World, said: str | None, stored: str
    ) -> None:
        write_model(Path("odd"), 0.1)
        config = json.loads(Path("odd/config.json").read_text()) | ({"dtype": said} if said else {})
        Path("odd/config.json").write_text(json.dumps(config))
        size = {"BF16": 2, "F32": 4}[stored]
        header = json.dumps({"w": {"dtype": stored, "shape": [1], "data_offsets": [0, size]}}).encode()
        Path("odd/model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(size))
        world.ok("asset", "add", "model:odd", "odd")
        kind = {"BF16": "bfloat16", "F32": "float32"}[stored]
        assert world.json("export", "model:odd", "as-is")["dtype"] == kind
        same = world.json("export", "model:odd", "same", "--dtype", kind)
        assert (same["dtype"], same["cast"]) == (kind, False)

    def test_a_reward_model_is_told_as_one(self, world: World) -> None:
        write_model(Path("judge"), 0.1)
        config = json.loads(Path("judge/config.json").read_text())
        Path("judge/config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForSequenceClassification"]}))
        world.ok("asset", "add", "model:judge", "judge")
        assert world.json("export", "model:judge", "out")["opened_by"] == "AutoModelForSequenceClassification"
        card = ModelCard(
            "judge", "sha256:0", "float32", False, "r/judge", "", "sha256:1", "", 1, (), (), (), (), "0", judge=True
        )
        text = render_card(card)
        assert "AutoModelForSequenceClassification.from_pretrained" in text
        assert "AutoModelForCausalLM" not in text
        assert yaml.safe_load(text.split("---")[1])["pipeline_tag"] == "text-classification"

    def test_a_stage_and_a_base_model(self, world: World, shipped: str) -> None:
        done = world.json("export", f"{shipped}/sft", "sft")
        assert done["digest"] == stage_model(world, shipped, "sft")
        card = Path("sft/README.md").read_text()
        assert "No gate has judged this model." in card
        assert "The run did not evaluate this model." in card
        base = world.json("export", "model:tiny", "base-out")
        assert (base["card"], sorted(base["files"])) == (False, ["config.json", "model.safetensors"])
        write_model(Path("there"), 0.1)
        assert Path("base-out/model.safetensors").read_bytes() == Path("there/model.safetensors").read_bytes()

    def test_what_is_there_stays(self, world: World, shipped: str) -> None:
        Path("out").mkdir()
        world.ok("export", "prod", "out")  # an empty folder is as good as none
        before = {path: path.read_bytes() for path in Path("out").iterdir()}
        for target in ("out", "run.yaml", "."):
            result = world("export", "prod", target)
            assert result.exit_code == 2
            assert len(result.stderr.splitlines()) == 1
        assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
        assert [path.name for path in Path().iterdir() if "export" in path.name] == []

    def test_a_corrupt_model_does_not_leave(self, world: World, shipped: str) -> None:
        workspace = open_workspace()
        listing = json.loads(workspace.blobs.get(stage_model(world, shipped, "grpo")))["files"]
        digest = listing["model.safetensors"]["digest"].removeprefix("sha256:")
        workspace.close()
        blob = next(path for path in Path(".posttrain/blobs").rglob("*") if path.is_file() and digest[2:] in path.name)
        blob.chmod(0o600)
        blob.write_bytes(blob.read_bytes()[:-1] + b"\x01")
        result = world("export", "prod", "out")
        assert result.exit_code == 8
        assert not Path("out").exists()
        assert [path.name for path in Path().iterdir() if "export" in path.name] == []

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("nobody", "out"), "there is no run 'nobody'"),
            (("prod", "out", "--dtype", "int4"), "dtype must be one of float32, bfloat16, float16, got 'int4'"),
            (("./base", "out"), "is already a folder on this machine; copy the folder"),
            (("prod", "/proc/nowhere/out"), "/proc/nowhere"),
            (("prod", ".posttrain/blobs/out"), "must not be in the workspace"),
            (("prod", "~nobody-of-this-name/out"), "name another folder"),
        ],
    )
    def test_refused_in_one_line(self, seen: World, words: tuple[str, ...], line: str) -> None:
        result = seen("export", *words)
        assert result.exit_code in (2, 10)
        assert line in result.stderr
        assert len(result.stderr.splitlines()) == 1

    def test_no_text_of_a_run_is_markup_in_the_card(self, world: World) -> None:
        """A guideline may hold what closes a block or opens a link."""
        world.write(
            "reward.py", '"""```\n# [click](evil) <script>"""\n\ndef score(completion, answer):\n    return 1.0\n'
        )
        world.ok("asset", "add", "reward:sort", "reward.py")
        world.ok("run", "run.yaml")
        world.ok("export", "prod", "out")
        fences = [line for line in Path("out/README.md").read_text().splitlines() if line.startswith("```")]
        assert len(fences) % 2 == 0
        assert fences[-2:] == ["```text", "```"]


class TestSample:
    @pytest.mark.parametrize(
        ("words", "line"),
        [
            (("nobody", "hi"), "there is no run 'nobody'"),
            (("prod", "hi", "-n", "2", "--temperature", "0"), "temperature must be above 0 for 2 different responses"),
            (("prod", "hi", "--temperature", "-1"), "temperature must be from 0"),
            (("prod", "hi", "--stop", ""), "stop must contain strings of 1 to 256 characters, got 0"),
            (("prod", "hi", "--temperature", "1", "--top-p", "1.5"), "top-p above 0 to 1"),
            (("prod", "hi", "--temperature", "1", "--min-p", "nan"), "min-p from 0 to below 1"),
            (("prod", "hi", "--top-k", "4"), "need a temperature above 0, got 0 (the most likely tokens)"),
            (("prod", "hi", "--device", "tpu"), "device"),
            (("prod", "hi", "--text", "--system", "be brief"), "--system needs a chat"),
        ],
    )
    def test_refused_in_one_line(self, seen: World, words: tuple[str, ...], line: str) -> None:
        result = seen("sample", *words)
        assert result.exit_code == 2
        assert line in result.stderr
        errors = [text for text in result.stderr.splitlines() if text.startswith("error: ")]
        assert len(errors) == 1


class TestProgress:
    """Nobody sits before a silent command: what it begins with is told first, and beside what was asked for."""

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_before_a_run_is_planned(self, seen: World, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
        monkeypatch.setattr("posttrain.app.models.submit_evaluation", begun)
        result = seen("eval", "prod", "heldout", "-o", form)
        assert result.stderr.splitlines() == ["planning to measure prod on heldout", "error: it began"]
        assert result.stdout == ""

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_before_a_model_is_loaded(self, seen: World, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
        monkeypatch.setattr("posttrain.execution.foreground.answers", begun)
        result = seen("sample", "prod", "hi", "-o", form)
        told, error = result.stderr.splitlines()
        assert told.startswith("channel:prod@1 sha256:")
        assert told.endswith("loading the model")
        assert error == "error: it began"

    @pytest.mark.parametrize("form", ["text", "json"])
    def test_before_files_are_copied(self, seen: World, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
        monkeypatch.setattr("posttrain.store.blobs.ObjectBlobs.fetch", begun)
        result = seen("export", "prod", "out-of-it", "-o", form)
        begins = "copying prod to out-of-it and verifying the hash of every file"
        assert result.stderr.splitlines() == [begins, "error: it began"]
        assert result.stdout == ""

    def test_json_stays_a_document_and_its_run_is_told_beside_it(self, world: World, shipped: str) -> None:
        said = world("eval", "prod", "heldout", "-o", "json")
        assert f"run {json.loads(said.stdout)['run']};" in said.stderr
        assert json.loads(world("export", "prod", "out", "-o", "json").stdout)["cast"] is False


def begun(*_: object, **__: object) -> None:
    """What comes after the first line."""
    raise NotFoundError("it began")
