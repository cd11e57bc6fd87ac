"""What breaks clusters is named before a run: every judgement on facts that are made up, and the real ones once."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import replace

import pytest

from posttrain.execution import machine
from posttrain.execution.machine import (
    ClusterFacts,
    Gpus,
    Interface,
    Limits,
    Package,
    RayAnswer,
    ray_answer,
    read_machine,
)
from posttrain.preflight.cluster_checks import (
    Check,
    check_devices,
    check_gloo,
    check_limits,
    check_master_port,
    check_nccl,
    check_ports,
    check_ray,
    check_shared_memory,
    check_versions,
    cluster_checks,
)

GIB = 2**30
LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"))
ETHERNET = Interface("eth0", True, ("192.0.2.2", "fe80::1%eth0"))
DOCKER = Interface("docker0", True, ("172.17.0.1",))
INFINIBAND = Interface("ib0", True, ("198.51.100.7",))
DOWN = Interface("eth1", False, ())
SOUND = ClusterFacts(
    python="3.11.7",
    packages={
        "posttrain": Package("0.1", ">=3.11", ("numpy>=1.26", "torch>=2.6")),
        "torch": Package("2.13.0+cpu", ">=3.10"),
        "transformers": Package("5.23.0", ">=3.10", ('torch>=2.6; extra == "torch"', "safetensors>=0.8")),
        "safetensors": Package("0.8.0"),
        "numpy": Package("2.4.6"),
        "ray": Package("2.60.0"),
    },
    environ={},
    host="node-a",
    resolved=("192.0.2.2",),
    interfaces=(LOOPBACK, ETHERNET, DOCKER),
    listening={22: "sshd (process 9)"},
    local_ports=(32768, 60999),
    memory=64 * GIB,
    shared=(32 * GIB, 31 * GIB),
    limits=Limits(65536, 65536, None, True),
)


def found(check: Check) -> tuple[str, str]:
    """State and finding; whatever is not ok comes with a remedy."""
    assert bool(check.remedy) == (check.state != "ok")
    return check.state, check.finding


def test_a_sound_machine_has_nothing_to_remedy() -> None:
    checks = cluster_checks(SOUND)
    assert [check.name for check in checks] == ["versions", "gloo", "ports", "shm", "devices", "limits"]
    assert {found(check)[0] for check in checks} == {"ok"}


def test_what_does_not_apply_is_not_shown() -> None:
    names = {c.name for c in cluster_checks(replace(SOUND, gpus=Gpus(files=1), environ={"MASTER_PORT": "29500"}))}
    assert {"nccl", "master port"} <= names


class TestVersions:
    @pytest.mark.parametrize(
        ("name", "package", "words"),
        [
            ("torch", Package("2.5.1"), "posttrain 0.1 needs torch>=2.6, got 2.5.1"),
            ("safetensors", Package("0.7.0"), "transformers 5.23.0 needs safetensors>=0.8, got 0.7.0"),
            ("ray", Package("2.60.0", "<3.11"), "ray 2.60.0 needs Python <3.11, this is 3.11.7"),
            ("numpy", Package("1.24.4"), "posttrain 0.1 needs numpy>=1.26, got 1.24.4"),
        ],
    )
    def test_what_does_not_fit_is_named_with_both_sides(self, name: str, package: Package, words: str) -> None:
        state, finding = found(check_versions(replace(SOUND, packages={**SOUND.packages, name: package})))
        assert state == "fail"
        assert words in finding

    def test_absent_ray_is_no_trouble(self) -> None:
        packages = {name: package for name, package in SOUND.packages.items() if name != "ray"}
        state, finding = found(check_versions(replace(SOUND, packages=packages)))
        assert state == "ok"
        assert "only needed for placement over several processes" in finding

    def test_requirements_of_extras_nobody_asked_for_do_not_count(self) -> None:
        picky = Package("0.1", "", ('torch>=9; extra == "bench"', 'numpy>=9; python_version < "3"'))
        assert found(check_versions(replace(SOUND, packages={**SOUND.packages, "posttrain": picky})))[0] == "ok"


class TestGloo:
    def test_the_interface_of_the_host_name(self) -> None:
        assert found(check_gloo(SOUND)) == ("ok", "eth0 (192.0.2.2), where host name node-a resolves to")

    @pytest.mark.parametrize(
        ("facts", "words"),
        [
            (replace(SOUND, resolved=("127.0.1.1",)), "node-a resolves to loopback (127.0.1.1)"),
            (replace(SOUND, resolved=()), "node-a does not resolve"),
            (replace(SOUND, resolved=("203.0.113.9",)), "203.0.113.9, which no interface here has"),
            (replace(SOUND, environ={"GLOO_SOCKET_IFNAME": "eth7"}), "no interface eth7 (there are lo, eth0, docker0)"),
            (replace(SOUND, environ={"GLOO_SOCKET_IFNAME": "eth"}), "no interface eth (there"),
            (replace(SOUND, environ={"GLOO_SOCKET_IFNAME": "lo"}), "is loopback"),
        ],
    )
    def test_what_other_machines_cannot_reach(self, facts: ClusterFacts, words: str) -> None:
        check = check_gloo(facts)
        state, finding = found(check)
        assert state == "warn"
        assert words in finding
        assert "GLOO_SOCKET_IFNAME=eth0" in check.remedy

    def test_an_interface_that_is_down(self) -> None:
        facts = replace(SOUND, environ={"GLOO_SOCKET_IFNAME": "eth1"}, interfaces=(*SOUND.interfaces, DOWN))
        assert found(check_gloo(facts)) == ("warn", "GLOO_SOCKET_IFNAME=eth1: none of these is up with an address")

    def test_loopback_is_all_a_machine_without_a_network_has(self) -> None:
        facts = replace(SOUND, resolved=("127.0.0.1",), interfaces=(LOOPBACK,))
        assert found(check_gloo(facts)) == ("ok", "lo (127.0.0.1), where host name node-a resolves to")

    def test_an_address_that_is_not_here_is_passed_over(self) -> None:
        assert found(check_gloo(replace(SOUND, resolved=("203.0.113.9", "192.0.2.2"))))[0] == "ok"

    def test_what_is_told_holds(self) -> None:
        facts = replace(SOUND, environ={"GLOO_SOCKET_IFNAME": "eth0"}, resolved=("127.0.0.1",))
        assert found(check_gloo(facts)) == ("ok", "eth0 (192.0.2.2), from GLOO_SOCKET_IFNAME=eth0")


class TestNccl:
    @pytest.mark.parametrize(
        ("interfaces", "chosen"),
        [
            ((LOOPBACK, DOCKER, ETHERNET), "eth0 (192.0.2.2)"),
            ((LOOPBACK, ETHERNET, INFINIBAND), "ib0 (198.51.100.7)"),
        ],
    )
    def test_the_first_real_one(self, interfaces: tuple[Interface, ...], chosen: str) -> None:
        assert found(check_nccl(replace(SOUND, interfaces=interfaces))) == ("ok", chosen)

    @pytest.mark.parametrize(
        ("told", "shown"), [("eth", "eth0"), ("=eth0", "eth0"), ("^docker,lo", "eth0"), ("ib,eth", None)]
    )
    def test_prefixes_names_and_exclusions(self, told: str, shown: str | None) -> None:
        state, finding = found(check_nccl(replace(SOUND, environ={"NCCL_SOCKET_IFNAME": told})))
        assert (state, finding.startswith(f"{shown} ")) == (("ok", True) if shown else ("warn", False))

    @pytest.mark.parametrize("told", ["=eth", "lo", "^eth,docker"])
    def test_what_leads_nowhere(self, told: str) -> None:
        assert found(check_nccl(replace(SOUND, environ={"NCCL_SOCKET_IFNAME": told})))[0] == "warn"

    @pytest.mark.parametrize("interfaces", [(LOOPBACK,), (LOOPBACK, DOCKER), (LOOPBACK, DOWN)])
    def test_no_real_interface(self, interfaces: tuple[Interface, ...]) -> None:
        assert found(check_nccl(replace(SOUND, interfaces=interfaces)))[0] == "warn"


class TestPorts:
    def test_a_stranger_on_rays_port(self) -> None:
        state, finding = found(check_ports(replace(SOUND, listening={6379: "redis-server (process 7)"})))
        assert (state, finding) == ("warn", "other programs use Ray's ports: 6379 (head) by redis-server (process 7)")

    def test_ray_itself_is_no_stranger(self) -> None:
        listening = {6379: "gcs_server (process 7)", 10005: "ray::IDLE (process 8)"}
        state, finding = found(check_ports(replace(SOUND, listening=listening)))
        assert (state, finding) == ("ok", "a Ray head runs here; 1 of the workers' 10002-19999 in use")

    @pytest.mark.parametrize(("ports", "state"), [((1024, 65535), "warn"), ((19999, 30000), "warn"), (None, "ok")])
    def test_outgoing_connections_out_of_the_workers_range(self, ports: tuple[int, int] | None, state: str) -> None:
        assert found(check_ports(replace(SOUND, local_ports=ports)))[0] == state

    def test_who_may_not_ask_is_told_what_ray_needs(self) -> None:
        state, finding = found(check_ports(replace(SOUND, listening=None)))
        assert state == "ok"
        assert "6379" in finding

    @pytest.mark.parametrize(
        ("port", "state"), [("29500", "ok"), ("22", "warn"), ("40000", "warn"), ("70000", "warn"), ("http", "warn")]
    )
    def test_master_port(self, port: str, state: str) -> None:
        assert found(check_master_port(replace(SOUND, environ={"MASTER_PORT": port})))[0] == state


class TestSharedMemory:
    @pytest.mark.parametrize(
        ("shared", "state"),
        [
            (None, "ok"),
            ((20 * GIB, 19 * GIB), "ok"),
            ((64 * 2**20, 64 * 2**20), "warn"),
            ((1 * GIB, 1 * GIB), "warn"),
            ((8 * GIB, 8 * GIB), "warn"),  # less than 30 % of memory
            ((32 * GIB, 1 * GIB), "warn"),
        ],
    )
    def test_size_and_what_is_free(self, shared: tuple[int, int] | None, state: str) -> None:
        assert found(check_shared_memory(replace(SOUND, shared=shared)))[0] == state

    def test_what_is_wanted_is_said(self) -> None:
        check = check_shared_memory(replace(SOUND, shared=(64 * 2**20, 64 * 2**20)))
        assert check.finding.startswith("/dev/shm: 64 MiB free of 64 MiB; Ray's object store needs 19.2 GiB")
        assert "--shm-size=20g" in check.remedy

    @pytest.mark.parametrize(("gpus", "state"), [(1, "warn"), (2, "fail")])
    def test_a_containers_default_forbids_several_gpus(self, gpus: int, state: str) -> None:
        small = replace(SOUND, shared=(64 * 2**20, 64 * 2**20), gpus=Gpus(files=gpus))
        assert found(check_shared_memory(small))[0] == state


class TestDevices:
    @pytest.mark.parametrize(
        ("gpus", "state", "words"),
        [
            (Gpus(), "ok", "no NVIDIA device"),
            (Gpus(torch=0), "ok", "torch sees 0"),
            (Gpus(4, 4), "ok", "4 NVIDIA device(s)"),
            (Gpus(4, 4, "0,1", 2, "H100"), "ok", "CUDA_VISIBLE_DEVICES=0,1 are used; torch sees 2 (H100)"),
            (Gpus(4, 4, "GPU-8f3a,MIG-11aa"), "ok", "are used"),
            (Gpus(8, 4), "warn", "nvidia-smi lists 4 device(s), but /dev contains 8"),
            (Gpus(4, 4, "0,7"), "warn", "names device 7, but there are 4"),
            (Gpus(0, None, "0"), "warn", "names device 0, but there are 0"),
            (Gpus(4, 4, "1,1"), "warn", "names a device twice"),
            (Gpus(4, 4, ""), "warn", "hides 4 device(s)"),
            (Gpus(4, 4, "-1"), "warn", "hides 4 device(s)"),
            (Gpus(4, 4, None, 0), "warn", "4 NVIDIA device(s) selected; torch sees 0"),
            (Gpus(torch_trouble="ImportError: libcudart"), "fail", "libcudart"),
        ],
    )
    def test_driver_files_variable_and_torch(self, gpus: Gpus, state: str, words: str) -> None:
        judged = found(check_devices(gpus))
        assert judged[0] == state
        assert words in judged[1]

    def test_hiding_devices_where_there_are_none_is_fine(self) -> None:
        assert found(check_devices(Gpus(visible="")))[0] == "ok"


@pytest.mark.parametrize(
    ("limits", "state"),
    [
        (None, "ok"),
        (Limits(None, None, None, True), "ok"),
        (Limits(1024, None, None, False), "warn"),
        (Limits(65536, 65536, 65536, False), "ok"),
        (Limits(65536, 65536, 65536, True), "warn"),
    ],
)
def test_limits(limits: Limits | None, state: str) -> None:
    assert found(check_limits(replace(SOUND, limits=limits)))[0] == state


class TestRay:
    def ask(self, answer: RayAnswer | None) -> Check:
        check = check_ray("head:6379", SOUND, answer)
        found(check)
        return check

    def test_a_cluster_that_takes_us_in(self) -> None:
        answer = ray_answer(0, json.dumps(["2.60.0", 3, {"CPU": 96.0, "GPU": 8.0}]) + "\n", "")
        assert self.ask(answer) == Check(
            "ray",
            "ok",
            "head:6379: 3 node(s), 96 CPU, 8 GPU; the same versions of ray (2.60.0) and Python as here",
        )

    def test_other_versions_are_shown_beside_ours(self) -> None:
        said = (
            "Traceback …\nRuntimeError: Version mismatch: The cluster was started with:\n  Ray: 2.9\n  Python: 3.10\n"
        )
        check = self.ask(ray_answer(1, "", said))
        assert check.state == "fail"
        assert "started with: Ray: 2.9 Python: 3.10 (here ray 2.60.0, Python 3.11.7)" in check.finding
        assert "versions" in check.remedy

    def test_a_token_that_is_refused(self) -> None:
        said = "gcs: InvalidAuthToken: missing\nConnectionError: Failed to connect\n"
        check = self.ask(ray_answer(1, "", said))
        assert "authentication token" in check.finding
        assert "RAY_AUTH_TOKEN" in check.remedy

    def test_nobody_answers(self) -> None:
        check = self.ask(RayAnswer(trouble="no answer within 60 s"))
        assert (check.state, "ray status" in check.remedy) == ("fail", True)

    def test_a_process_that_dies_without_a_word(self) -> None:
        assert ray_answer(-9, "", "") == RayAnswer(trouble="ray ended with -9")

    def test_without_ray_nobody_can_ask(self) -> None:
        check = check_ray("head:6379", replace(SOUND, packages={}), None)
        assert (check.state, check.remedy) == ("fail", "pip install ray")


def test_the_facts_of_this_machine_can_be_judged() -> None:
    facts = read_machine()
    assert {"posttrain", "numpy"} <= set(facts.packages)
    assert any(interface.loopback for interface in facts.interfaces)
    assert facts.memory > 2**20
    assert facts.gpus.torch is None
    assert {check.state for check in cluster_checks(facts)} <= {"ok", "warn", "fail"}


def test_who_listens_is_known_by_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        listening = read_machine().listening
        assert listening is None or "process" in listening[server.getsockname()[1]]


def test_a_resolver_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        answered.wait(60)
        return []

    monkeypatch.setattr(machine, "_RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(socket, "getaddrinfo", hang)
    try:
        assert read_machine().resolved == ()
    finally:
        answered.set()


def test_a_host_name_that_nobody_knows_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise socket.gaierror("unknown name")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert read_machine().resolved == ()
