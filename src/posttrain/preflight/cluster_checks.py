"""Checks of one machine for problems with the communication between ranks, before a run.

The checks run on every machine of a cluster. They read collected facts (`execution.machine`) and no system state, so
every bad case can be tested. A `Check` is one finding of `doctor`.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from posttrain.execution.machine import REFUSED_TOKEN, ClusterFacts, Gpus, Interface, RayAnswer, is_loopback

_GIB, _MIB = 2**30, 2**20
_EXTRAS = ("", "ray", "torch")  # Posttrain's extras, and the extra of transformers that requires torch
_RAY_PORTS = {6379: "head", 8265: "dashboard", 10001: "client"}
_RAY_WORKERS = (10002, 19999)
_RAY_PROCESSES = re.compile(r"gcs_server|raylet|^ray\b|ray::")
_OBJECT_STORE = 0.3  # share of memory, Ray's default
_TINY_SHARED, _LITTLE_SHARED = 64 * _MIB, 2 * _GIB
_FULL = 0.1  # minimum share of /dev/shm that must be free
_FEW_FILES = 4096
_VIRTUAL = ("docker", "lo", "virbr")  # NCCL uses such interfaces only if there are no others


@dataclass(frozen=True, slots=True)
class Check:
    """One finding of `doctor`."""

    name: str
    state: str  # ok | warn | fail
    finding: str
    remedy: str = ""


def cluster_checks(facts: ClusterFacts) -> list[Check]:
    """Return the results of all checks of one machine."""
    found = [check_versions(facts), check_gloo(facts)]
    if facts.gpus.files or facts.gpus.listed or "NCCL_SOCKET_IFNAME" in facts.environ:
        found.append(check_nccl(facts))
    found.append(check_ports(facts))
    if "MASTER_PORT" in facts.environ:
        found.append(check_master_port(facts))
    return [*found, check_shared_memory(facts), check_devices(facts.gpus), check_limits(facts)]


def check_versions(facts: ClusterFacts) -> Check:
    """Check the installed versions against the requirements of Posttrain, torch, transformers and Ray."""
    if troubles := list(_misfits(facts)):
        return Check("versions", "fail", "; ".join(troubles), "install compatible versions: pip install posttrain")
    ray = facts.packages.get("ray")
    note = f"ray {ray.version}" if ray else "ray is not installed (only needed for placement over several processes)"
    shown = [f"{name} {facts.packages[name].version}" for name in ("numpy", "safetensors") if name in facts.packages]
    return Check(
        "versions", "ok", f"{', '.join([*shown, note])}; they are compatible with each other and Python {facts.python}"
    )


def _misfits(facts: ClusterFacts) -> Iterator[str]:
    for name, package in facts.packages.items():
        if not SpecifierSet(package.python).contains(facts.python, prereleases=True):
            yield f"{name} {package.version} needs Python {package.python}, this is {facts.python}"
        for text in package.requires:
            requirement = Requirement(text)
            other = facts.packages.get(requirement.name.lower())
            applies = not requirement.marker or any(requirement.marker.evaluate({"extra": e}) for e in _EXTRAS)
            if other and applies and not requirement.specifier.contains(other.version, prereleases=True):
                yield f"{name} {package.version} needs {requirement.name}{requirement.specifier}, got {other.version}"


def check_gloo(facts: ClusterFacts) -> Check:
    """Check the interface to which gloo binds: the configured one, or else the one with the host name's address."""
    told = facts.environ.get("GLOO_SOCKET_IFNAME", "")
    real = _real_interfaces(facts)
    remedy = f"GLOO_SOCKET_IFNAME={real[0].name}" if real else "bring up a network interface"
    if told:
        return _told("gloo", "GLOO_SOCKET_IFNAME", told.split(","), facts, remedy)
    warn, host = partial(Check, "gloo", "warn"), f"host name {facts.host}"
    if not facts.resolved:
        return warn(
            f"{host} does not resolve, so gloo falls back to loopback; other machines cannot reach it",
            f"name {facts.host} in /etc/hosts, or set {remedy}",
        )
    owners = {address: i.name for i in facts.interfaces for address in i.addresses}
    address = next((a for a in facts.resolved if a in owners or is_loopback(a)), "")
    if not address:
        return warn(
            f"{host} resolves to {facts.resolved[0]}, which no interface here has, so gloo uses loopback",
            f"correct the address of the name, or set {remedy}",
        )
    if is_loopback(address) and real:
        return warn(
            f"{host} resolves to loopback ({address}); other machines cannot reach these ranks",
            f"for several machines: set {remedy}, or correct /etc/hosts",
        )
    return Check("gloo", "ok", f"{owners.get(address, 'loopback')} ({address}), where {host} resolves to")


def check_nccl(facts: ClusterFacts) -> Check:
    """Check the interface for NCCL's sockets: the configured one, or else the first that is up and not virtual."""
    told = facts.environ.get("NCCL_SOCKET_IFNAME", "")
    real = _real_interfaces(facts)
    if told:
        remedy = f"NCCL_SOCKET_IFNAME={real[0].name}" if real else "bring up a network interface"
        return _told("nccl", "NCCL_SOCKET_IFNAME", told.split(","), facts, remedy)
    if not real:
        return Check("nccl", "warn", "no interface but loopback is up", "for several machines, bring up an interface")
    chosen = min(real, key=lambda i: (not i.name.startswith("ib"), i.name.startswith(_VIRTUAL)))
    shown = f"{chosen.name} ({chosen.addresses[0]})"
    if not chosen.name.startswith(_VIRTUAL):
        return Check("nccl", "ok", shown)
    remedy = "for several machines, bring up a physical interface, or set NCCL_SOCKET_IFNAME"
    return Check("nccl", "warn", f"{shown}: only virtual interfaces are up", remedy)


def _real_interfaces(facts: ClusterFacts) -> list[Interface]:
    """Return the interfaces that are up, have an address and are not loopback; virtual interfaces come last."""
    usable = [i for i in facts.interfaces if i.up and i.addresses and not i.loopback]
    return sorted(usable, key=lambda i: i.name.startswith(_VIRTUAL))


def _told(name: str, variable: str, words: Sequence[str], facts: ClusterFacts, remedy: str) -> Check:
    """Check the interfaces that a variable names: by name or prefix, by `=name`, or by `^prefix` for all others."""
    written = f"{variable}={','.join(words)}"
    nccl = name == "nccl"
    excluded = nccl and words[0].startswith("^")
    exact = not nccl or words[0].lstrip("^").startswith("=")
    wanted = [word.strip().lstrip("^=") for word in words]

    def named(interface: Interface, word: str) -> bool:
        return interface.name == word if exact else interface.name.startswith(word)

    missing = [word for word in wanted if not any(named(i, word) for i in facts.interfaces)]
    if missing and not excluded:
        there = ", ".join(i.name for i in facts.interfaces)
        return Check(name, "warn", f"{written}: no interface {missing[0]} (there are {there})", remedy)
    chosen = [i for i in facts.interfaces if any(named(i, word) for word in wanted) != excluded]
    usable = [i for i in chosen if i.up and i.addresses]
    if not usable:
        return Check(name, "warn", f"{written}: none of these is up with an address", remedy)
    if all(i.loopback for i in usable) and _real_interfaces(facts):
        return Check(name, "warn", f"{written} is loopback; other machines cannot reach these ranks", remedy)
    shown = next((i for i in usable if not i.loopback), usable[0])
    return Check(name, "ok", f"{shown.name} ({shown.addresses[0]}), from {written}")


def check_ports(facts: ClusterFacts) -> Check:
    """Check that Ray's own ports are free, and that the ranges of workers and outgoing connections are disjoint."""
    listening = facts.listening or {}
    taken = {port: by for port, by in listening.items() if port in _RAY_PORTS}
    strangers = [f"{port} ({_RAY_PORTS[port]}) by {by}" for port, by in taken.items() if not _RAY_PROCESSES.search(by)]
    warn = partial(Check, "ports", "warn")
    if strangers:
        return warn(
            f"other programs use Ray's ports: {', '.join(sorted(strangers))}",
            "end that process, or give `ray start` another port",
        )
    (low, high), ephemeral = _RAY_WORKERS, facts.local_ports
    if ephemeral and ephemeral[0] <= high and ephemeral[1] >= low:
        return warn(
            f"outgoing connections use ports {ephemeral[0]}-{ephemeral[1]} and Ray's workers {low}-{high}; the ranges "
            "overlap",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999', or `ray start --min-worker-port`",
        )
    if facts.listening is None:
        return Check(
            "ports", "ok", "this user cannot list the ports in use; Ray needs 6379, 8265, 10001 and 10002-19999"
        )
    used = sum(low <= port <= high for port in listening)
    held = "a Ray head runs here" if 6379 in taken else "6379, 8265, 10001 are free"
    return Check("ports", "ok", f"{held}; {used} of the workers' {low}-{high} in use")


def check_master_port(facts: ClusterFacts) -> Check:
    """Check MASTER_PORT, the rendezvous port of torch's ranks when torchrun or a user starts them."""
    written = facts.environ["MASTER_PORT"]
    port = int(written) if written.isdecimal() else 0
    remedy = "unset MASTER_PORT, or set a free port below the outgoing connections' range"
    warn = partial(Check, "master port", "warn", remedy=remedy)
    if not 1 <= port <= 65535:
        return warn(f"MASTER_PORT must be in 1..65535, got {written!r}")
    if facts.listening and port in facts.listening:
        return warn(f"MASTER_PORT={port} is taken by {facts.listening[port]}")
    low, high = facts.local_ports or (0, 0)
    if low <= port <= high:
        return warn(f"MASTER_PORT={port} can be taken by any outgoing connection ({low}-{high})")
    return Check("master port", "ok", f"MASTER_PORT={port} is free")


def check_shared_memory(facts: ClusterFacts) -> Check:
    """Check that /dev/shm has room for Ray's object store, NCCL and torch's workers.

    Without room, Ray uses a folder on a disk, but NCCL between GPUs fails; therefore the check fails only if there are
    GPUs.
    """
    if facts.shared is None:
        return Check("shm", "ok", "no /dev/shm on this system; Ray keeps its objects in a temporary folder")
    size, free = facts.shared
    wanted = int(_OBJECT_STORE * facts.memory)
    finding = f"/dev/shm: {_size(free)} free of {_size(size)}; Ray's object store needs {_size(wanted)}"
    larger = f"give the container --shm-size={-(-max(wanted, _LITTLE_SHARED) // _GIB)}g, or enlarge the mount"
    if size <= _TINY_SHARED and max(facts.gpus.files, facts.gpus.listed or 0) > 1:
        return Check("shm", "fail", f"{finding}; NCCL between GPUs needs a larger /dev/shm", larger)
    if free < _FULL * size:
        return Check("shm", "warn", f"{finding}; it is nearly full", "delete the files of ended processes in /dev/shm")
    if size < max(wanted, _LITTLE_SHARED):
        return Check("shm", "warn", f"{finding}; if /dev/shm has no room, Ray uses a slower folder on a disk", larger)
    return Check("shm", "ok", finding)


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / _MIB:.0f} MiB"


def check_devices(gpus: Gpus) -> Check:
    """Check that the driver, device files, CUDA_VISIBLE_DEVICES and torch report the same devices for a rank."""
    there = gpus.files if gpus.listed is None else gpus.listed
    if gpus.torch_trouble:
        return Check("devices", "fail", gpus.torch_trouble, "reinstall torch")
    if gpus.listed is not None and gpus.files and gpus.listed != gpus.files:
        finding = f"nvidia-smi lists {gpus.listed} device(s), but /dev contains {gpus.files}"
        return Check("devices", "warn", finding, "restart the driver, or give the container all its devices (--gpus)")
    if hidden := _hidden(gpus.visible, there):
        return Check("devices", "warn", hidden, "correct or unset CUDA_VISIBLE_DEVICES")
    expected = there if gpus.visible is None else sum(bool(word.strip()) for word in gpus.visible.split(","))
    seen = "" if gpus.torch is None else f"; torch sees {gpus.torch}" + (f" ({gpus.torch_name})" if gpus.torch else "")
    if gpus.torch is not None and gpus.torch < expected:
        remedy = "install a CUDA build of torch that supports the driver"
        return Check("devices", "warn", f"{expected} NVIDIA device(s) selected{seen}", remedy)
    if not there and not gpus.torch:
        return Check("devices", "ok", f"no NVIDIA device, ranks compute on the CPU{seen}")
    chosen = "" if gpus.visible is None else f", of which CUDA_VISIBLE_DEVICES={gpus.visible} are used"
    return Check("devices", "ok", f"{there} NVIDIA device(s){chosen}{seen}")


def _hidden(visible: str | None, there: int) -> str:
    """Return the fault in CUDA_VISIBLE_DEVICES, or "". CUDA ignores the first unknown device and all after it."""
    if visible is None:
        return ""
    words = [word.strip() for word in visible.split(",")]
    if not visible.strip() or words[0] == "-1":
        return f"CUDA_VISIBLE_DEVICES={visible!r} hides {there} device(s)" if there else ""
    beyond = next((word for word in words if word.lstrip("-").isdecimal() and not 0 <= int(word) < there), None)
    if beyond is not None:
        return (
            f"CUDA_VISIBLE_DEVICES={visible} names device {beyond}, but there are {there}; CUDA ignores this device "
            "and those after it"
        )
    if len(set(words)) < len(words):
        return f"CUDA_VISIBLE_DEVICES={visible} names a device twice, so CUDA shows no device"
    return ""


def check_limits(facts: ClusterFacts) -> Check:
    """Check two limits: open files, one for each connection between ranks, and locked memory, which RDMA needs."""
    limits = facts.limits
    if limits is None:
        return Check("limits", "ok", "this system has no relevant limits")
    if limits.open_files is not None and limits.open_files < _FEW_FILES:
        hard = "unlimited" if limits.open_files_hard is None else limits.open_files_hard
        finding = f"{limits.open_files} open files allowed (hard limit {hard}); many ranks need more"
        return Check("limits", "warn", finding, "ulimit -n 65536, or nofile in /etc/security/limits.conf")
    if limits.rdma and limits.locked_bytes is not None:
        finding = f"{_size(limits.locked_bytes)} of memory can be locked, but RDMA registers whole buffers"
        return Check("limits", "warn", finding, "ulimit -l unlimited (containers: --ulimit memlock=-1)")
    locked = "any amount of" if limits.locked_bytes is None else _size(limits.locked_bytes)
    rdma = "" if limits.rdma else "; no RDMA device"
    return Check("limits", "ok", f"{limits.open_files or 'any number of'} open files, {locked} locked memory{rdma}")


def check_ray(address: str, facts: ClusterFacts, answer: RayAnswer | None) -> Check:
    """Check that a running cluster accepts this process.

    Args:
        answer: the cluster's answer; None if Ray is not installed here.
    """
    ray = facts.packages.get("ray")
    if ray is None or answer is None:
        return Check("ray", "fail", f"cannot query {address}: ray is not installed here", "pip install ray")
    if answer.trouble:
        remedy = "check the address with `ray status` on the head"
        if answer.trouble == REFUSED_TOKEN:
            remedy = "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on the head"
        elif "version mismatch" in answer.trouble.lower():
            remedy = "install the cluster's versions of Python and ray here"
        here = f"here ray {ray.version}, Python {facts.python}"
        return Check("ray", "fail", f"{address}: {answer.trouble} ({here})", remedy)
    resources = {name: answer.resources.get(name, 0.0) for name in ("CPU", "GPU")}
    shown = ", ".join(f"{count:g} {name}" for name, count in resources.items())
    same = f"the same versions of ray ({answer.version}) and Python as here"
    return Check("ray", "ok", f"{address}: {answer.nodes} node(s), {shown}; {same}")
