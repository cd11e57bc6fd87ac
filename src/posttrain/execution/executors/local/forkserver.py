"""Start supervisors, and through them jobs, in forks of a process that has already imported the engine.

::

    driver ──socketpair──▶ fork server (imports the engine once, computes nothing, one thread)
                               └─fork─▶ intermediate ──fork──▶ supervisor ──fork──▶ job: no exec, nothing to import

`supervisor` describes the supervisor and the kill rules; only the start of the job's Python differs. A fork server ends
with its driver, because the driver's end of the socket is then closed; the processes that it has started survive.

A job must import the files that its run pinned (ADR 0014). So a fork server serves one environment digest and one set
of environment variables, and compares the files before it imports any of them, as a cold job does; each job compares
again before it runs. All other jobs (with a different digest, a different number of threads, a GPU, or a fork server
that is dead or slow) start cold, by `bootstrap`, which takes seconds longer and is otherwise the same.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

_HERE = Path(__file__).resolve()
if not __package__:  # as a script, before site-packages are on the path
    sys.path.append(str(_HERE.parents[4]))

from posttrain.execution.executors.local import bootstrap, supervisor  # noqa: E402  the path comes first

_MODULE = "posttrain.execution.executors.local.forkserver"
_GPU = ("/dev/nvidiactl", "/dev/kfd")  # a device driver that was opened before a fork fails after the fork
_END_SECONDS = 5.0
_CANNOT = 1
_REFUSED = "refused: "  # the beginning of an answer that concerns this environment only
_LONGEST = 4096  # maximum bytes of an answer


class ForkServer:
    """The driver's end of the connection to a fork server.

    Args:
        preload: a module that imports the packages of jobs; its `ready(attempt_dir)` returns whether a job may use it.
    """

    def __init__(self, preload: str) -> None:
        self._preload, self._lock = preload, threading.Lock()  # one launch at a time
        self._key: tuple[str, dict[str, str]] | None = None  # key of the running server
        self._socket: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[Any, Any] | None = None
        self._given_up = "there is a GPU" if any(os.path.exists(device) for device in _GPU) else ""

    def start(self, folder: Path, environment: Mapping[str, str], seconds: float) -> int | None:
        """Start the supervisor of an attempt with a `spec.json`.

        Args:
            environment: the job's full environment.
            seconds: the time limit; after a time-out this driver does not use its fork server again.

        Returns:
            The supervisor's exit code; None: there was no answer, so the caller must start the supervisor cold.
        """
        if self._given_up:
            _cold(folder, self._given_up)
            return None
        with self._lock:
            return self._ask(folder, (_pinned(folder), dict(environment)), seconds)

    def _ask(self, folder: Path, key: tuple[str, dict[str, str]], seconds: float) -> int | None:
        try:
            if self._socket is None or self._key != key:
                self.close()
                self._open(folder, key)
            assert self._socket is not None
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps(str(folder)).encode() + b"\n")
            answer = self._socket.recv(_LONGEST).decode(errors="replace")
        except OSError as error:  # the server is dead or too slow, or has no memory for another process
            self._give_up(folder, error.strerror or str(error))
            return None
        if answer.startswith(_REFUSED):
            self.close()
            _cold(folder, answer.removeprefix(_REFUSED))
            return None
        if not answer.isdigit():
            self._give_up(folder, answer or "it ended")
            return None
        return int(answer)

    def _give_up(self, folder: Path, why: str) -> None:
        self._given_up = f"the fork server of its driver has stopped serving: {why}"
        if self._process is not None:
            self._process.kill()
        self.close()
        _cold(folder, self._given_up)

    def close(self) -> None:
        """End the server; the processes that it has started survive."""
        if self._end is not None:
            self._end()
        self._socket = self._process = self._end = self._key = None

    def _open(self, folder: Path, key: tuple[str, dict[str, str]]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(folder / "log.txt", "ab", opener=supervisor.private) as log:
            command = [sys.executable, "-s", "-S", "-P", "-X", f"pycache_prefix={supervisor.compiled()}", str(_HERE)]
            process = subprocess.Popen(
                [*command, str(folder), self._preload, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=key[1],
                cwd="/",
                start_new_session=True,  # Ctrl-C at the terminal must not end it
            )
        self._socket, self._process, self._key = ours, process, key
        self._end = weakref.finalize(self, _end, ours, process)


def _cold(folder: Path, why: str) -> None:
    """Write to an attempt's log that its job starts cold."""
    with contextlib.suppress(OSError), open(folder / "log.txt", "a", opener=supervisor.private) as log:
        log.write(f"this job starts cold and imports its own modules: {why}\n")


def _end(ours: socket.socket, process: subprocess.Popen[bytes]) -> None:
    ours.close()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _pinned(folder: Path) -> str:
    """Return the digest of the environment that an attempt's order names; empty: environments are not compared."""
    try:
        return str(json.loads((folder / "job.json").read_bytes()).get("environment") or "")
    except (OSError, ValueError, AttributeError):
        return ""


def attest(folder: str, preload: str, descriptor: str, tries: str = "3") -> NoReturn:
    """Compare the environment with the environment in the first attempt's order, then become the server."""
    marks = bootstrap.marks(Path(folder))  # before the files are read, so later changes are detected
    if different := bootstrap.trouble(Path(folder)):
        _refuse(descriptor, _REFUSED + different)  # the attempt starts cold, and reports the difference
    words = ["-m", _MODULE, "serve", folder, preload, descriptor, tries, marks]
    os.execv(sys.executable, [sys.executable, "-s", "-P", *bootstrap.compiled_flags(), *words])


def _refuse(descriptor: str, why: str) -> NoReturn:
    with socket.socket(fileno=int(descriptor)) as theirs:
        theirs.recv(_LONGEST)  # closing a socket with unread bytes would lose the answer
        theirs.sendall(why.encode()[: _LONGEST - 4])
    os._exit(_CANNOT)


def serve(folder: str, preload: str, descriptor: str, tries: str, marks: str) -> None:
    """Import the module `preload`, then fork for each attempt folder read from the socket, until the peer closes it.

    Args:
        tries: the number of remaining tries. The import is repeated if files of the environment were written during
            it, e.g. compiled files, which are harmless.
        marks: the marks of the files before they were compared. A file that was replaced during its import and then
            restored has different marks.
    """
    digest = _pinned(Path(folder))
    gc.disable()  # imported objects stay: collections would free none of them and take a tenth of the time
    ready = importlib.import_module(preload).ready
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:  # a fork has only the thread that forked, but the locks of all threads
        _refuse(descriptor, f"the fork server must have one thread, got {len(threads)}")
    if bootstrap.marks(Path(folder)) != marks:
        if int(tries) > 1:  # `execv` discards this memory
            again = [str(_HERE), folder, preload, descriptor, str(int(tries) - 1)]
            os.execv(sys.executable, [sys.executable, "-s", "-S", "-P", *bootstrap.compiled_flags(), *again])
        _refuse(descriptor, "files of the environment were written while the fork server imported them")
    gc.collect()
    gc.freeze()  # the collector would write on pages that forks share
    gc.enable()

    def start(attempt: Path, spec: dict[str, Any]) -> NoReturn:
        if _pinned(attempt) != digest or not ready(str(attempt)):
            _cold(attempt, "its order needs files or modules that the fork server has not loaded")
            supervisor.execute(attempt, spec)
        supervisor.settle(attempt)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # includes the supervisor's locks, which the job must not hold
        os.environ.update(spec["environment"])  # names the devices that the supervisor locked
        _run(attempt, spec["module"])

    with socket.socket(fileno=int(descriptor)) as theirs:
        for line in theirs.makefile("r"):
            attempt = Path(json.loads(line))
            child = os.fork()
            if child == 0:
                _intermediate(attempt, theirs, start)
            _, status = os.waitpid(child, 0)
            try:
                theirs.sendall(str(os.waitstatus_to_exitcode(status)).encode())
            except OSError:  # the driver was killed; the started job continues
                return


def _intermediate(attempt: Path, theirs: socket.socket, start: supervisor.Start) -> NoReturn:
    code = _CANNOT
    try:
        os.close(theirs.detach())
        retitle(["python", "-m", supervisor.__name__, str(attempt), str(attempt / "spec.json")])
        supervisor.settle(attempt)
        code = supervisor.main(str(attempt), str(attempt / "spec.json"), start)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run(attempt: Path, module: str) -> NoReturn:
    """Do the same as `python -m MODULE ATTEMPT_DIR`, in this process."""
    code: object = 0
    retitle(["python", "-m", module, str(attempt)])
    try:
        if not bootstrap.refused(attempt):
            sys.argv = [module, str(attempt)]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as leaving:
        code = leaving.code if leaving.code is not None else 0
    except BaseException as error:
        if isinstance(error, ImportError) and error.name == module:
            print(error, file=sys.stderr)
        else:
            traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF)


def retitle(words: list[str]) -> None:
    """Change the command line of this process in `ps`; the new line cannot be longer than the original line."""
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/self/stat").read_text()
        begin, end = (int(word) for word in text[text.rindex(")") + 2 :].split()[45:47])
        if 0 < begin < end:
            written = "\0".join(words).encode()[: end - begin - 1]
            ctypes.memmove(begin, written.ljust(end - begin, b"\0"), end - begin)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*sys.argv[2:])
    else:
        attest(*sys.argv[1:])
