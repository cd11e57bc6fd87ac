"""The layout of a reward's cell, decided by the job before the cell exists, and the folder of an open reward.

The layout is what a reward may see of this machine. When a job is killed, its keeper sweeps the folder of its open
reward; failing that, the next reward does.
"""

import fcntl
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from posttrain.domain.errors import InputError
from posttrain.domain.rewards import source_name
from posttrain.sandbox.cell import CellPlan

LIMITS: Mapping[str, int] = {
    "RLIMIT_AS": 8 * 2**30,  # bytes of address space: numpy and friends reserve much and use little
    "RLIMIT_FSIZE": 2**30,  # bytes per file written
    "RLIMIT_NOFILE": 256,
}
MEMORY = 8 * 2**30  # bytes of all its processes together, and at most half of the machine's
PROCESSES = 256  # processes and threads that the reward may have
SCRATCH = 2**30  # bytes that it may write
LOOPBACK = "127.0.0.1"  # of the job's machine, where a reward declares it; it has no name
_PACKAGE = Path(__file__).resolve().parents[2]  # posttrain, of which the worker is a part
PREFIX = "posttrain-cell-"


@dataclass(frozen=True, slots=True)
class Provision:
    """What a run declares that its reward gets besides its source."""

    files: Mapping[str, Path]  # name beside the source → a file or folder
    network: Sequence[str] = ()  # host:port
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variable → value, for its environment alone


def lay_out(
    scratch: Path, source: Path, name: str, *, whole: bool, hidden: Sequence[Path], provision: Provision
) -> CellPlan:
    """Put the reward's source and files into a folder, and say what else it needs.

    Args:
        scratch: an empty folder of the job's.
        source: the reward's file, or a blob called by its digest.
        name: the file's name in the cell.
        whole: the folder that the source lies in is the reward, all of it.
        hidden: folders that are no business of a reward's.
        provision: declared files and hosts.
    """
    for folder in ("root", "source", "work"):
        (scratch / folder).mkdir()
    kit = scratch / "source"
    if whole:
        shutil.copytree(source.parent, kit, dirs_exist_ok=True)
    elif source.suffix == ".py":
        for module in source.parent.glob("*.py"):  # what it imports from beside it
            shutil.copyfile(module, kit / module.name)
    shutil.copyfile(source, kit / name)
    for given, path in provision.files.items():
        target = kit / given
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            shutil.copytree(path, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(path, target)
    places = dict(zip(provision.network, _addresses(provision.network), strict=True))
    readable = _readable()
    return CellPlan(
        base=str(scratch / "root"),
        source=str(kit),
        scratch=str(scratch / "work"),
        readable=readable,
        # but for those in which something lies that the reward runs on; what else lies there is out of its sight anyway
        hidden=[
            str(place)
            for place in (folder.resolve() for folder in hidden)
            if not any(Path(path).is_relative_to(place) for path in readable)
        ],
        limits=LIMITS,
        memory=min(MEMORY, psutil.virtual_memory().total // 2),
        processes=PROCESSES,
        scratch_bytes=SCRATCH,
        hosts={host: address for word, (address, _) in places.items() if (host := word.rpartition(":")[0]) != LOOPBACK},
        ports=list(places.values()),
    )


def source_file(path: Path, file: str = "") -> Path:
    """The reward's source: `path` itself, or the named / `reward.py` / only Python file of the folder `path`.

    Raises:
        InputError: there is no such file, or the folder holds several and none is called `reward.py`.
    """
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"reward source {path.name} does not exist; give a Python file or a folder that holds one")
    return path / source_name({p.name for p in path.glob("*.py")}, file, path.name)


def _readable() -> list[str]:
    """Interpreter, environment, this package, and what `.pth` files add to the module path; outermost only.

    A folder that holds a home is none of them: the modules in it stay unseen.
    """
    homes = {Path("/"), *Path.home().parents, Path.home()}
    wanted = [Path(prefix).resolve() for prefix in (sys.prefix, sys.base_prefix, sys.exec_prefix)]
    wanted += [Path(os.path.realpath(sys.executable)).parent.parent, _PACKAGE, *_added()]
    found = {path for path in wanted if path not in homes}
    return sorted(str(path) for path in found if not any(other in path.parents for other in found))


def _added() -> Iterator[Path]:
    """Folders of packages that are installed in place."""
    for folder in map(Path, site.getsitepackages()):
        for file in folder.glob("*.pth"):
            for line in file.read_text(errors="replace").splitlines():
                if line.startswith("/") and Path(line).is_dir():
                    yield Path(line).resolve()


def _addresses(network: Sequence[str]) -> list[tuple[str, int]]:
    """An address of the cell's own loopback for every declared host, the same for the same host."""
    hosts = list(dict.fromkeys(word.rpartition(":")[0] for word in network))
    places = {host: host if host == LOOPBACK else f"127.0.1.{number}" for number, host in enumerate(hosts, start=1)}
    return [(places[host], int(port)) for host, _, port in (word.rpartition(":") for word in network)]


class Scratch:
    """A new folder among the temporary ones, held until it is closed. Those that nobody holds any more are removed.

    The kernel lets go of a folder when the process that holds it dies, however it dies.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        for left in parent.glob(f"{PREFIX}*"):
            _sweep(left)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # somebody swept it before it was held: then it is made again
                self._held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                fcntl.flock(self._held, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self._held)

    def close(self) -> None:
        """Remove it; again is nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
        self._held = -1


def _sweep(folder: Path) -> None:
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return  # gone, or somebody else's
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # held
    finally:
        os.close(held)
