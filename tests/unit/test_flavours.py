"""Executors and flavours as users declare them, and what runs where."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from control_bench import RUN, TRAIN_ONLY, Bench, Script, train

from posttrain.app.executors import declare, probes
from posttrain.app.workspace import Workspace
from posttrain.control.decide import nodes_to_avoid
from posttrain.control.reconciler import Reconciler
from posttrain.domain.errors import ConflictError, InfrastructureError, InputError, NotFoundError, trace_in
from posttrain.domain.jobs import NODE_FAILED, Cause, Observation
from posttrain.domain.jobspec import JobRef
from posttrain.domain.placement import Cluster, Flavour
from posttrain.domain.validation import validated
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.store.attempts import AttemptFolder, mailbox_at

LAB: dict[str, Any] = {
    "executors": {"slurm-a": {"kind": "slurm"}, "ray-b": {"kind": "ray", "address": "http://127.0.0.1:1"}},
    "flavours": {
        "h100": {"executor": "slurm-a", "gpus_per_node": 8, "nodes": 4, "memory": "1000GiB", "time_limit": "24h"},
        "l40s": {"executor": "ray-b", "gpus_per_node": 4},
        "small": {"executor": "slurm-a"},
    },
    "default": "small",
}


def lab() -> Cluster:
    return Cluster.model_validate(LAB)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"flavours": {"a": {"executor": "slurm-x"}}}, "flavours.a: executor must be one of executors, got 'slurm-x'"),
        ({"flavours": {"a": {"executor": "slurm-a", "partiton": "gpu"}}}, "flavours.a.partiton"),
        ({"flavours": {"a": {"executor": "slurm-a", "gpus": 2}}}, "flavours.a: gpus must be named gpus_per_node"),
        ({"flavours": {"a": {"executor": "slurm-a", "partition": "gpu; rm -rf"}}}, "flavours.a.partition"),
        ({"flavours": {"A B": {"executor": "slurm-a"}}}, "A B"),
        ({"default": "h200"}, "default must be one of flavours, got 'h200'"),
        ({"executors": {"slurm-a": {"kind": "slurm", "settle": "0s"}}}, "executors.slurm-a.settle"),
        ({"executors": {"ray-b": {"kind": "ray", "address": "http://user:key@host"}}}, "executors.ray-b.address"),
        ({"flavours": {"a": {"executor": "ray-b", "partition": "x"}}}, "flavours.a: partition must be left out"),
        ({"flavours": {"a": {"executor": "ray-b", "time_limit": "1h"}}}, "flavours.a: time_limit must be left out"),
        ({"flavours": {"a": {"executor": "slurm-a", "image": f"r.io/a@sha256:{'0' * 64}"}}}, "image needs `container`"),
        ({"executors": {"ray-b": {"kind": "ray"}}}, "executors.ray-b: address must be that of Ray's dashboard"),
        ({"executors": {"slurm-a": {"kind": "slurm", "python": []}}}, "must have at least one word"),
        ({"executors": {"slurm-a": {"kind": "slurm", "address": "http://a"}}}, "address must be left out"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as refused:
        validated(Cluster, {**LAB, **change}, "executors.yaml")
    assert str(refused.value).startswith("executors.yaml: ")
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_stage_runs_on_the_flavour_that_its_placement_names() -> None:
    def of(placement: Any) -> str:
        return lab().flavour_of("grpo", {"placement": placement} if placement else {})

    assert of(None) == "small"
    assert of({"collocated": {"gpus": 8, "kind": "h100"}}) == "h100"
    assert of({"policy": {"gpus": 8, "kind": "h100"}, "rollout": {"with": "policy"}}) == "h100"
    assert of({"collocated": {"cpus": 2, "kind": "small"}}) == "small"
    with pytest.raises(InputError, match=r"kind must be a flavour, got 'h200' \(did you mean 'h100'\?\)"):
        of({"collocated": {"gpus": 1, "kind": "h200"}})
    for other in ("l40s", "a100"):
        with pytest.raises(InputError, match=r"stages\.grpo: placement: one job runs on one flavour, got .*h100"):
            of({"policy": {"gpus": 8, "kind": "h100"}, "rollout": {"gpus": 4, "kind": other}})


@pytest.mark.parametrize(
    ("devices", "pods"), [(0, (1, 0)), (1, (1, 1)), (8, (1, 8)), (16, (2, 8)), (32, (4, 8)), (12, None), (40, None)]
)
def test_a_gang_has_as_many_nodes_as_its_devices_need(devices: int, pods: tuple[int, int] | None) -> None:
    flavour = lab().flavours["h100"]
    if pods is None:
        with pytest.raises(InputError, match=rf"a job on flavour h100 must have .* GPUs .* got {devices}; request"):
            flavour.gang("h100", devices, {})
        return
    gang = flavour.gang("h100", devices, {})
    assert (gang.min, gang.gpus) == pods
    assert gang.kind == ("h100" if devices else "")
    assert gang.memory == 1000 << 30


def test_a_job_on_nodes_without_gpus_has_as_many_as_its_cores_need() -> None:
    flavour = Flavour(executor="slurm-a", cpus=4, nodes=2)
    gangs = {cpus: {"placement": {"collocated": {"cpus": cpus, "kind": "wide"}}} for cpus in (1, 4, 8, 6, 12)}
    assert [flavour.gang("wide", 0, gangs[cpus]).min for cpus in (1, 4, 8)] == [1, 1, 2]
    for cpus, how in ((6, "a multiple of 4"), (12, "at most 8")):
        with pytest.raises(InputError, match=rf"a job on flavour wide must have {how} cpus .* got {cpus}; request"):
            flavour.gang("wide", 0, gangs[cpus])


def workspace_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    monkeypatch.setenv("POSTTRAIN_STORE", "s3://somewhere/store")
    monkeypatch.setattr("posttrain.store.blobs.ObjectBlobs.probe", lambda self: None)
    monkeypatch.setattr("posttrain.app.workspace.join_store", lambda workspace, blobs: None)
    monkeypatch.setattr("posttrain.app.workspace.checked_url", lambda url: url)
    return Workspace(folder / ".posttrain", create=True, channel="s3://somewhere/mail")


def test_what_is_declared_is_added_to_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "executors.yaml"
    file.write_text(yaml.safe_dump(LAB, sort_keys=False))
    workspace = workspace_in(tmp_path, monkeypatch)
    declare(workspace, file)
    workspace = Workspace(tmp_path / ".posttrain")
    assert workspace.jobs.cluster == lab()
    assert [one.name for one in workspace.jobs.executors] == ["local", "ray-b", "slurm-a"]
    file.write_text(yaml.safe_dump({"flavours": {"big": {"executor": "slurm-a", "partition": "big"}}}))
    declare(workspace, file)
    workspace = Workspace(tmp_path / ".posttrain")
    assert set(workspace.jobs.cluster.flavours) == {"h100", "l40s", "small", "big"}
    assert not workspace.is_proven("big")
    workspace.record_proof("big", succeeded=True)
    workspace.record_proof("small", succeeded=True)
    assert workspace.is_proven("big")
    file.write_text(yaml.safe_dump({"flavours": {"big": {"executor": "slurm-a", "partition": "other"}}}))
    declare(workspace, file)
    workspace = Workspace(tmp_path / ".posttrain")
    assert (workspace.is_proven("big"), workspace.is_proven("small")) == (False, True), "a proof is of a declaration"
    file.write_text("default: big")
    monkeypatch.setattr("posttrain.app.executors.runs_with_jobs", lambda workspace: ["sort-1"])
    with pytest.raises(ConflictError, match=r"default: must remain small while .* jobs \(sort-1\), got big"):
        declare(workspace, file)
    wrong = {
        "[]": "executors.yaml",
        "executors: {x: {kind: pbs}}": "kind must be slurm, ray, got 'pbs'",
        "executors: {local: {kind: slurm}}": "the workspace has another executor local",
    }
    for content, says in wrong.items():
        file.write_text(content)
        with pytest.raises(InputError, match=says):
            declare(workspace, file)
    assert Workspace(tmp_path / ".posttrain").jobs.cluster == workspace.jobs.cluster
    with pytest.raises(NotFoundError, match=r"there is no flavour or executor 'h200' \(did you mean 'h100'\?\)"):
        next(probes(workspace, "h200", 1.0))


def test_a_probe_that_only_waits_takes_no_proof_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "executors.yaml"
    file.write_text(yaml.safe_dump(LAB, sort_keys=False))
    declare(workspace_in(tmp_path, monkeypatch), file)
    workspace = Workspace(tmp_path / ".posttrain")
    workspace.record_proof("small", succeeded=True)
    queue = FakeExecutor()
    queue.name = "slurm-a"  # type: ignore[misc]
    workspace.jobs = replace(workspace.jobs, declared=lambda: (lab(), {"slurm-a": queue, "ray-b": FakeExecutor()}))
    monkeypatch.setattr("posttrain.app.executors.mailbox_at", lambda url: mailbox_at((tmp_path / "mail").as_uri()))
    monkeypatch.setattr("posttrain.app.executors._LOOK_SECONDS", 0.0)
    [probed] = probes(workspace, "small", 0.0)
    assert probed.trouble == "no report within 0 s: its job is starting"
    assert workspace.is_proven("small")


def test_a_workspace_in_a_folder_refuses_executors_that_could_not_reach_it(tmp_path: Path) -> None:
    file = tmp_path / "executors.yaml"
    file.write_text(yaml.safe_dump(LAB, sort_keys=False))
    with pytest.raises(InputError, match=r"executor slurm-a, ray-b runs jobs on other machines.*--mailboxes s3://"):
        declare(Workspace(tmp_path / ".posttrain", create=True), file)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "cuda_out_of_memory"),
        ("RuntimeError: CUDA error: out of memory", "cuda_out_of_memory"),
        ("OSError: [Errno 28] No space left on device", "disk_full"),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12", "nccl"),
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "gpu_fault"),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "gpu_fault"),
        ("No space left on device\n…\nncclSystemError: System call failed", "nccl"),
        ("step 12 of 100", None),
    ],
)
def test_failures_that_logs_report(text: str, name: str | None) -> None:
    found = trace_in(text)
    assert (found.name if found else None) == name


def says(text: str, code: int = 1) -> Script:
    """A job that ends without a result, with this log."""

    def job(folder: AttemptFolder) -> int:
        folder.log.write_text(text)
        return code

    return job


NCCL = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=12"


@pytest.mark.parametrize(
    ("scripts", "state", "reason", "attempts"),
    [
        ([says("CUDA out of memory")], "failed", "JobFailed:out_of_memory", 1),
        ([says("No space left on device")], "failed", "JobFailed:disk_full", 1),
        ([says(NCCL), train()], "succeeded", "Succeeded", 2),
        ([says(NCCL)], "failed", "CircuitOpen", 2),
        ([says("Segmentation fault", -signal.SIGSEGV)], "failed", "CircuitOpen", 2),
        ([says("", NODE_FAILED), says("", NODE_FAILED), train()], "succeeded", "Succeeded", 3),
        ([says("NVRM: Xid 79"), says("NVRM: Xid 79"), train()], "succeeded", "Succeeded", 3),
        ([says("a sample: No space left on device", -signal.SIGKILL), train()], "succeeded", "Succeeded", 2),
    ],
)
def test_the_log_of_a_job_without_a_result_decides(
    bench: Bench, scripts: list[Script], state: str, reason: str, attempts: int
) -> None:
    bench.scripts["sft"] = list(scripts)
    run_id = bench.submit(**TRAIN_ONLY, budget={"attempts": 5})
    run = bench.drive(run_id)
    assert (run.state, bench.stage(run_id, "sft").reason) == (state, reason)
    assert len(bench.ledger.attempts(run_id)) == attempts


def test_a_node_that_loses_two_jobs_is_avoided(bench: Bench) -> None:
    bench.executor.avoids = True
    bench.scripts["sft"] = [None, None, None, train()]
    run_id = bench.submit(**TRAIN_ONLY, budget={"attempts": 5})
    for number in (1, 2, 3):
        while f"{run_id}-sft-{number}" not in [one.name for one in bench.executor.launched]:
            bench.clock.sleep(1.0)
            bench.reconciler.step(run_id)
        bench.reconciler.tick(run_id)
        bench.executor.lose(f"{run_id}-sft-{number}", Cause.NODE_LOST)
    assert bench.drive(run_id).state == "succeeded"
    assert [one.avoid for one in bench.executor.launched] == [(), (), ("somewhere",), ("somewhere",)]
    assert nodes_to_avoid(bench.ledger.attempts(run_id)[:1]) == ()


class Elsewhere(FakeExecutor):
    """An executor of other machines, whose answers can be held back."""

    name: ClassVar[str] = "slurm-a"
    remote: ClassVar[bool] = True

    def __init__(self, *words: Any) -> None:
        super().__init__(*words)
        self.answers, self.asked_by = threading.Event(), list[str]()

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        self.asked_by.append(threading.current_thread().name)
        if not self.answers.wait(30 if threading.current_thread() is not threading.main_thread() else 0):
            raise InfrastructureError("executor slurm-a did not answer within 30 s")
        return super().observe(jobs)


def test_an_executor_that_does_not_answer_delays_no_job_of_another(bench: Bench) -> None:
    far = Elsewhere(lambda spec: None, bench.clock.now)
    cluster = lab().model_copy(update={"default": None})
    bench.jobs = replace(bench.jobs, declared=lambda: (cluster, {"slurm-a": far}))
    bench.reconciler = Reconciler(bench.stores, bench.jobs, "here")
    bench.scripts["sft"] = [train()]
    placed = {"sft": {**RUN["stages"]["sft"], "placement": {"collocated": {"gpus": 8, "kind": "h100"}}}}
    away = bench.submit(**{**TRAIN_ONLY, "stages": placed})
    far.answers.set()
    while not far.launched:
        bench.clock.sleep(1.0)
        bench.reconciler.step(away)
    [spec] = far.launched
    assert (spec.gang[0].gpus, spec.gang[0].kind) == (8, "h100")
    assert bench.ledger.attempts(away)[0].executor == "slurm-a"
    far.answers.clear()
    far.asked_by.clear()
    here = bench.submit(**TRAIN_ONLY, name="other", seed=2)
    begun = time.monotonic()
    while bench.ledger.run(here).state != "succeeded":
        bench.clock.sleep(1.0)
        for run_id in (away, here):
            bench.reconciler.step(run_id)
    assert time.monotonic() - begun < 20, "nothing waited for the answer"
    assert any(name != "MainThread" for name in far.asked_by)
    far.answers.set()
