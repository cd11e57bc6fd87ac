"""Another program in a cell: it reads what it is given, reaches the declared hosts, and leaves files in a folder.

The cell is that of a reward (`sandbox.cell`): a read-only root with the interpreter and the given files, a bounded
scratch folder, no other network, no other processes. Only regular files that the program leaves in `{home}/out` are
copied out, after it has ended.
"""

from __future__ import annotations

import os
import select
import shutil
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from posttrain.domain.errors import FailureClass, InfrastructureError, InputError, JobFailedError
from posttrain.sandbox.process import TRUST
from posttrain.sandbox.protocol import Ended, MalformedError
from posttrain.sandbox.session import (
    OUTSIDE,
    EndedError,
    LateError,
    Log,
    NotConfinedError,
    Provision,
    Scratch,
    Session,
    lay_out,
)

SCRATCH = 4 * 2**30  # bytes that the program may write
_LIMITS = {"RLIMIT_AS": 64 * 2**30, "RLIMIT_FSIZE": SCRATCH, "RLIMIT_NOFILE": 4096}
_LOOK = 0.2  # seconds between two calls of `between`
_REPORT = 60.0  # seconds within which the worker describes the end of the program
_KEPT, _SHOWN = 1 << 13, 300  # bytes of the last output, and characters of its last line


class ProgramError(JobFailedError):
    """A program failed, or left what it must not leave."""

    failure_class = FailureClass.BAD_INPUT


@dataclass(frozen=True, slots=True)
class Program:
    """A program: `Program("lm-eval", [python, "-m", "lm_eval", …])`.

    In `words` and `variables`, `{home}` is the scratch folder, and `{source}` the folder of the given files.
    """

    name: str  # for errors
    words: Sequence[str]
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)  # name below {source} → a file or folder, which is copied
    readable: Sequence[Path] = ()  # existing folders, at their own paths
    linked: Mapping[str, Path] = field(default_factory=dict)  # name below {home} → a folder with links to its files
    folder: str = ""  # in which it begins, below {source}
    network: Sequence[str] = ()  # host:port
    secrets: Mapping[str, str] = field(default_factory=dict, repr=False)  # variable → value, redacted in its output


class _Tail(Log):
    """Copies the output to the log, and keeps its end."""

    def __init__(self) -> None:
        super().__init__()
        self._end = b""

    def write(self, chunk: bytes) -> None:
        """See `Log.write`."""
        super().write(chunk)
        self._end = (self._end + chunk)[-_KEPT:]

    @property
    def last(self) -> str:
        """The last line, for an error, without the lines that a progress bar rewrote."""
        lines = [line.rpartition("\r")[2].strip() for line in self._end.decode(errors="replace").splitlines()]
        found = [line for line in lines if line]
        return f": {found[-1][:_SHOWN]}" if found else ""


def run_program(
    program: Program, out: Path, between: Callable[[], None], *, hidden: Sequence[Path], confined: bool
) -> tuple[str, ...]:
    """Run a program to its end; return what could not be confined, as text.

    Args:
        out: an empty folder, which receives the files that the program leaves.
        between: called several times a second; an error that it raises ends the program.
        hidden: folders that the program must not see.
        confined: whether to reject the program if the kernel cannot confine it completely.

    Raises:
        InputError: the program cannot be confined.
        ProgramError: the program failed, used too much memory, or left files that cannot be copied.
        InfrastructureError: the program was killed from outside, or its cell could not be made in time.
    """
    scratch, tail = Scratch(), _Tail()
    try:
        given = Provision(program.files, program.network, program.secrets)
        readable = [*map(str, program.readable), *map(str, program.linked.values())]
        plan = lay_out(scratch.path, None, "", hidden=hidden, provision=given, readable=readable)
        plan = replace(plan, scratch_bytes=SCRATCH, limits={**plan.limits, **_LIMITS})
        session = Session(plan, program.network, tail, program.secrets)
        try:
            notes = tuple(note.replace("the reward", program.name) for note in session.notes)
            if confined and not session.confined:
                raise InputError(f"{program.name} must be confined: {'; '.join(notes)}; {TRUST}")
            _finish(program, session, scratch.path / "out.tar", between, tail)
        finally:
            session.close()
        _unpack(program.name, scratch.path / "out.tar", out)
        return notes
    except NotConfinedError as error:
        raise InfrastructureError(f"{program.name}: {error}; check the machine's load, then retry") from None
    except LateError:
        raise InfrastructureError(f"{program.name}: its cell did not answer in time; retry") from None
    except EndedError as error:
        kind = InfrastructureError if error.killed else ProgramError
        raise kind(f"{program.name} {error}{tail.last}") from None
    except MalformedError as error:
        raise ProgramError(f"{program.name} answered {error}; it must not write to its cell's socket") from None
    finally:
        scratch.close()


def _finish(program: Program, session: Session, packed: Path, between: Callable[[], None], tail: _Tail) -> None:
    """Wait for the end of the program, and copy what it left."""
    linked = {name: str(folder) for name, folder in program.linked.items()}
    order = {"op": "program", "words": program.words, "variables": program.variables, "folder": program.folder}
    asked = session.tell({**order, "linked": linked}, time.monotonic() + _REPORT)
    while not select.select([session], [], [], _LOOK)[0]:
        between()
    message = session.hear((asked,), time.monotonic() + _REPORT)
    if not isinstance(message, Ended):
        raise ProgramError(f"{program.name}: {getattr(message, 'message', message)}")
    [left] = session.descriptors(1, time.monotonic() + _REPORT)
    with os.fdopen(left, "rb") as source, packed.open("wb") as target:
        shutil.copyfileobj(source, target)
    if message.code:
        session.close()  # its whole output is in the log then
        how = f"signal {-message.code}" if message.code < 0 else f"exit code {message.code}"
        kind = InfrastructureError if -message.code in OUTSIDE else ProgramError
        raise kind(f"{program.name} ended with {how}{tail.last}")


def _unpack(name: str, packed: Path, out: Path) -> None:
    """Copy the regular files of an archive that an untrusted program may have written."""
    left = SCRATCH
    try:
        with tarfile.open(packed) as archive:
            for member in archive:
                left -= member.size
                if left < 0 or member.issparse():
                    raise ProgramError(f"{name} must leave at most {SCRATCH} bytes in its folder, got more")
                if member.isreg():
                    archive.extract(member, out, filter="data")
    except (tarfile.TarError, OSError, ValueError) as error:
        raise ProgramError(f"{name} left files that cannot be copied: {error!s:.200}") from error
