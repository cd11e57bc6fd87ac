"""Training jobs as the control side sees them: orders in, results out, one-line failures, a killed job made good."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import latest_checkpoint
from safetensors import SafetensorError
from safetensors.torch import load_file

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.errors import BudgetExceededError, FailureClass, InputError, WorkspaceError
from posttrain.domain.jobs import ANOTHER_RUNS, InputBlob, JobOrder, JobResult, Note, Progress, Span
from posttrain.engine.config import InitModelConfig
from posttrain.engine.roles.learner import DivergedError
from posttrain.jobs import entry
from posttrain.jobs.bodies import training
from posttrain.sandbox.port import RewardError
from posttrain.store.attempts import AttemptFolder
from posttrain.store.blobs import open_blobs
from posttrain.store.trees import put_tree

TINY = InitModelConfig(
    hidden_size=16, intermediate_size=16, layers=1, characters="0123456789Q:sort A", context_length=64
)
ROWS = [{"prompt": f"Q:{i}", "completion": f"A:{i % 3}", "answer": str(i % 3)} for i in range(8)]
REWARD = "def score(completion, answer):\n    return float(len(set(completion)))\n"


class Shop:
    """A store with a base model, and attempt folders."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.blobs = open_blobs(root / "blobs")
        self.inputs: dict[str, InputBlob] = {}
        self.put("data", "".join(json.dumps(row) + "\n" for row in ROWS))
        self.put("reward", REWARD, entry="score", source="reward.py")
        base = self.attempt("base", "init_model", TINY.model_dump(mode="json"), [])
        assert entry.run(str(base.path), training.init_model) == 0
        self.inputs["model"] = InputBlob(put_tree(self.blobs, base.outputs / "model"), "tree", "model:tiny@1")

    def put(self, slot: str, text: str, **meta: str) -> None:
        self.inputs[slot] = InputBlob(self.blobs.put(text.encode()), "file", f"asset:{slot}@1", meta)

    def attempt(
        self, name: str, kind: str, params: dict[str, Any], slots: Sequence[str], **order: Any
    ) -> AttemptFolder:
        folder = AttemptFolder(self.root / name)
        inputs = {slot: self.inputs[slot] for slot in slots}
        cache = str(self.root / "cache")
        folder.write_order(JobOrder(name, kind, 5, params, inputs, self.blobs.url, cache, **order))
        return folder

    def sft(self, name: str, *, params: dict[str, Any] | None = None, **order: Any) -> AttemptFolder:
        options = {"model": "model", "data": "data", "steps": 4, "batch_size": 2, "runtime": {"checkpoint_every": 2}}
        return self.attempt(name, "sft", {**options, **(params or {})}, ["model", "data"], **order)

    def grpo(self, name: str, *, params: dict[str, Any] | None = None, **order: Any) -> AttemptFolder:
        options = {
            "model": "model", "data": "data", "reward": "reward", "steps": 2, "prompts_per_step": 2, "group_size": 2,
            "max_new_tokens": 6, "probe": {"data": "probe", "every": 1, "items": 4},
        }  # fmt: skip
        self.inputs["probe"] = self.inputs["data"]
        slots = ["model", "data", "reward", "probe"]
        return self.attempt(name, "grpo", {**options, **(params or {})}, slots, **order)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("shop"))


def run(attempt: AttemptFolder) -> JobResult:
    assert entry.run(str(attempt.path), training.body) == 0
    result = attempt.read_result()
    assert result is not None
    return result


def model_digest(attempt: AttemptFolder) -> str:
    return digest_bytes((attempt.outputs / "model" / "model.safetensors").read_bytes())


class TestJobs:
    @pytest.mark.slow
    def test_killed_process_resumed_elsewhere_gives_the_same_file(self, shop: Shop) -> None:
        """A real process dies inside a shard of its second checkpoint; another attempt takes up the first."""
        whole = shop.sft("whole")
        assert run(whole).status == "succeeded"
        lost = shop.sft("lost")
        environment = {**os.environ, "POSTTRAIN_CRASHPOINT": "checkpoint.inside_shard@2", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "posttrain.jobs.stage", str(lost.path)]
        killed = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
        assert lost.read_result() is None
        latest = latest_checkpoint(lost)
        assert latest is not None
        assert latest.step == 2
        again = shop.sft("again", resume=put_tree(shop.blobs, latest.path), tokens_inherited=latest.tokens)
        result = run(again)
        assert result.tokens == run(whole).tokens
        assert model_digest(again) == model_digest(whole)
        assert [f.step for f in again.facts()[0] if isinstance(f, Progress)] == [3, 4]

    def test_a_stop_that_was_ordered_is_heard_and_acknowledged(self, shop: Shop) -> None:
        attempt = shop.sft("told")
        attempt.request_stop()
        assert run(attempt).status == "stopped"
        assert attempt.mailbox.acknowledged(1)

    def test_an_attempt_begins_once_whoever_starts_its_job_again(self, shop: Shop) -> None:
        """As a scheduler does that requeues a job: the next attempt resumes, not this one."""
        attempt = shop.sft("requeued")
        attempt.request_stop()
        assert run(attempt).status == "stopped"
        (attempt.path / "result.json").unlink()
        assert entry.run(str(attempt.path), training.body) == ANOTHER_RUNS
        assert attempt.read_result() is None

    @pytest.mark.parametrize(("computed", "saved"), [
        ("float32", "auto"), ("bfloat16", "auto"), ("float32", "bfloat16"), ("bfloat16", "float32"),
    ])  # fmt: skip
    def test_a_model_is_saved_in_the_type_that_its_configuration_names(
        self, shop: Shop, computed: str, saved: str
    ) -> None:
        """And in float32 it holds what the optimiser holds, which bfloat16 has rounded."""
        runtime = {"dtype": computed, "save_dtype": saved}
        attempt = shop.sft(f"{computed}-{saved}", params={"runtime": runtime, "optimizer": {"learning_rate": 1e-3}})
        assert run(attempt).failure is None
        weights = load_file(attempt.outputs / "model" / "model.safetensors")
        written = json.loads((attempt.outputs / "model" / "config.json").read_bytes())["dtype"]
        assert written == (computed if saved == "auto" else saved)
        assert {str(w.dtype) for w in weights.values()} == {f"torch.{written}"}
        exact = all(torch.equal(w, w.bfloat16().to(w.dtype)) for w in weights.values())
        assert exact == (written == "bfloat16")

    def test_sigterm_is_a_stop(self, shop: Shop) -> None:
        attempt, handler = shop.sft("terminated"), signal.getsignal(signal.SIGTERM)

        def terminated(job: entry.Job) -> JobResult:
            os.kill(os.getpid(), signal.SIGTERM)
            return training.body(job)

        assert entry.run(str(attempt.path), terminated) == 0
        result = attempt.read_result()
        assert result is not None
        assert (result.status, result.failure) == ("stopped", None)
        assert latest_checkpoint(attempt) is not None
        assert signal.getsignal(signal.SIGTERM) is handler

    def test_the_end_of_a_phase_is_told_as_soon_as_the_order_wants_it(self, shop: Shop) -> None:
        attempt = shop.sft("phases", phase_seconds=0.0)
        told: list[int] = []

        def steps(job: entry.Job) -> JobResult:
            job.sink(Progress(1, 9, "sft", 10, 0.0))
            for name in ("forward", "backward"):
                job.sink(Span(name, 2, 0.0, 1.0))
                said = attempt.mailbox.summary()
                told.append(said.phases if said else 0)
            return JobResult("succeeded")

        assert entry.run(str(attempt.path), steps) == 0
        assert told == [1, 2]

    def test_grpo_leaves_a_model_that_loads(self, shop: Shop) -> None:
        attempt = shop.grpo("grpo")
        result = run(attempt)
        assert result.failure is None
        assert result.outputs["model"].path == "outputs/model"
        assert {"reward/mean", "probe/accuracy", "response_tokens/mean"} <= result.metrics.keys()
        follower = shop.inputs | {"model": InputBlob(put_tree(shop.blobs, attempt.outputs / "model"), "tree")}
        shop.inputs, before = follower, shop.inputs
        assert run(shop.sft("follower")).status == "succeeded"
        shop.inputs = before

    def test_a_finished_job_does_nothing(self, shop: Shop) -> None:
        attempt = shop.sft("finished", params={"steps": 1})
        first = run(attempt)
        (attempt.path / "job.json").unlink()
        assert run(attempt) == first

    def test_outputs_are_on_the_disk_before_the_result_is(self, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
        attempt = shop.sft("synced", params={"steps": 1})
        synced: list[int] = []
        fsync = os.fsync

        def noted(handle: int) -> None:
            synced.append(os.fstat(handle).st_ino)
            fsync(handle)

        monkeypatch.setattr(os, "fsync", noted)
        assert run(attempt).status == "succeeded"
        result = synced.index((attempt.path / "result.json").stat().st_ino)
        outputs = {path.stat().st_ino for path in (attempt.outputs, *attempt.outputs.rglob("*"))}
        assert len(outputs) > 4
        assert outputs <= set(synced[:result])

    def test_budget(self, shop: Shop) -> None:
        result = run(shop.sft("poor", token_allowance=30))
        assert result.failure is not None
        assert result.failure.kind is FailureClass.BUDGET
        assert 0 < result.tokens <= 30

    @pytest.mark.parametrize(
        ("slot", "content", "params", "says"),
        [
            ("data", "", {}, "asset:data@1 must contain at least one row"),
            ("data", json.dumps({"prompt": "Q"}) + "\n", {}, "asset:data@1 row 1"),
            (
                "data",
                json.dumps({"prompt": "Q", "completion": "1" * 99}) + "\n",
                {},
                "must have at most 64 tokens, got 101",
            ),
            ("data", json.dumps(ROWS[0]) + "\n", {"max_length": 5}, "must have at most 5 tokens, got 7"),
        ],
    )
    def test_bad_data(self, shop: Shop, slot: str, content: str, params: dict[str, Any], says: str) -> None:
        before = dict(shop.inputs)
        shop.put(slot, content)
        result = run(shop.sft(f"bad-{abs(hash(content + says))}", params=params))
        shop.inputs = before
        assert result.failure is not None
        assert result.failure.kind is FailureClass.BAD_INPUT
        assert says in result.failure.message
        assert "\n" not in result.failure.message

    @pytest.mark.parametrize(
        ("reward", "says"),
        [
            ("def score(completion):\n    return 1 / 0\n", "ZeroDivisionError"),
            ("def score(completion):\n    return float('nan')\n", "nan"),
        ],
    )
    def test_bad_reward(self, shop: Shop, reward: str, says: str) -> None:
        before = dict(shop.inputs)
        shop.put("reward", reward, entry="score")
        attempt = shop.grpo(f"bad-reward-{says}")
        result = run(attempt)
        shop.inputs = before
        assert result.failure is not None
        assert result.failure.kind is FailureClass.BAD_INPUT
        assert says in result.failure.message
        assert not list(attempt.checkpoints.glob("*"))

    def test_the_reward_finds_neither_job_nor_store(self, shop: Shop) -> None:
        before, attempt = dict(shop.inputs), shop.root / "curious"
        places = [str(place) for place in (attempt / "job.json", shop.root / "blobs", shop.root / "cache")]
        shop.put("reward", f"import os\ndef score(completion):\n    return sum(map(os.path.exists, {places}))\n")
        result = run(shop.grpo("curious"))
        facts = AttemptFolder(attempt).facts()[0]
        shop.inputs = before
        assert result.failure is None
        exposed = any("read and write" in fact.message for fact in facts if isinstance(fact, Note))
        assert result.metrics["reward/mean"] == (3.0 if exposed else 0.0)

    def test_prompt_beyond_the_context(self, shop: Shop) -> None:
        result = run(shop.grpo("long", params={"max_new_tokens": 63}))
        assert result.failure is not None
        assert "asset:data@1 row 1: prompt must have at most" in result.failure.message


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (InputError("x: must be 1"), FailureClass.BAD_INPUT, "x: must be 1"),
        (BudgetExceededError("spent"), FailureClass.BUDGET, "spent"),
        (DivergedError("nan"), FailureClass.DIVERGED, "nan"),
        (torch.OutOfMemoryError("CUDA"), FailureClass.OUT_OF_MEMORY, "CUDA"),
        (MemoryError(), FailureClass.OUT_OF_MEMORY, "out of memory"),
        (OSError(28, "No space left on device", "f"), FailureClass.DISK_FULL, "cannot write f: No space left"),
        (OSError(30, "Read-only file system", "f"), FailureClass.INFRASTRUCTURE, "cannot write f: Read-only"),
        (RuntimeError("CUDA error: out of memory"), FailureClass.OUT_OF_MEMORY, "CUDA error"),
        (OSError(12, "Cannot allocate memory"), FailureClass.OUT_OF_MEMORY, "Cannot allocate"),
        (RuntimeError("CUDA out of memory. Tried to allocate"), FailureClass.OUT_OF_MEMORY, "CUDA"),
        (KeyError("k"), FailureClass.BUG, "KeyError at"),
    ],
)
def test_failures_are_classified(error: Exception, kind: FailureClass, message: str) -> None:
    try:
        raise error
    except Exception as raised:
        failure = entry.failure_of(raised)
    assert failure.kind is kind
    assert message in failure.message
    assert failure.signature == f"{type(error).__name__}@test_train_job.py:test_failures_are_classified"


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (InputError("x: must be 1, got 'the disk is full'"), FailureClass.BAD_INPUT),
        (ValueError("answer 'No space left on device' is no number"), FailureClass.BUG),
        (RewardError("reward:r: OSError: [Errno 28] No space left on device"), FailureClass.BAD_INPUT),
        (RuntimeError("my shard: No space left on device"), FailureClass.BUG),
        (WorkspaceError("the server said: the disk is full"), FailureClass.INFRASTRUCTURE),
        (caused(WorkspaceError("cannot write f"), OSError(28, "No space")), FailureClass.DISK_FULL),
        (caused(WorkspaceError("cannot write f"), OSError(122, "Quota")), FailureClass.DISK_FULL),
        (sqlite3.OperationalError("database or disk is full"), FailureClass.DISK_FULL),
        (sqlite3.OperationalError("no such table: x"), FailureClass.BUG),
        (SafetensorError("I/O error: No space left on device (os error 28)"), FailureClass.DISK_FULL),
    ],
)
def test_audit_36_only_errors_of_writers_are_a_full_disk(error: Exception, kind: FailureClass) -> None:
    assert entry.failure_of(error).kind is kind


class OutOfMemoryError(Exception):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("the answer 'out of memory' is no number"), FailureClass.BUG),
        (RuntimeError("my cache can't allocate memory"), FailureClass.BUG),
        (ValueError("CUDA out of memory"), FailureClass.BUG),
        (RewardError("CUDA out of memory"), FailureClass.BAD_INPUT),
        (OutOfMemoryError("mine"), FailureClass.BUG),
        (torch.AcceleratorError("CUDA error: out of memory"), FailureClass.OUT_OF_MEMORY),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), FailureClass.OUT_OF_MEMORY),
    ],
)
def test_audit_35_only_errors_of_allocators_are_out_of_memory(error: Exception, kind: FailureClass) -> None:
    assert entry.failure_of(error).kind is kind


def test_audit_35_an_allocation_that_torch_refuses_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    assert entry.failure_of(caught.value).kind is FailureClass.OUT_OF_MEMORY
