"""Run jobs in podman containers, and fetch images.

A spec that names an image becomes `podman run` of that image, under the same supervisor:

::

    supervisor ──fork──▶ podman run ──▶ conmon ──▶ python -s -P -m MODULE ATTEMPT_DIR   (in the image)
        │ podman ends with the container and passes signals on; if podman is killed, the container continues
        └ before exit.json: podman rm --force, until podman reports no container of that name

The container has a read-only image, no capabilities and no network. The attempt's folder is mounted writable at its own
path; the supervisor's files in this folder are covered. In a served workspace, the folder of the server's socket is
also mounted; in any other workspace, the store is mounted, read-only. The environment contains the spec's variables and
the values of its secrets, which appear in no command line. No process in the container can create a symbolic link, a
device or a named pipe, because drivers read the folder and follow its entries.

Fetching an image is retried within a time limit while its registry is unavailable.

The module imports only the standard library and modules of Posttrain that do the same, since the supervisor imports it.
"""

import errno
import functools
import json
import math
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from posttrain.domain.errors import InputError, PosttrainError
from posttrain.domain.jobspec import WORKSPACE, JobSpec
from posttrain.store.atomic import open_plain, write_json
from posttrain.store.retries import INSIDE, PRIVATE_CACHE, SOCKETS

FETCH_VARIABLE = "POSTTRAIN_IMAGE_FETCH_SECONDS"  # read by the driver: how long one attempt waits for its image
FETCH_SECONDS = 1800.0  # allows for tens of GB and an outage of the registry
_PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before the next try to fetch an image
SPEC = "container"  # the key in spec.json
_COVERED = ("spec.json", "request.json", "supervisor.json", "supervisor.lock")  # the files that supervisors read
_OLDEST = 4


_FINAL = re.compile(  # podman errors that a retry does not fix
    r"manifest unknown|name unknown|not found|unauthorized|authentication required|denied|forbidden|invalid reference",
    re.IGNORECASE,
)


_FRAMED = re.compile(r'level=\w+ msg="(.*)"$')  # podman's log lines during its own retries


_WORDS = 400  # maximum characters from the end of podman's message, where the cause is


_LINE = 1200


_TAIL = 8192  # maximum bytes read from the end of a log


_VARIABLES = (  # variables that podman requires from its parent process
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME"),
    *("CONTAINERS_CONF", "CONTAINERS_STORAGE_CONF", "CONTAINERS_REGISTRIES_CONF", "REGISTRY_AUTH_FILE"),
    "DBUS_SESSION_BUS_ADDRESS",
)


_SECONDS = 60.0  # time limit of one podman call, on a busy machine


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an environment that podman requires, in addition to the variables of jobs."""
    return {name: environment[name] for name in _VARIABLES if name in environment}


def podman(*words: str) -> subprocess.CompletedProcess[str]:
    """Return the result of a short podman command. Raises OSError, or SubprocessError after a time-out."""
    return subprocess.run(
        ["podman", *words], capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL, check=False,
        env=variables(os.environ), cwd="/",
    )  # fmt: skip


def fetch_seconds(job: str) -> float:
    """Return how long a job waits for its image.

    Raises:
        InputError: the driver's environment variable is not a positive number.
    """
    said = os.environ.get(FETCH_VARIABLE, "")
    try:
        seconds = float(said or FETCH_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < math.inf:
        raise InputError(f"job {job}: {FETCH_VARIABLE} must be a number of seconds above 0, got {said[:80]!r}")
    return seconds


def fetched(image: str, seconds: float, pause: Callable[[float], None] = time.sleep) -> str:
    """Fetch an image, with retries; return why the fetch failed, with podman's last message; empty on success.

    Args:
        seconds: the time limit for all tries.
    """
    until, tried = time.monotonic() + seconds, 0
    while True:
        code, words = _pulled(image, max(0.0, until - time.monotonic()))
        if code == 0:
            return ""
        words = _cause(words, image) or ("nothing" if code is None else f"exit code {code}")
        if code is None:
            return _late(image, seconds, words)
        if _FINAL.search(words):
            return f"image {image} cannot be fetched, podman reports: {words}; fix it, then posttrain retry"
        wait = _PAUSES[min(tried, len(_PAUSES) - 1)]
        if time.monotonic() + wait >= until:
            return _late(image, seconds, words)
        print(f"image {image} cannot be fetched, podman reports: {words}; trying again in {wait:g} s", file=sys.stderr)
        sys.stderr.flush()
        pause(wait)
        tried += 1


def _pulled(image: str, seconds: float) -> tuple[int | None, str]:
    """Return podman's exit code (None: it did not end in time) and its last message.

    A file receives the messages, since surviving children of podman would keep a pipe open.
    """
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                ["podman", "pull", "--quiet", image], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said,
                timeout=seconds, check=False, env=variables(os.environ), cwd="/",
            )  # fmt: skip
            code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            code = None
        said.seek(max(0, os.fstat(said.fileno()).st_size - _TAIL))
        return code, _last(said.read(_TAIL).decode(errors="replace"))


def _late(image: str, seconds: float, words: str) -> str:
    return (
        f"image {image} could not be fetched within {seconds:g} s, podman reports: {words}; check that its registry "
        f"answers, or raise {FETCH_VARIABLE}, then posttrain retry"
    )


def _last(words: str) -> str:
    """Return podman's last line, which contains the error."""
    return one_line((words.strip().splitlines() or [""])[-1])


def _cause(words: str, image: str) -> str:
    """Return podman's message without its log frame and without the image's name, which may contain any word."""
    framed = _FRAMED.search(words)
    found = (framed[1] if framed else words).replace(f"docker://{image}", "it")
    return found.replace(image, "it").replace(image.partition("@")[0], "it")[-_WORDS:]


def one_line(words: str) -> str:
    """Return a podman message as one line, truncated."""
    return " ".join(words.split())[:_LINE]


def last_words(folder: Path) -> str:
    """Return the last log line of podman or `become` about a container that did not start; empty: no such line.

    A job may write to the same log, so the line is only for people.
    """
    with suppress(PosttrainError, OSError), open_plain(folder / "log.txt") as log:
        log.seek(max(0, os.fstat(log.fileno()).st_size - _TAIL))
        lines = log.read(_TAIL).decode(errors="replace").splitlines()
        return next((one_line(line) for line in reversed(lines) if line.startswith(("image ", "Error: "))), "")
    return ""


_LATE_SECONDS = 60  # seconds after which podman itself ends an overdue container


_AGAIN_SECONDS = 0.5  # seconds between two tries to remove a container


_PLACE_DIGITS = 12  # digits of the workspace's label, which distinguishes runs of equal names


_SHARED_MEMORY = "2g"


_PROFILES = (Path("/etc/containers/seccomp.json"), Path("/usr/share/containers/seccomp.json"))


_PROFILE = "seccomp.json"  # file name in the attempt's folder


_NEVER = frozenset(
    {"symlink", "symlinkat", "mknod", "mknodat", "io_uring_setup", "io_uring_enter", "io_uring_register"}
    | {"unshare", "setns", "mount", "mount_setattr", "umount", "umount2", "fsopen", "fsconfig", "fsmount", "fspick"}
    | {"move_mount", "open_tree", "pivot_root", "keyctl", "add_key", "request_key", "ptrace", "bpf", "userfaultfd"}
)


_FLAGGED = frozenset({"clone", "clone3", "renameat2"})


_WHITEOUT = 4  # the flag of renameat2 that leaves a device


_NAMESPACES = 0x7E020000  # every CLONE_NEW… flag of clone


_RUNTIME = "runc"  # crun obeys an image's annotations, which could replace the profile


_NO_SUCH = 1  # exit code of `podman container exists`


_SIGNALLED = 128  # a larger exit code is this plus the signal that ended the job


_RAN = ("exited", "stopped")


REFUSED = 125  # podman's exit code if it starts nothing


_ORDERS = "run.oci."  # prefix of annotations that control an OCI runtime


_SHARE = 0.9  # share of the machine's memory for a job without a memory request


_PROCESSES = 16384  # maximum processes, including threads


_TEMPORARY = "4g"  # maximum size of /tmp, which is in memory


def trouble() -> str:
    """Return why no job can run in an image here, with the remedy; empty: jobs can."""
    return _trouble(os.environ.get("PATH", ""), os.environ.get("CONTAINERS_CONF", ""))


@functools.cache
def _trouble(*_: str) -> str:
    try:
        said = podman("version", "--format", "{{.Client.Version}}")
    except FileNotFoundError:
        return "podman is not installed; install podman 4 or newer and an OCI runtime (crun or runc)"
    except (OSError, subprocess.SubprocessError) as error:
        return f"podman does not answer ({' '.join(str(error).split())[:200]}); run podman info"
    found = re.match(r"\d+", said.stdout.strip())
    if said.returncode or found is None:
        return f"podman does not answer ({' '.join(said.stderr.split())[:200]}); run podman info"
    if int(found[0]) < _OLDEST:
        return f"podman must be {_OLDEST} or newer, got {said.stdout.strip()}; upgrade it"
    if shutil.which(_RUNTIME) is None:
        return f"podman needs the OCI runtime {_RUNTIME}, which is not installed; install it"
    if _profile() is None:
        return f"podman's seccomp profile must be in {_PROFILES[1]}, and is not; install containers-common"
    return ""


def contained(spec: JobSpec, folder: Path) -> dict[str, Any]:
    """Return the container entry of spec.json for a job that names an image.

    Raises:
        InputError: podman is missing or too old, or the folder or the store cannot be mounted.
    """
    if why := trouble():
        raise InputError(f"job {spec.name} requests image {spec.image}: {why}")
    here = os.stat(folder)
    mounts = [[str(folder), str(folder), "rw"], _mount(folder)]
    for source, _, _ in mounts:
        if "," in source:
            raise InputError(f"job {spec.name}: podman cannot mount a folder with a comma in its name, got {source}")
    place = str(spec.labels.get(WORKSPACE) or "alone")[:_PLACE_DIGITS]
    return {
        "name": f"{spec.name}-{place}-{secrets.token_hex(4)}",  # a copy of the workspace has the same digits
        "folder": str(folder),
        "place": [here.st_dev, here.st_ino],  # a copy of the folder has another inode
        "profile": _profile() or {},
        "fetch_seconds": fetch_seconds(spec.name),
        "memory": spec.gang[0].memory or int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _SHARE),
        "limits": _controllers(os.environ.get("PATH", ""), os.environ.get("CONTAINERS_CONF", "")),
        "word": secrets.token_hex(16),  # also in exit.json: a job that cannot read it cannot forge that file
        "mounts": mounts,
    }


def _mount(folder: Path) -> list[str]:
    """Return the mount from which a job reads its inputs: the folder of its server's socket, or the store."""
    order = json.loads((folder / "job.json").read_bytes())
    if order.get("served"):
        return [str(folder.parents[3] / SOCKETS), INSIDE, "ro"]
    url = urlsplit(str(order.get("store_url", "")))
    if url.scheme != "file" or order.get("channel"):
        raise InputError(
            f"job {order.get('name')}: a job in an image can reach a store or mailboxes that are not folders only "
            "through a server; run posttrain serve"
        )
    return [unquote(url.path), unquote(url.path), "ro"]


def become(folder: Path, spec: Mapping[str, Any]) -> NoReturn:
    """Replace this process with podman."""
    box = spec[SPEC]
    (folder / PRIVATE_CACHE).mkdir(mode=0o700, exist_ok=True)
    write_json(folder / _PROFILE, box["profile"])
    for what in ("memory", "pids"):
        if what not in box["limits"]:
            print(f"podman limits no {what} of this job: its cgroups have no controller of that name", file=sys.stderr)
    try:
        why = _refused(str(spec["image"]), box["fetch_seconds"])
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        why = f"image {spec['image']}: podman does not answer ({one_line(str(error))}); run podman info"
    if why:
        print(why, file=sys.stderr)
    sys.stderr.flush()
    if why:
        os._exit(REFUSED)
    named = {name: os.environ[name] for name in spec["secrets"] if name in os.environ}
    os.execvpe("podman", command(folder, spec), variables(os.environ) | named)


def _refused(image: str, seconds: float) -> str:
    """Fetch an image if it is missing here; return why no job can run in it; empty: jobs can.

    Only an image that was fetched under the same name counts: podman finds a digest under any name, but projects allow
    images by name.
    """
    held = podman("image", "inspect", "--format={{json .RepoDigests}}", image)
    here = not held.returncode and image in (json.loads(held.stdout) or ())
    if not here and (why := fetched(image, seconds)):
        return why
    said = podman("image", "inspect", "--format={{json .Annotations}}", image)
    if said.returncode:
        return f"image {image}: podman does not report its annotations ({' '.join(said.stderr.split())[:200]})"
    if found := sorted(name for name in json.loads(said.stdout) or {} if name.startswith(_ORDERS)):
        return (
            f"image {image} must have no annotation that begins with {_ORDERS}, which an OCI runtime may obey, got "
            f"{', '.join(found)[:200]}; build it without"
        )
    return ""


def command(folder: Path, spec: Mapping[str, Any]) -> list[str]:
    """Return the command `podman run …` for a job whose supervisor has locked the devices."""
    box, variables = spec[SPEC], {"HOME": "/tmp", "PYTHONDONTWRITEBYTECODE": "1", **spec["environment"]}
    if not spec.get("taken"):  # an installed device hook would otherwise expose all devices
        variables["NVIDIA_VISIBLE_DEVICES"] = "void"
    words = ["podman", f"--runtime={_RUNTIME}", "run", f"--name={box['name']}", "--pull=never", "--log-driver=none"]
    words += ["--user=0:0", "--umask=0077"]  # only the owner can read a job's files
    words += ["--read-only", "--cap-drop=all", "--security-opt=no-new-privileges", "--network=none"]
    words += ["--image-volume=ignore", "--no-healthcheck", *_limits(box)]
    words += [f"--security-opt=seccomp={folder / _PROFILE}", f"--shm-size={_SHARED_MEMORY}", "--http-proxy=false"]
    words += [f"--hostname={os.uname().nodename}", f"--workdir={folder}", f"--label=posttrain.job={spec['name']}"]
    mounts = [(source, target, str(mode == "ro").lower()) for source, target, mode in box["mounts"]]
    mounts += [("/dev/null", folder / name, "true") for name in _COVERED if (folder / name).exists()]
    mounts.append((folder / "job.json", folder / "job.json", "true"))
    words += [f"--mount=type=bind,source={source},destination={target},ro={only}" for source, target, only in mounts]
    if spec.get("max_seconds") is not None:  # ends the container even if no supervisor is left
        words.append(f"--timeout={int(spec['max_seconds'] + spec.get('grace_seconds', 0.0)) + _LATE_SECONDS}")
    words += [f"--env={name}={value}" for name, value in variables.items()]
    words += [f"--env={name}" for name in spec["secrets"]]  # podman reads their values from its own environment
    words += [f"--device=nvidia.com/gpu={device}" for device in spec.get("taken", ())]
    return [*words, "--entrypoint=python", spec["image"], "-s", "-P", "-m", spec["module"], str(folder)]


def _limits(box: Mapping[str, Any]) -> Iterator[str]:
    yield from ("--read-only-tmpfs=false", f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={_TEMPORARY}")
    yield "--oom-score-adj=1000"  # killed before the machine's own processes
    if "memory" in box["limits"]:
        yield from (f"--memory={box['memory']}", f"--memory-swap={box['memory']}")
    if "pids" in box["limits"]:
        yield f"--pids-limit={_PROCESSES}"


@functools.cache
def _controllers(*_: str) -> list[str]:
    """Return the limits that podman can set here: `memory`, `pids`; none for rootless podman on cgroups v1."""
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        said = podman("info", "--format={{json .Host.CgroupControllers}}").stdout
        return [str(name) for name in json.loads(said) or ()]
    return []


def gone(box: Mapping[str, Any]) -> bool:
    """End a job's container and remove it; return whether podman confirms that it no longer exists."""
    with suppress(OSError, subprocess.SubprocessError):
        podman("rm", "--force", "--ignore", "--time=0", "--volumes", str(box["name"]))
        return podman("container", "exists", str(box["name"])).returncode == _NO_SUCH
    return False


def code_of(box: Mapping[str, Any], code: int) -> int:
    """Return a job's exit code from that of podman: negative for a signal.

    If podman is terminated before its container starts, podman exits with 0, as if the job had succeeded.
    """
    if code > _SIGNALLED:
        return _SIGNALLED - code
    if code:
        return code
    with suppress(OSError, subprocess.SubprocessError):
        said = podman("inspect", "--type=container", "--format={{.State.Status}}", str(box["name"]))
        return 0 if said.stdout.strip() in _RAN else -signal.SIGTERM
    return 0


def clear(folder: Path, box: Mapping[str, Any], beat: Callable[[], None]) -> None:
    """Remove a finished job's container and its private cache; return when both are removed.

    Args:
        beat: called while waiting.
    """
    while not gone(box):
        beat()
        time.sleep(_AGAIN_SECONDS)
    forget(folder)


def forget(folder: Path) -> None:
    """Remove a job's private cache, at any depth of nesting."""
    subprocess.run(
        ["rm", "-rf", "--", str(folder / PRIVATE_CACHE)],
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False,
    )  # fmt: skip


def is_copy(folder: Path, box: Mapping[str, Any]) -> bool:
    """Return whether a folder is a copy of the container's original folder."""
    here, (device, number) = os.stat(folder), box["place"]
    if here.st_ino != number:
        return True
    if here.st_dev == device:
        return False
    try:  # a remounted file system may have another device number
        return not os.path.samestat(os.stat(box["folder"]), here)
    except OSError:
        return False


def _profile() -> dict[str, Any] | None:
    """Return podman's seccomp profile without the system calls that jobs must not make; None: there is no profile."""
    for path in _PROFILES:
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_bytes())
            for rule in found["syscalls"]:
                rule["names"] = [name for name in rule["names"] if name not in _NEVER | _FLAGGED]
            denied = {"names": sorted(_NEVER), "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM, "errno": "EPERM"}
            found["syscalls"] = [rule for rule in found["syscalls"] if rule["names"]]
            plain = {"index": 0, "value": _NAMESPACES, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
            moved = {"index": 4, "value": _WHITEOUT, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
            found["syscalls"] += [
                {**denied, "args": []},
                {"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [plain]},  # no new namespaces
                {"names": ["renameat2"], "action": "SCMP_ACT_ALLOW", "args": [moved]},
                {**denied, "names": ["clone3"], "errnoRet": errno.ENOSYS, "errno": "ENOSYS", "args": []},
            ]
            return found
    return None
