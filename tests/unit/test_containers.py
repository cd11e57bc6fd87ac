"""Jobs in containers, without a podman: what it is asked for, and what is believed of such a job's folder."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from server_bench import KEY, ServerBench, attempt_with_access, granting, served

import podman_image
from posttrain.app.workspace import init_workspace
from posttrain.control import launch
from posttrain.domain.errors import InputError, NotFoundError
from posttrain.domain.jobs import Accepted, Exists, JobOrder, JobState
from posttrain.domain.jobspec import JobRef, JobSpec, PodGroup
from posttrain.execution.executors.fake import FakeExecutor
from posttrain.execution.executors.local import containers
from posttrain.execution.executors.local.containers import fetched
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.server.connections import Door
from posttrain.server.service import Bind, configured
from posttrain.store.attempts import AttemptFolder
from posttrain.store.backends.served import ServedBlobs
from posttrain.store.retries import JobAccess, read_access

IMAGE = f"localhost/train@sha256:{'a1' * 32}"
SECRET = "swordfish"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of an attempt, on a machine with a podman."""
    monkeypatch.setattr(containers, "trouble", lambda: "")
    monkeypatch.setattr(containers, "_profile", lambda: {"syscalls": []})
    made = tmp_path / "workspace" / "runs" / "r" / "s" / "001"
    made.mkdir(parents=True)
    (made / "supervisor.json").write_text("{}")
    order = {"name": "r-s-1", "store_url": (tmp_path / "workspace" / "blobs").as_uri(), "served": False}
    (made / "job.json").write_text(json.dumps(order))
    return made


def asked(folder: Path, **words: Any) -> JobSpec:
    return JobSpec("r-s-1", folder.as_uri(), "posttrain.jobs.stage", image=IMAGE, **words)


def spec_of(folder: Path, request: JobSpec) -> dict[str, Any]:
    return {
        **{"name": request.name, "image": request.image, "module": request.module, "secrets": list(request.secrets)},
        **{"environment": dict(request.environment), containers.SPEC: containers.contained(request, folder)},
    }


def command(folder: Path, **words: Any) -> list[str]:
    return containers.command(folder, spec_of(folder, asked(folder, **words)))


def test_a_container_has_what_its_job_needs_and_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    words = command(folder, environment={"A": "b"}, secrets=("HF_TOKEN",))
    for wanted in (
        *("--read-only", "--pull=never", "--image-volume=ignore", "--no-healthcheck", "--read-only-tmpfs=false"),
        *("--oom-score-adj=1000", "--env=NVIDIA_VISIBLE_DEVICES=void", "--runtime=runc"),
        *("--cap-drop=all", "--security-opt=no-new-privileges"),
        *("--network=none", "--http-proxy=false", "--env=A=b", "--env=HF_TOKEN", "--umask=0077"),
        f"--security-opt=seccomp={folder}/seccomp.json",
    ):
        assert wanted in words, wanted
    assert SECRET not in " ".join(words), "a command line is read by everybody"
    assert words[-6:] == [IMAGE, "-s", "-P", "-m", "posttrain.jobs.stage", str(folder)]
    mounts = [word.removeprefix("--mount=type=bind,") for word in words if word.startswith("--mount=")]
    writable = [mount for mount in mounts if mount.endswith("ro=false")]
    assert writable == [f"source={folder},destination={folder},ro=false"]
    store = folder.parents[3] / "blobs"
    assert f"source={store},destination={store},ro=true" in mounts
    assert f"source=/dev/null,destination={folder}/supervisor.json,ro=true" in mounts
    assert not [word for word in words if word.startswith(("--device", "--privileged", "--volume"))]


def test_a_container_of_a_server_sees_a_socket_and_no_store(folder: Path) -> None:
    order = json.loads((folder / "job.json").read_text())
    (folder / "job.json").write_text(json.dumps({**order, "store_url": "", "served": True}))
    mounts = [word for word in command(folder) if word.startswith("--mount=")]
    root = folder.parents[3]
    assert f"--mount=type=bind,source={root}/sockets,destination=/run/posttrain,ro=true" in mounts
    assert not [mount for mount in mounts if "blobs" in mount or f"source={root}," in mount]


def test_containers_of_two_workspaces_and_of_a_copy_never_have_one_name(folder: Path) -> None:
    """A run of one file has the same id in both, and a copy the same digits."""
    made = [containers.contained(asked(folder, labels={"workspace": word}), folder) for word in ("a1", "b2", "a1")]
    names = [box["name"] for box in made]
    assert [name.rsplit("-", 1)[0] for name in names] == ["r-s-1-a1", "r-s-1-b2", "r-s-1-a1"]
    assert len(set(names)) == 3


def limited(folder: Path, found: list[str], **words: Any) -> set[str]:
    spec = spec_of(folder, asked(folder, **words))
    spec[containers.SPEC]["limits"] = found
    starts = ("--memory", "--pids-limit")
    return {word for word in containers.command(folder, spec) if word.startswith(starts)}


def test_a_job_has_the_memory_that_it_asks_for_and_no_swap(folder: Path) -> None:
    """One that says nothing, nine tenths of the machine's."""
    gang = (PodGroup(memory=5 << 30),)
    wanted = {f"--memory={5 << 30}", f"--memory-swap={5 << 30}", "--pids-limit=16384"}
    assert limited(folder, ["memory", "pids"], gang=gang) == wanted
    share = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * 0.9)
    assert limited(folder, ["memory"]) == {f"--memory={share}", f"--memory-swap={share}"}
    assert limited(folder, []) == set(), "and its log says so"


def test_podman_ends_a_job_whose_time_is_over_though_nobody_is_left(folder: Path) -> None:
    spec = spec_of(folder, asked(folder)) | {"max_seconds": 100.5, "grace_seconds": 10.0}
    assert "--timeout=170" in containers.command(folder, spec)
    assert not [word for word in command(folder) if word.startswith("--timeout")]


def test_a_container_has_the_devices_that_its_supervisor_locked(folder: Path) -> None:
    spec = spec_of(folder, asked(folder)) | {"taken": ["GPU-1", "GPU-2"]}
    found = [word for word in containers.command(folder, spec) if word.startswith("--device")]
    assert found == ["--device=nvidia.com/gpu=GPU-1", "--device=nvidia.com/gpu=GPU-2"]


def test_a_store_that_is_no_folder_is_refused_without_a_server(folder: Path) -> None:
    order = json.loads((folder / "job.json").read_text())
    for other in ({"store_url": "s3://bucket"}, {"channel": "s3://bucket/channels"}):
        (folder / "job.json").write_text(json.dumps({**order, **other}))
        with pytest.raises(InputError, match="only through a server; run posttrain serve"):
            containers.contained(asked(folder), folder)


def test_podmans_profile_is_taken_without_links_devices_and_pipes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["read", "clone", "clone3", "mount", "symlink"], "action": "SCMP_ACT_ALLOW", "args": []},
        {"names": ["mknod", "mknodat"], "action": "SCMP_ACT_ALLOW", "args": []},
    ]}  # fmt: skip
    (tmp_path / "seccomp.json").write_text(json.dumps(own))
    monkeypatch.setattr(containers, "_PROFILES", (tmp_path / "none.json", tmp_path / "seccomp.json"))
    found = containers._profile()
    assert found is not None
    allowed = [name for rule in found["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW" for name in rule["names"]]
    assert allowed == ["read", "clone", "renameat2"]
    flagged = {rule["names"][0]: rule["args"] for rule in found["syscalls"] if rule["args"]}
    namespaces, leaves_a_device = flagged["clone"], flagged["renameat2"]
    masked = {"op": "SCMP_CMP_MASKED_EQ", "valueTwo": 0}
    assert namespaces == [{"index": 0, "value": 0x7E020000, **masked}]
    assert leaves_a_device == [{"index": 4, "value": 4, **masked}]
    denied = [name for rule in found["syscalls"] if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]]
    assert {"symlink", "symlinkat", "mknod", "mknodat", "io_uring_setup"} <= set(denied)


# --- what is believed of the folder -----------------------------------------------------------------------------------


def test_what_a_job_says_of_its_end_is_believed_of_its_supervisor_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it is lost, only when podman says that its container is gone."""
    executor, job, gone = LocalExecutor(images=True), JobRef("r-s-1", folder.as_uri()), False
    monkeypatch.setattr(containers, "gone", lambda box: gone)
    box = containers.contained(asked(folder), folder)
    (folder / "spec.json").write_text(json.dumps({containers.SPEC: box}))
    (folder / "supervisor.json").write_text(json.dumps({"pid": os.getpid(), "identity": ""}))
    (folder / "supervisor.lock").touch()
    for forged in ('{"exit_code": 0, "seconds": 0.0}', '{"exit_code": 0, "word": "x"}', "[]", "{", '"word"'):
        (folder / "exit.json").write_text(forged)
        [seen] = executor.observe([job])
        assert seen.state is JobState.RUNNING
        assert f"podman does not report that container {box['name']} has ended" in seen.detail
    gone = True
    (folder / "cache" / "deep").mkdir(parents=True)
    assert executor.observe([job])[0].state is JobState.LOST
    assert not (folder / "cache").exists(), "nobody else removes it"
    (folder / "exit.json").write_text(json.dumps({"exit_code": 3, "seconds": 99.0, "word": box["word"]}))
    assert executor.observe([job])[0].exit_code == 3


def test_a_copy_of_a_folder_ends_no_container(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(containers, "gone", lambda box: pytest.fail("it is another's"))
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "spec.json").write_text(json.dumps({containers.SPEC: containers.contained(asked(folder), folder)}))
    (copy / "supervisor.json").write_text(json.dumps({"pid": os.getpid(), "identity": ""}))
    (copy / "supervisor.lock").touch()
    assert LocalExecutor(images=True).observe([JobRef("r-s-1", copy.as_uri())])[0].state is JobState.LOST


def test_a_file_system_with_another_number_is_no_copy(folder: Path, tmp_path: Path) -> None:
    """After a start of the machine, say. A snapshot of it has the numbers of its files, too."""
    box = containers.contained(asked(folder), folder)
    device, number = box["place"]
    again = {**box, "place": [device + 1, number]}
    assert not containers.is_copy(folder, box)
    assert not containers.is_copy(folder, again)
    assert containers.is_copy(folder, {**again, "folder": str(tmp_path)})
    assert not containers.is_copy(folder, {**again, "folder": str(tmp_path / "gone")}), "it was moved"


# --- what a running container must not see ----------------------------------------------------------------------------

PODMAN = """#!/bin/sh
case "$1 $2 $3" in
*RepoDigests*) [ -e "${0%/*}/pull" ] && exit 1; printf '["%s"]\n' "$4";;
*"pull "*) exec "${0%/*}/pull";;
*"image inspect"*) cat "${0%/*}/annotations.json" 2>/dev/null || echo null;;
*" run "*) echo ran >> ran; while [ ! -e go ]; do :; done;;
*"inspect"*) echo exited;;
*"container exists"*) exit 1;;
esac
"""


@pytest.fixture
def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose podman runs a job until `go` lies in its folder; the folder of an attempt that nobody has claimed."""
    (folder / "supervisor.json").unlink()
    programs = folder.parents[3] / "programs"
    programs.mkdir()
    (programs / "podman").write_text(PODMAN)
    (programs / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return folder


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not done():
        assert time.monotonic() < deadline, "waited too long"
        os.sched_yield()


def test_who_submits_beside_another_replaces_nothing_that_is_covered(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looked before the other claimed the attempt, and is as far as writing spec.json only now."""
    request, first, real = asked(machine), LocalExecutor(images=True), containers.contained
    covered = ("spec.json", "supervisor.json", "supervisor.lock", "job.json")
    before: list[dict[str, int]] = []

    def places() -> dict[str, int]:
        return {name: (machine / name).stat().st_ino for name in covered}

    def meanwhile(asking: JobSpec, folder: Path) -> dict[str, Any]:
        monkeypatch.setattr(containers, "contained", real)
        assert isinstance(first.submit(request), Accepted)
        until((machine / "ran").exists)
        before.append(places())
        return real(asking, folder)

    monkeypatch.setattr(containers, "contained", meanwhile)
    assert isinstance(LocalExecutor(images=True).submit(request), Exists)
    launch._lay_down(
        FakeExecutor(),
        AttemptFolder(machine),
        JobOrder("r-s-1", "sft", 1, {}, {}, "", "", image=IMAGE),
    )
    assert places() == before[0]
    (machine / "go").touch()
    until(lambda: first.observe([request])[0].gone)
    assert first.observe([request])[0].exit_code == 0, "the word is the one that its supervisor had"
    assert (machine / "ran").read_text() == "ran\n"


IS_AWAY = (
    "Error: initializing source docker://x: pinging container registry x: dial tcp 10.0.0.1:443: connection refused"
)
UNKNOWN = "Error: initializing source docker://x: reading manifest sha256:a1 in x: manifest unknown"


def registry(machine: Path, program: str) -> Path:
    """What a pull comes to; the folder that it runs in."""
    here = machine.parents[3] / "programs"
    (here / "pull").write_text(f"#!/bin/sh\ncd {here}\necho tried >> tries\n{program}\n")
    (here / "pull").chmod(0o755)
    return here


def tries(here: Path) -> int:
    return len((here / "tries").read_text().splitlines())


def test_a_registry_that_is_away_is_asked_again_until_it_answers(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, waited = registry(machine, f"[ -e there ] && exit 0\necho '{IS_AWAY}' >&2\nexit 125"), list[float]()

    def pause(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 6:
            (here / "there").touch()

    assert fetched(IMAGE, 1e6, pause) == ""
    assert waited == [1, 2, 5, 10, 30, 30]
    assert tries(here) == 7
    said = capsys.readouterr().err
    assert f"image {IMAGE} cannot be fetched, podman reports: {IS_AWAY}; trying again in 1 s" in said


@pytest.mark.parametrize(
    ("program", "words"),
    [(f"echo '{IS_AWAY}' >&2; exit 125", IS_AWAY), ("echo Trying to pull >&2; while :; do :; done", "Trying to pull")],
)
def test_an_image_has_its_time_to_come_and_no_longer(machine: Path, program: str, words: str) -> None:
    """Whether its registry is away or holds the line: in one line, with podman's last words."""
    registry(machine, program)
    why = fetched(IMAGE, 0.5, lambda _: pytest.fail("it would be too late"))
    assert "could not be fetched within 0.5 s" in why
    assert f"podman reports: {words}; check that its registry answers" in why
    assert "\n" not in why


@pytest.mark.parametrize("name", ["train", "denied/not found"])
def test_what_no_other_try_would_fetch_is_said_at_once(
    machine: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a name that has such a word in it says nothing."""
    here = registry(machine, f"echo 'Error: reading {name}: unauthorized' >&2; exit 125")
    image = f"{name}@sha256:{'a1' * 32}"
    assert "podman reports: Error: reading" in fetched(image, 1e6, lambda _: pytest.fail("it is asked again"))
    assert tries(here) == 1
    framed = f'time=\\"2026\\" level=warning msg=\\"Failed, retrying: reading {name}: timeout\\"'
    registry(machine, f'echo "{framed}" >&2; exit 125')
    waited: list[float] = []

    def pause(seconds: float) -> None:
        waited.append(seconds)
        registry(machine, "exit 0")

    assert fetched(image, 1e6, pause) == ""
    assert waited == [1]
    assert "podman reports: Failed, retrying: reading it: timeout; trying" in capsys.readouterr().err


def test_why_a_job_did_not_start_is_told_in_podmans_words(machine: Path) -> None:
    registry(machine, f"echo Trying >&2; echo '{UNKNOWN}' >&2; exit 125")
    request, executor = asked(machine), LocalExecutor(images=True)
    executor.submit(request)
    until(lambda: executor.observe([request])[0].gone)
    [seen] = executor.observe([request])
    assert seen.exit_code == 125
    assert seen.why == (f"image {IMAGE} cannot be fetched, podman reports: {UNKNOWN}; fix it, then posttrain retry"), (
        "and not: exit code 125"
    )
    assert not (machine / "ran").exists()


def test_the_words_of_a_container_that_podman_cannot_make_are_told_too(machine: Path) -> None:
    here = machine.parents[3] / "programs"
    (here / "podman").write_text(PODMAN.replace("echo ran >> ran;", "echo 'Error: runc: no space left' >&2; exit 125;"))
    request, executor = asked(machine), LocalExecutor(images=True)
    executor.submit(request)
    until(lambda: executor.observe([request])[0].gone)
    assert executor.observe([request])[0].why == "Error: runc: no space left"


@pytest.mark.parametrize("said", ["0", "-1", "soon", "nan", "inf"])
def test_the_time_of_an_image_is_a_number(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv("POSTTRAIN_IMAGE_FETCH_SECONDS", said)
    with pytest.raises(InputError, match="POSTTRAIN_IMAGE_FETCH_SECONDS must be a number of seconds above 0, got"):
        containers.contained(asked(folder), folder)
    monkeypatch.setenv("POSTTRAIN_IMAGE_FETCH_SECONDS", "90")
    assert containers.contained(asked(folder), folder)["fetch_seconds"] == 90
    monkeypatch.delenv("POSTTRAIN_IMAGE_FETCH_SECONDS")
    assert containers.contained(asked(folder), folder)["fetch_seconds"] == 1800


def test_an_image_that_tells_a_runtime_what_to_do_is_refused(machine: Path) -> None:
    said = {"org.opencontainers.image.base.name": "x", "run.oci.seccomp_bpf_data": "AA=="}
    (machine.parents[3] / "programs" / "annotations.json").write_text(json.dumps(said))
    request, executor = asked(machine), LocalExecutor(images=True)
    executor.submit(request)
    until(lambda: executor.observe([request])[0].gone)
    assert executor.observe([request])[0].exit_code == 125
    assert not (machine / "ran").exists()
    assert (
        "annotation that begins with run.oci., which an OCI runtime may obey, got run.oci.seccomp_bpf_data; build"
        in (machine / "log.txt").read_text()
    )


@pytest.mark.parametrize(
    ("status", "code", "found"),
    [("exited", 0, 0), ("stopped", 0, 0), ("created", 0, -15), ("", 0, -15), ("exited", 3, 3), ("exited", 137, -9)],
)
def test_an_exit_code_is_that_of_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, code: int, found: int
) -> None:
    """Of one whose podman was told to end before its container began, too."""
    (tmp_path / "podman").write_text(f"#!/bin/sh\necho {status}\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert containers.code_of({"name": "r-s-1"}, code) == found


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "podman is not installed; install podman 4 or newer"),
        ("echo 3.4.4", "podman must be 4 or newer, got 3.4.4; upgrade it"),
        ("echo no >&2; exit 125", "podman does not answer"),
    ],
)
def test_a_machine_without_a_podman_is_told_at_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, why: str
) -> None:
    (tmp_path / "bin").mkdir()
    if program:
        (tmp_path / "bin" / "podman").write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / "bin" / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(InputError, match="init: --executor podman needs podman: ") as refused:
        init_workspace(tmp_path / "w", executor="podman")
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "w").exists(), "nothing is left"


@pytest.mark.parametrize(
    ("why", "code"),
    [("crun: mount proc: Operation not permitted", podman_image.UNABLE), ("Error: unknown flag: --tagg", 1)],
)
def test_ci_leaves_containers_out_for_a_named_cause_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, code: int
) -> None:
    (tmp_path / "podman").write_text(f"#!/bin/sh\necho '{why}' >&2\nexit 125\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    done = subprocess.run([sys.executable, podman_image.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert why in done.stderr


# --- the socket of jobs without a network -----------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[ServerBench]:
    with served(tmp_path / "served") as made:
        yield made


@contextmanager
def at_socket(bench: ServerBench, path: Path) -> Iterator[None]:
    """The server, at a socket for jobs as well."""
    listening = Door(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(str(path))
    listening.listen()
    server = uvicorn.Server(configured(bench.app, Bind(), bench.room))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def at(path: Path, asked: str, token: str) -> int:
    made = http.client.HTTPConnection("x", timeout=60)
    made.sock = socket.socket(socket.AF_UNIX)
    made.sock.connect(str(path))
    try:
        made.request("GET", asked, headers={"authorization": f"Bearer {token}"})
        return made.getresponse().status
    finally:
        made.close()


def test_over_the_socket_a_token_of_an_attempt_opens_its_inputs_and_nobody_asks_a_verb(
    bench: ServerBench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = attempt_with_access(bench, "mine"), attempt_with_access(bench, "other")
    granting(bench).give(mine.attempt, mine.folder, boxed=True)
    access = read_access(mine.folder)
    assert access is not None
    assert access.socket == "/run/posttrain/server.sock"
    place = Path(os.path.relpath(tmp_path / "s"))  # as a container has a short one
    with at_socket(bench, place):
        JobAccess("http://127.0.0.1:1", access.token, socket=str(place)).write(mine.folder)
        blobs = ServedBlobs(mine.folder, patience=0.0)
        assert blobs.get(mine.inputs["data"]) == b"rows of mine"
        with pytest.raises(NotFoundError):
            blobs.get(other.inputs["data"])
        for path in ("/", "/healthz", "/v1/projects/default/whoami", "/v1/attempts", "/metrics", "/v1/operations/x"):
            assert at(place, path, KEY) == 404, path
        assert at(place, f"/v1/attempt/blobs/{mine.inputs['data']}", KEY) == 401, "nor is a person let in there"
