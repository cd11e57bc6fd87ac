"""plan, lock and run refuse a placement that cannot be had and write nothing; plan shows what is resident when."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_world import World, make_world

from posttrain.domain.errors import InputError
from posttrain.execution import machine as machines
from posttrain.execution.executors.local.devices import Devices, take
from posttrain.execution.machine import Gpu, Machine, visible

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30)
RUN = """\
name: sort
owner: ada
seed: 17
data: {train: dataset:train}
rewards: {exact: reward:sort}
stages:
  init: {kind: init_model, hidden_size: HIDDEN, intermediate_size: 4096, layers: 8, heads: 12, kv_heads: 4}
  sft: {kind: sft, model: init, data: train, steps: 4}
  grpo: {kind: grpo, model: sft, data: train, reward: exact, steps: 6, max_new_tokens: 8, PLACED}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One workspace for all: nothing here may change it."""
    with pytest.MonkeyPatch.context() as patch:
        made = make_world(tmp_path_factory.mktemp("placing"), patch)
        made.prepare()
        yield made


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[Machine]:
    """The machine that commands find, with Ray; the tests put another in."""
    found = [Machine(4, 64 * 2**30)]
    monkeypatch.setattr("posttrain.preflight.placements.this_machine", lambda: found[-1])
    monkeypatch.setattr("posttrain.preflight.placements.gpu_visible", lambda: bool(found[-1].gpus))
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: True)
    return found


def file(world: World, placed: str, hidden: int = 768) -> str:
    return world.write("placed.yaml", RUN.replace("HIDDEN", str(hidden)).replace("PLACED", placed))


def contents(world: World) -> dict[str, bytes]:
    """Every file of the world but the database's own housekeeping."""
    files = [p for p in world.root.rglob("*") if p.is_file() and not p.name.startswith("ledger.db")]
    return {p.relative_to(world.root).as_posix(): p.read_bytes() for p in files}


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ("placement: {polcy: {gpus: 1}}", ("placement.polcy", "policy")),
        (
            "placement: {critic: {gpus: 1}}",
            ("placement.critic", "function without kl has no critic", "policy, rollout"),
        ),
        ("placement: {reference: {with: policy}}", ("grpo with a reward function without kl has no reference",)),
        ("placement: {policy: {gpus: 3, ranks: 2}}", ("placement.policy", "multiple of ranks (2)", "3")),
        ("placement: {policy: {gpus: 2}}", ("policy requests 2 gpus", "this machine has 0", "ray_address")),
        ("placement: {policy: {cpus: 3}, reward: {cpus: 2}}", ("policy 3, reward 2", "this machine has 4")),
        ("runtime: {device: cuda}", ("runtime.device cuda needs a GPU, but no GPU is visible here", "auto or cpu")),
        ("runtime: {sequence_parallel: 2}", ("sequence_parallel", "ranks of collocated (1)", "2")),
        ("placement: {collocated: {ranks: 4}}, runtime: {sequence_parallel: 3}", ("collocated (4)", "got 3")),
        ("placement: {policy: {ranks: 2}}, runtime: {ray_address: auto, sequence_parallel: 4}", ("policy (2)", "4")),
    ],
)
def test_refused_at_once_with_the_reason(
    world: World, machine: list[Machine], placed: str, words: tuple[str, ...]
) -> None:
    name = file(world, placed)
    before = contents(world)
    for verb in ("plan", "lock", "run"):
        result = world(verb, name)
        assert result.exit_code == 2, result.stdout
        line = result.stderr.strip()
        assert line.startswith("error: placed.yaml: stages.grpo: ")
        assert "\n" not in line
        assert all(word in line for word in words), line
    assert contents(world) == before
    assert world.json("ls")["runs"] == []


def test_a_model_that_cannot_fit_is_refused_and_one_that_may_not_is_a_warning(
    world: World, machine: list[Machine]
) -> None:
    name = file(world, "placement: collocated")
    machine.append(Machine(4, 2**30))
    result = world("plan", name)
    assert result.exit_code == 2
    needed = "stages.sft: memory: ranks on CPUs need at least 1.3 GiB (main 1 × 1.3 GiB)"
    assert f"{needed}, but this machine has 1.0 GiB" in result.stderr
    full = "steps: 4, batch_size: 9000, runtime: {micro_batch_tokens: 65536}"
    text = RUN.replace("steps: 4", full).replace("HIDDEN", "768").replace("PLACED", "placement: collocated")
    written = world.write("placed.yaml", text)
    machine.append(Machine(4, 4 * 2**30))
    shown = " ".join(world.ok("plan", written).split())
    assert "sft: memory: ranks on CPUs take" in shown  # what is written is taken, and told
    machine.append(Machine(4, 2**40, (Gpu("NVIDIA T4", 2**30),)))
    assert "one rank of collocated needs at least" in world("plan", name).stderr


def test_a_cluster_is_asked_by_the_job(world: World, machine: list[Machine]) -> None:
    placed = "placement: {policy: {gpus: 4, kind: h100}, rollout: {gpus: 12}}, runtime: {ray_address: 10.0.0.1:6379}"
    shown = world.ok("plan", file(world, placed))
    assert "pool policy at 10.0.0.1:6379: 4 ranks, 4 h100: policy, reward" in shown
    assert "pool rollout at 10.0.0.1:6379: 12 ranks, 12 gpus: rollout" in shown
    assert "whose memory is unknown" not in shown
    odd = " ".join(world.ok("plan", file(world, placed.replace("h100", "h1000"))).split())
    assert "grpo: policy requests GPUs of kind h1000, whose memory is unknown, so sizes are not checked" in odd


def test_lag_is_told(world: World, machine: list[Machine]) -> None:
    name = file(world, "placement: {policy: {cpus: 1}, rollout: {cpus: 1}}, lag: {steps: 2}")
    shown = " ".join(world.ok("plan", name).split())
    assert "lag 2: batch t is sampled by the policy after t - 2 steps" in shown
    assert "correction: tis: the policy computes log-probabilities of every response once more" in shown
    assert "the package ray" not in shown
    here = " ".join(world.ok("plan", file(world, "lag: {steps: 0, correction: decoupled}")).split())
    assert "correction: decoupled: the policy computes log-probabilities of every response once more" in here
    assert "lag 0" not in here
    odd = world("plan", file(world, "lag: {steps: 0, correction: bypass}"))
    assert (odd.exit_code, "lag.correction must be tis or decoupled with lag.steps: 0" in odd.stderr) == (2, True)


@pytest.mark.parametrize("command", ["plan", "run", "lock"])
@pytest.mark.parametrize(
    ("placed", "said"),
    [
        ("placement: {policy: {cpus: 1}, rollout: {cpus: 1}}", "pools of several processes need the package ray"),
        ("runtime: {ray_address: 10.0.0.1:6379}", "jobs at 10.0.0.1:6379 need the package ray"),
    ],
    ids=["pools", "cluster"],
)
def test_pools_without_ray_are_refused_before_anything_starts(
    world: World, machine: list[Machine], monkeypatch: pytest.MonkeyPatch, command: str, placed: str, said: str
) -> None:
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: False)
    name, before = file(world, placed), contents(world)
    refused = world(command, name)
    assert refused.exit_code == 2
    assert f"stages.grpo: {said}, which is not installed here; pip install 'posttrain[ray]'" in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert contents(world) == before


def test_scoring_processes_need_no_ray_and_take_no_rank_s_memory(
    world: World, machine: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = world.ok("plan", file(world, "placement: collocated"))
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: False)
    scored = world.ok("plan", file(world, "placement: {reward: {ranks: 4}}"))
    assert "reward: 4 processes score in parallel" in scored
    sizes = [
        [
            line
            for line in shown.splitlines()
            if "micro_batch_tokens" in line or "kv_cache" in line or "object_store" in line
        ]
        for shown in (alone, scored)
    ]
    assert sizes[0] == sizes[1]


def test_what_runs_elsewhere_is_warned_of(
    world: World, machine: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("posttrain.preflight.placements.ray_is_installed", lambda: False)
    monkeypatch.setattr("posttrain.workspace.settings.OpenWorkspace.own_jobs", False)
    shown = " ".join(world.ok("plan", file(world, "placement: {policy: {cpus: 1}, rollout: {cpus: 1}}")).split())
    assert "grpo: pools of several processes need the package ray, which is not installed here" in shown
    world.ok("plan", file(world, "placement: collocated"))


def test_kinds_of_this_machine(world: World, machine: list[Machine]) -> None:
    machine.append(Machine(8, 2**40, (H100, H100)))
    world.ok("plan", file(world, "placement: {policy: {gpus: 2, kind: h100}}"))
    refused = world("plan", file(world, "placement: {policy: {gpus: 2, kind: l40s}}"))
    assert "kind l40s, but this machine has h100" in refused.stderr


def test_one_process_takes_one_line_and_several_a_table(world: World, machine: list[Machine]) -> None:
    shown = world.ok("plan", file(world, "placement: collocated"))
    assert shown.count("memory: about") == 2  # sft and grpo
    assert "resident" not in shown
    shown = world.ok("plan", file(world, "placement: {policy: {ranks: 2}, rollout: {cpus: 1}}"))
    assert "pool policy: 2 ranks: policy, reward" in shown
    assert "resident per rank" in shown
    heading = next(line for line in shown.splitlines() if "pool     role" in line)
    assert heading.split()[-5:] == ["start", "rollout", "reward", "update", "weights"]


def test_the_json_has_pools_and_every_entry(world: World, machine: list[Machine]) -> None:
    planned = world.json("plan", file(world, "placement: {policy: {ranks: 2}, rollout: {cpus: 1}}"))
    init, sft, grpo = planned["stages"]
    assert "residency" not in init
    assert sft["pools"] == [{"pool": "main", "ranks": 1, "roles": ["policy"]}]
    assert [pool["pool"] for pool in grpo["pools"]] == ["policy", "rollout"]
    assert {peak["pool"] for peak in grpo["residency"]["peaks"]} == {"policy", "rollout"}
    assert {"phase", "pool", "role", "part", "bytes", "estimated"} == grpo["residency"]["held"][0].keys()
    params = {stage["name"]: stage["params"] for stage in planned["manifest"]["stages"]}
    assert params["sft"]["placement"] == "collocated"
    assert params["grpo"]["placement"] == {"policy": {"ranks": 2}, "rollout": {"cpus": 1}}


def test_the_registered_models_own_size_counts(world: World, machine: list[Machine], tmp_path: Path) -> None:
    folder = tmp_path / "wide"
    folder.mkdir()
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 60}
    (folder / "config.json").write_text(json.dumps({**sizes, "dtype": "bfloat16", **kind}))
    header = json.dumps({"w": {"dtype": "BF16", "shape": [999_900], "data_offsets": [0, 1_999_800]}}).ljust(192)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(1_999_800))
    raw = RUN.replace("data: {train", f"model: {folder}\ndata: {{train").replace("HIDDEN", "768").replace("PLACED", "")
    name = world.write("wide.yaml", raw.replace("model: init", "model: base"))
    held = world.json("plan", name)["stages"][1]["residency"]["held"]
    assert {h["part"]: h["bytes"] for h in held}["optimizer"] == 8 * 1_000_000


def test_a_lock_made_elsewhere_is_refused_where_it_cannot_run(world: World, machine: list[Machine]) -> None:
    machine.append(Machine(8, 2**40, (H100, H100)))
    world.ok("lock", file(world, "placement: {policy: {gpus: 2}}"), "--out", "elsewhere.lock.json")
    machine.append(Machine(8, 2**40))
    before = contents(world)
    refused = world("run", "elsewhere.lock.json")
    assert refused.exit_code == 2
    assert (
        "elsewhere.lock.json: stages.grpo: placement: policy requests 2 gpus, but this machine has 0" in refused.stderr
    )
    assert contents(world) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("Tesla V100-SXM2-16GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("", ""),
    ],
)
def test_the_kind_of_a_gpu(name: str, kind: str) -> None:
    assert Gpu(name).kind == kind


def test_the_gpus_that_a_job_would_see() -> None:
    answer = "0, GPU-aa11, NVIDIA H100, 81559\n1, GPU-bb22, NVIDIA L40S, 46068\nnoise\n"
    assert [gpu.kind for gpu in visible(answer, {})] == ["H100", "L40S"]
    assert visible(answer, {})[0].memory == 81559 * 2**20
    assert [gpu.kind for gpu in visible(answer, {"CUDA_VISIBLE_DEVICES": "1"})] == ["L40S"]
    assert [gpu.kind for gpu in visible(answer, {"CUDA_VISIBLE_DEVICES": "GPU-bb,0"})] == ["L40S", "H100"]
    assert [gpu.kind for gpu in visible(answer, {"CUDA_VISIBLE_DEVICES": "0,7,1"})] == ["H100"]
    assert visible(answer, {"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert len(visible(None, {"CUDA_VISIBLE_DEVICES": "0"})) == 1  # nobody could be asked: the kind is not known


def test_this_machine_is_what_a_job_would_find() -> None:
    found = machines.this_machine()
    assert found.resources()["CPU"] == found.cpus >= 1
    assert (found.memory or 0) > 2**28
    assert Machine(1, None, (H100, Gpu())).gpu_memory is None
    assert Machine(1, None, (H100, Gpu("x", 5))).gpu_memory == 5


def test_the_devices_that_jobs_are_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machines, "_CUDA_FILES", (f"{tmp_path}/nvidia*",))
    monkeypatch.setattr(machines, "gpu_visible", lambda: True)
    monkeypatch.setattr(
        machines, "_asked", lambda: "0, GPU-aa11, NVIDIA H100, 81559\n1, GPU-bb22, NVIDIA H100, 81559\n"
    )
    for variable in ("CUDA_VISIBLE_DEVICES", "POSTTRAIN_DEVICES"):
        monkeypatch.delenv(variable, raising=False)
    assert machines.local_devices().names == ("GPU-aa11", "GPU-bb22")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert machines.local_devices().names == ("GPU-bb22",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7c1f,0,9")
    assert machines.local_devices().names == ("MIG-7c1f", "GPU-aa11")
    monkeypatch.setenv("POSTTRAIN_DEVICES", "1")
    assert machines.local_devices().names == ("MIG-7c1f",)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(machines.this_machine().gpus) == 1, "plan sees what jobs will have"
    monkeypatch.setattr(machines, "_asked", lambda: None)
    assert machines.local_devices().names == ("0",)
    monkeypatch.setattr(machines, "_CUDA_FILES", ())
    assert machines.local_devices() == Devices(("0",), variable=""), "no list that every such driver reads"


def test_devices_can_be_pretended_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "gpu_visible", lambda: False)
    monkeypatch.delenv("POSTTRAIN_DEVICES", raising=False)
    assert machines.local_devices().names == ()
    monkeypatch.setenv("POSTTRAIN_DEVICES", "3")
    assert machines.local_devices().names == ("0", "1", "2")
    assert machines.this_machine().gpus == ()
    for wrong in ("0", "-1", "two", "1,2", "²"):
        monkeypatch.setenv("POSTTRAIN_DEVICES", wrong)
        with pytest.raises(InputError, match="POSTTRAIN_DEVICES must be a number of devices, at least 1, got"):
            machines.local_devices()


def test_doctor_tells_who_has_the_devices(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said() -> list[str]:
        checks = json.loads(world("doctor", "-o", "json").stdout)
        return [check["finding"] for check in checks if check["name"] == "device locks"]

    monkeypatch.setattr(machines, "gpu_visible", lambda: False)
    monkeypatch.delenv("POSTTRAIN_DEVICES", raising=False)
    assert said() == []
    monkeypatch.setenv("POSTTRAIN_DEVICES", "2")
    monkeypatch.setenv("POSTTRAIN_DEVICE_LOCKS", str(tmp_path))
    taken = take(machines.local_devices(), 1)
    assert taken is not None
    taken.sign({"attempt": "sort-1f3a-sft-1", "user": "ada"})
    assert said() == ["1 of 2 free; 0 is held by sort-1f3a-sft-1 of ada"]
    taken.close()
    assert said() == ["2 of 2 free"]
