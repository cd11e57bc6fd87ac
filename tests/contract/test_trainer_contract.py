"""What every trainer honours, whatever engine is behind it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import posttrain
from posttrain.domain.canonical import digest_json, is_digest
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobOrder, JobResult
from posttrain.domain.kinds import RowNeeds
from posttrain.execution.ports import Trainer
from posttrain.execution.trainers import native
from posttrain.execution.trainers.fake import FakeTrainer
from posttrain.execution.trainers.native import NativeTrainer
from posttrain.store.attempts import AttemptFolder

STAGES: list[tuple[str, dict[str, Any]]] = [
    ("sft", {"model": "base", "data": "train", "steps": 3}),
    ("grpo", {"model": "sft", "data": "train", "reward": "exact", "steps": 3}),
]


@pytest.fixture(params=[NativeTrainer(), FakeTrainer()], ids=lambda trainer: trainer.name)
def trainer(request: pytest.FixtureRequest) -> Trainer:
    made: Trainer = request.param
    return made


@pytest.mark.parametrize(("kind", "params"), STAGES)
def test_a_checked_stage_says_what_it_needs_and_leaves(trainer: Trainer, kind: str, params: dict[str, Any]) -> None:
    contract = trainer.check(kind, params)
    wanted = {"model": ("model", params["model"]), "data": ("dataset", "train")}
    assert wanted.items() <= contract.inputs.items()
    assert contract.outputs == {"model": "tree"}
    assert contract.work["steps"] == 3
    assert all(contract.inputs[slot][0] == "dataset" for slot in contract.rows)
    json.dumps(dict(contract.params))  # it goes into the manifest


def test_what_the_native_stages_ask_of_their_rows() -> None:
    probe, suite = {"data": "d", "items": 9}, {"data": "d", "max_new_tokens": 5}
    check = NativeTrainer().check
    assert check("sft", {**STAGES[0][1], "max_length": 40}).rows == {"data": RowNeeds(learn=True, max_length=40)}
    assert check("grpo", {**STAGES[1][1], "max_new_tokens": 7, "probe": probe}).rows == {
        "data": RowNeeds(reserve=7),
        "probe": RowNeeds(reserve=7, answer=True, first=9),
    }
    assert check("evaluate", {"model": "sft", "suites": {"h": suite}}).rows == {
        "suites.h": RowNeeds(reserve=5, answer=True, distinct=True)
    }


@pytest.mark.parametrize(("kind", "params"), STAGES)
def test_what_inputs_are_called_is_not_in_the_parameters(trainer: Trainer, kind: str, params: dict[str, Any]) -> None:
    renamed = {**params, "data": "other", "model": "another"}
    first, second = trainer.check(kind, params), trainer.check(kind, renamed)
    assert digest_json(dict(first.params)) == digest_json(dict(second.params))
    assert first.inputs != second.inputs


@pytest.mark.parametrize(("kind", "params"), STAGES)
def test_normalised_parameters_are_a_fixed_point(trainer: Trainer, kind: str, params: dict[str, Any]) -> None:
    once = dict(trainer.check(kind, params).params)
    assert dict(trainer.check(kind, once).params) == once


def test_parameters_that_cannot_be_locked_are_refused(trainer: Trainer) -> None:
    with pytest.raises(InputError, match="sft"):
        trainer.check("sft", {"model": "base", "data": "train", "steps": float("nan")})


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ({"extract": "(["}, r"suites.h.extract: must be a regular expression, got '\(\['"),
        ({"extract": "A: .*"}, r"suites.h.extract: must have a group around the answer, got 'A: \.\*'"),
        ({"temperature": 0.7}, r"suites.h: temperature needs samples >= 1, got 0.7"),
        ({"samples": 2, "pass_at": [3]}, r"suites.h: every k of pass_at must be <= samples \(2\), got 3"),
        ({"top_p": 0.9}, r"suites.h: top_p needs samples >= 1, got 0.9 with samples: 0; set samples"),
        ({"top_k": 5}, r"suites.h: top_k needs samples >= 1, got 5"),
        ({"min_p": 0.1}, r"suites.h: min_p needs samples >= 1, got 0.1"),
        ({"samples": 2, "top_p": 0}, r"suites.h.top_p: must be more than 0, got 0"),
        ({"samples": 2, "top_p": 1.5}, r"suites.h.top_p: must be at most 1, got 1.5"),
        ({"samples": 2, "top_k": -1}, r"suites.h.top_k: must be at least 0, got -1"),
        ({"samples": 2, "min_p": 1}, r"suites.h.min_p: must be less than 1, got 1"),
        ({"stop": "</answer>"}, r"suites.h.stop: must be a list, got '</answer>'"),
        ({"until": ["Q:"]}, r"suites.h.until: unknown key \(did you mean 'stop'\?\)"),
    ],
)
def test_an_evaluation_that_cannot_mean_what_it_says_is_refused(suite: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        NativeTrainer().check("evaluate", {"model": "sft", "suites": {"h": {"data": "d", **suite}}})


GRPO = {"data": "d", "reward": "r", "steps": 1}


@pytest.mark.parametrize(
    ("stop", "says"),
    [
        ("</answer>", "stop: must be a list, got '</answer>'"),
        ([1], "stop.0: must be text, got 1"),
        ([""], r"stop: must contain strings of 1 to 256 characters, got 0: ''; cut or remove it"),
        (["ok", "x" * 257], r"stop: must contain strings of 1 to 256 characters, got 257: 'x{20}'; cut or remove it"),
        (["x"] * 17, "stop: must be at most 16 strings, got 17; leave some out"),
        (["a\ufffd"], "stop: must contain text, got 'a\ufffd', of which a part stands for no character"),
        ({"a": 1}, "stop: must be a list"),
        (None, "stop: must be a list"),
    ],
)
def test_bad_stop_strings_are_refused(stop: Any, says: str) -> None:
    flow = {key: value for key, value in GRPO.items() if key != "reward"} | {"recipe": "flow:Flow"}
    for kind, params in (("grpo", GRPO), ("dataflow", flow)):
        with pytest.raises(InputError, match=f"^{kind}: {says}") as caught:
            NativeTrainer().check(kind, {**params, "stop": stop})
        assert "\n" not in str(caught.value)
    with pytest.raises(InputError, match=f"^evaluate: suites.h.{says}"):
        NativeTrainer().check("evaluate", {"model": "sft", "suites": {"h": {"data": "d", "stop": stop}}})


def test_what_is_not_asked_for_is_in_no_parameters() -> None:
    """So that a request has the digest that it had before these could be asked for."""
    suite = {"data": "d", "samples": 2}
    unsaid = {"stop": [], "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for more in ({}, unsaid):
        params = NativeTrainer().check("evaluate", {"model": "m", "suites": {"h": suite | more}}).params
        assert unsaid.keys().isdisjoint(params["suites"]["h"])
    assert "stop" not in NativeTrainer().check("grpo", {**GRPO, "stop": []}).params
    asked = {"stop": ["a"], "top_k": 3, "top_p": 0.5, "min_p": 0.1}
    params = NativeTrainer().check("evaluate", {"model": "m", "suites": {"h": suite | asked}}).params
    assert params["suites"]["h"].items() >= asked.items()
    assert NativeTrainer().check("grpo", {**GRPO, "stop": ["a", "b"]}).params["stop"] == ["a", "b"]


@pytest.mark.parametrize("place", ["", "probe."])
@pytest.mark.parametrize("key", ["top_p", "top_k", "min_p"])
def test_training_is_told_why_it_samples_from_the_whole_distribution(key: str, place: str) -> None:
    params = {**GRPO, "probe": {"data": "d", key: 0.9}} if place else {**GRPO, key: 0.9}
    says = f"^grpo: {place}{key}: unknown key here: only suites with samples have it; training samples the full distrib"
    with pytest.raises(InputError, match=says) as caught:
        NativeTrainer().check("grpo", params)
    assert "\n" not in str(caught.value)


def test_a_probe_that_reads_nothing_is_refused() -> None:
    params = {"data": "d", "reward": "r", "steps": 1, "probe": {"data": "d", "extract": "(["}}
    with pytest.raises(InputError, match=r"probe.extract: must be a regular expression"):
        NativeTrainer().check("grpo", params)


@pytest.mark.parametrize("key", ["checkpoint_every", "micro_batch_tokens"])
def test_an_evaluation_refuses_settings_of_training(key: str) -> None:
    params = {"model": "sft", "suites": {"h": {"data": "d"}}, "runtime": {key: 8}}
    with pytest.raises(InputError, match=f"runtime.{key}: unknown key"):
        NativeTrainer().check("evaluate", params)


def test_the_code_digest_is_stable(trainer: Trainer) -> None:
    assert is_digest(trainer.code_digest())
    assert trainer.code_digest() == trainer.code_digest()


def test_compiling_is_pure_and_collecting_waits_for_the_word(trainer: Trainer, tmp_path: Path) -> None:
    params = dict(trainer.check(*STAGES[0]).params)
    order = JobOrder("r-sft-1", "sft", 7, params, {}, "file:///nowhere", str(tmp_path / "cache"))
    folder = AttemptFolder(tmp_path / "attempt")
    spec = trainer.compile(order)
    assert spec == trainer.compile(order)
    assert not folder.path.exists()
    folder.write_order(order)
    assert trainer.collect(folder) is None
    result = JobResult("succeeded", {}, {"loss": 1.0}, 5)
    folder.write_result(result)
    assert trainer.collect(folder) == result


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """The native trainer's digest, made afresh."""

    def fresh() -> str:
        native._sources.cache_clear()
        return NativeTrainer().code_digest()

    yield fresh
    monkeypatch.undo()
    native._sources.cache_clear()


def test_what_decides_results_is_in_the_code_digest_and_other_sources_are_not(
    digested: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here, copy = Path(posttrain.__path__[0]), tmp_path / "posttrain"
    shutil.copytree(here, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = digested()
    monkeypatch.setattr(native, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(copy)]))
    assert digested() == before
    with (copy / "cli" / "__init__.py").open("a") as file:
        file.write("# a word\n")
    assert digested() == before
    with (copy / "engine" / "algorithms" / "losses.py").open("a") as file:
        file.write("# a word\n")
    assert digested() != before


@pytest.mark.parametrize("library", ["torch", "transformers", "jinja2", "pyarrow", "tokenizers"])
def test_a_library_that_decides_results_is_in_the_code_digest(
    library: str, digested: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, version = digested(), native._version
    monkeypatch.setattr(native, "_version", lambda name: "another" if name == library else version(name))
    assert digested() != before


@pytest.mark.parametrize("fact", ["machine", "python_version"])
def test_the_platform_is_in_the_code_digest(
    fact: str, digested: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digested()
    monkeypatch.setattr(f"platform.{fact}", lambda: "another")
    assert digested() != before


def test_what_settles_an_automatic_device_is_in_the_code_digest(
    digested: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`auto` means bf16 on a GPU and fp32 without: the same parameters, other results."""
    for name in native._CHOSEN_BY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native, "_DEVICE_FILES", (f"{tmp_path}/nvidia[0-9]*",))
    without = digested()
    (tmp_path / "nvidiactl").touch()
    assert digested() == without
    (tmp_path / "nvidia0").touch()
    visible = digested()
    assert visible != without
    assert native.gpu_visible()
    for chosen in ("1", "0,1", "GPU-5ebe", "MIG-7c1f"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert digested() == visible
    for hidden in ("", "-1", "none"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert digested() != visible
        assert not native.gpu_visible(), "jobs then compute on the CPU, side by side"
    (tmp_path / "nvidia0").unlink()
    assert digested() == without
    assert not native.gpu_visible()


def test_digesting_needs_no_torch() -> None:
    program = (
        "import sys; from posttrain.execution.trainers.native import NativeTrainer; NativeTrainer().code_digest();"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300, check=False).returncode == 0


def test_the_native_trainer_passes_thread_settings_before_torch_is_imported(tmp_path: Path) -> None:
    params = dict(NativeTrainer().check("sft", {"data": "train", "steps": 1, "runtime": {"threads": 3}}).params)
    order = JobOrder("r-sft-1", "sft", 7, params, {}, "file:///nowhere", str(tmp_path))
    environment = NativeTrainer().compile(order).environment
    assert (environment["OMP_NUM_THREADS"], environment["OMP_WAIT_POLICY"]) == ("3", "passive")
