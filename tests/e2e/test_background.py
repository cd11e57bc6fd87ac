"""Background drivers: real commands on real terminals, real signals, and what is left when each of them has ended."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import held
import psutil
import pytest
from held import Terminal, held_devices, write_run
from tiny_run import once
from workbench import Finished, Reference, Workbench

from posttrain.store.atomic import read_json
from posttrain.store.work import WorkQueue
from posttrain.workspace.background import requested

pytestmark = pytest.mark.slow
MODULE = "posttrain.app.background"
CTRL_C = b"\x03"


@pytest.fixture
def bench(shared: Path, tmp_path: Path) -> Iterator[Workbench]:
    """A workspace whose path has a blank and an umlaut, and no run in it."""
    made = once(shared / "held", held.make)[0]
    copy = held.prepared(made.copy(tmp_path / "wörk bench"), made.folder)
    yield copy
    for pid in drivers(copy):
        os.kill(pid, signal.SIGKILL)
    copy.clean()


def drivers(bench: Workbench) -> list[int]:
    """The background drivers of the workspace that live."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if MODULE in words and str(bench.root) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return sorted(found)


def row(bench: Workbench, run_id: str) -> dict[str, Any]:
    """A run as `ls` tells it."""
    rows: list[dict[str, Any]] = bench.run("ls", "-o", "json").json["runs"]
    return next(row for row in rows if row["id"] == run_id)


def driver(bench: Workbench, run_id: str) -> tuple[str, int | None]:
    told = row(bench, run_id)["driver"]
    return (told["kind"], told["pid"]) if told else ("ended", None)


def wait_driven(bench: Workbench) -> str:
    """The newest run, once a command drives it and waits for the device."""

    def waiting() -> str | None:
        with bench.open() as workspace:
            for run in workspace.ledger.runs(limit=1):
                if run.lease_owner and workspace.ledger.stages(run.id)[0].reason == "WaitingForDevices":
                    return run.id
        return None

    found: str = bench.wait("a driven run", waiting)
    return found


def detached(bench: Workbench, ended: Finished) -> tuple[str, int]:
    """Run id and driver of what `--detach` said in one line."""
    (line,) = ended.out.splitlines()
    found = re.fullmatch(
        r"run (\S+) detached, driven in the background, pid (\d+); posttrain attach (\S+) returns.*", line
    )
    assert found, line
    assert (found[1], ended.err) == (found[3], "")
    return found[1], int(found[2])


def detach(bench: Workbench, name: str) -> tuple[str, int]:
    """`run --detach` of another run."""
    return detached(bench, bench.run("run", write_run(bench, name), "--detach"))


def end_run(bench: Workbench, run_id: str) -> None:
    """Stop it: while it waits for a device there is nothing to wait for."""
    bench.run("stop", run_id)
    bench.wait("the end of the drivers", lambda: not drivers(bench))
    assert row(bench, run_id)["state"] == "stopped"
    assert row(bench, run_id)["driver"] is None
    assert requested(bench.root) == []


@pytest.mark.journey
def test_detach_takes_the_whole_run(bench: Workbench) -> None:
    taken = held_devices(bench)
    run_id, pid = detach(bench, "held")
    assert drivers(bench) == [pid]
    assert driver(bench, run_id) == ("background", pid)
    process, log = psutil.Process(pid), next(bench.root.glob("drivers/*.log"))
    assert (os.getsid(pid), process.cwd(), process.terminal()) == (pid, "/", None)
    assert [os.readlink(f"/proc/{pid}/fd/{number}") for number in range(3)] == ["/dev/null", str(log), str(log)]
    shown = bench.run("get", run_id).out
    assert f"driver: background, pid {pid}; log of the background driver: {log}" in shown
    checks = {check["name"]: check for check in bench.run("doctor", "-o", "json").json}
    assert checks["drivers"]["finding"] == f"background, pid {pid} drives {run_id}; its log: {log}"
    assert checks["runs"]["state"] == "ok"

    taken.close()
    attached = bench.run("attach", run_id)
    assert f"run {run_id}: succeeded" in attached.out
    bench.wait("the driver's own end", lambda: not drivers(bench))
    assert (bench.root / "runs" / run_id / "report.html").exists()
    assert requested(bench.root) == []
    bench.check(run_id)
    again = bench.run("run", "held.yaml", "--detach")
    assert f"attached to run {run_id}: succeeded" in again.out, "there is nothing to drive"
    assert not drivers(bench)


@pytest.mark.journey
def test_ctrl_c_on_a_terminal_hands_the_run_over_once(bench: Workbench) -> None:
    with closing(held_devices(bench)):
        terminal = Terminal(bench, "run", "held.yaml")
        run_id = wait_driven(bench)
        assert driver(bench, run_id) == ("foreground", terminal.process.pid)
        terminal.press(CTRL_C)
        terminal.press(CTRL_C)
        assert terminal.finish() == 130, terminal.shown
        [pid] = drivers(bench)
        assert f"the run continues, driven in the background, pid {pid}" in terminal.shown
        assert driver(bench, run_id) == ("background", pid)
        watching = Terminal(bench, "attach", run_id)
        bench.wait("its view", lambda: "first" in watching.shown)
        watching.press(CTRL_C)
        assert watching.finish() == 130
        assert f"driven in the background, pid {pid}" in watching.shown
        assert "detaching" not in watching.shown
        assert drivers(bench) == [pid], "it only left"
        end_run(bench, run_id)
        retried = Terminal(bench, "retry", run_id)
        bench.wait("a driven run", lambda: driver(bench, run_id) == ("foreground", retried.process.pid))
        retried.press(CTRL_C)
        assert retried.finish() == 130
        assert driver(bench, run_id) == ("background", *drivers(bench))
        end_run(bench, run_id)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "hang-up", "SIGINT without a terminal", "Ctrl-C without stdin"])
def test_nothing_is_started_where_nobody_asked(bench: Workbench, how: str) -> None:
    with closing(held_devices(bench)), open(os.devnull) as nothing:
        if how == "SIGINT without a terminal":
            process = bench.start("run", "held.yaml")
            run_id = wait_driven(bench)
            process.send_signal(signal.SIGINT)
            ended = bench.finish(process)
            assert (ended.code, ended.err) == (130, "")
            said = ended.out
        else:
            stdin = nothing.fileno() if how == "Ctrl-C without stdin" else None
            terminal = Terminal(bench, "run", "held.yaml", stdin=stdin)
            run_id = wait_driven(bench)
            if how == "hang-up":
                terminal.hang_up()
            elif how == "Ctrl-C without stdin":
                terminal.press(CTRL_C)
            else:
                terminal.process.send_signal(signal.Signals[how])
            number = signal.SIGTERM if how == "SIGTERM" else signal.SIGHUP
            assert terminal.finish() == (130 if how == "Ctrl-C without stdin" else -number)
            said = terminal.shown
        if how != "hang-up":  # nobody was there to read
            assert "wait for a driver" in said
            assert run_id in said
        assert drivers(bench) == []
        assert driver(bench, run_id) == ("none", None)
        told = row(bench, run_id)
        assert (told["state"], told["next_action"]) == (
            "running",
            f"posttrain attach {run_id} continues it (no process drives it)",
        )
        with bench.open() as workspace:
            assert workspace.ledger.run(run_id).lease_owner is None, "given back: nobody waits until it runs out"
        end_run(bench, run_id)


def test_a_killed_driver_is_told_and_followed(bench: Workbench) -> None:
    go = bench.folder / "go"
    bench.environment["HELD_UNTIL"] = str(go)
    taken = held_devices(bench)
    run_id, pid = detach(bench, "held")
    os.kill(pid, signal.SIGKILL)
    bench.wait("its end", lambda: not drivers(bench))
    log = next(bench.root.glob("drivers/*.log"))
    assert driver(bench, run_id) == ("none", None)
    assert f"driver: none; log of the background driver: {log}" in bench.run("get", run_id).out
    checks = {check["name"]: check for check in bench.run("doctor", "-o", "json").json}
    assert (checks["runs"]["state"], checks["runs"]["remedy"]) == ("warn", f"posttrain attach {run_id}")
    assert f"its background driver has ended or is suspended; log: {log}" in checks["runs"]["finding"]

    _, second = detached(bench, bench.run("attach", run_id, "--detach"))
    assert second != pid
    os.kill(second, signal.SIGTERM)
    bench.wait("its end", lambda: not drivers(bench))
    assert f"ended by SIGTERM; waiting for a driver: {run_id}" in log.read_text()
    with bench.open() as workspace:
        assert workspace.ledger.run(run_id).lease_owner is None
    other, third = detach(bench, "other")
    bench.wait("what the dead driver left", lambda: driver(bench, run_id) == ("background", third))
    bench.run("stop", other)
    taken.close()
    (attempt,) = bench.wait("its job", lambda: list(bench.root.glob(f"runs/{run_id}/first/001/start.json")))
    os.kill(third, signal.SIGKILL)
    bench.wait("its end", lambda: not drivers(bench))
    go.touch()
    bench.wait("the job's own end", attempt.with_name("exit.json").exists)
    assert read_json(attempt.with_name("result.json"))["status"] == "succeeded"
    assert [attempt.state for attempt in bench.attempts(run_id)] == ["launched"], "nobody has collected it"
    bench.run("attach", run_id)
    assert [attempt.number for attempt in bench.attempts(run_id)] == [1, 1]
    bench.check(run_id)


def test_one_driver_serves_the_runs_of_an_environment(bench: Workbench) -> None:
    with closing(held_devices(bench)):
        names = [write_run(bench, name) for name in ("one", "two", "three")]
        commands = [bench.start("run", name, "--detach") for name in (*names, names[0])]
        told = [detached(bench, bench.finish(command)) for command in commands]
        assert len({run_id for run_id, _ in told}) == 3
        assert drivers(bench) == sorted({pid for _, pid in told})
        [pid] = drivers(bench)
        for run_id, _ in told:
            assert driver(bench, run_id) == ("background", pid)

        bench.environment["CUDA_VISIBLE_DEVICES"] = "0"  # what jobs see is what they would have seen
        other, second = detach(bench, "four")
        assert second != pid
        assert psutil.Process(second).environ()["CUDA_VISIBLE_DEVICES"] == "0"
        assert len(list(bench.root.glob("drivers/*.log"))) == 2
        bench.run("stop", other)
        bench.wait("the end of the second", lambda: drivers(bench) == [pid])
        for run_id in {run_id for run_id, _ in told}:
            bench.run("stop", run_id)
        bench.wait("the end of the first", lambda: not drivers(bench))
        assert requested(bench.root) == []


def test_what_cannot_start_leaves_nothing(bench: Workbench) -> None:
    words = "    print('no luck today', file=sys.stderr)\n    os._exit(3)\n"
    bench.write("sitecustomize.py", f"import os, sys\nif {MODULE!r} in sys.orig_argv:\n{words}")
    bench.environment["PYTHONPATH"] = "."  # a relative one means the same there
    with closing(held_devices(bench)):
        refused = bench.run("run", "held.yaml", "--detach", code=6)
        run_id = bench.run_id()
        assert f"run {run_id}: no background driver could start: no luck today; its log is" in refused.error
        assert f"posttrain attach {run_id} drives it here" in refused.error
        assert (drivers(bench), requested(bench.root), driver(bench, run_id)) == ([], [], ("none", None))
        terminal = Terminal(bench, "attach", run_id)
        bench.wait("a driven run", lambda: driver(bench, run_id)[0] == "foreground")
        terminal.press(CTRL_C)
        assert terminal.finish() == 130
        assert "no luck today" in terminal.shown
        assert "detached; running jobs continue, and later stages wait for a driver" in terminal.shown
        assert (drivers(bench), driver(bench, run_id)) == ([], ("none", None))

        del bench.environment["PYTHONPATH"]
        for left in (bench.root / "drivers").rglob("*"):
            if left.is_file():
                left.unlink()
        (bench.root / "drivers" / "runs").rmdir()
        (bench.root / "drivers").rmdir()
        (bench.root / "drivers").write_text("in the way")
        assert "drivers" in bench.run("attach", run_id, "--detach", code=10).error
        assert driver(bench, run_id) == ("none", None)


@pytest.mark.parametrize("point", ["detach.after_request", "detach.after_start", "driver.after_taken"])
def test_killed_on_the_way(bench: Workbench, point: str) -> None:
    mark = bench.folder / "died"
    armed = {"POSTTRAIN_CRASHPOINT": point, "POSTTRAIN_CRASHPOINT_ONCE": str(mark)}
    with closing(held_devices(bench)):
        ended = bench.run("run", "held.yaml", "--detach", env=armed, code=None)
        run_id = bench.run_id()
        assert mark.exists()
        if point == "detach.after_start":  # it has the run, though nobody was told
            assert ended.code == -signal.SIGKILL
            bench.wait("the driver", lambda: driver(bench, run_id)[0] == "background")
        else:
            bench.wait("its end", lambda: not drivers(bench))
            assert driver(bench, run_id) == ("none", None)
        _, pid = detached(bench, bench.run("attach", run_id, "--detach"))
        assert drivers(bench) == [pid]
        end_run(bench, run_id)


def test_killed_at_the_end(bench: Workbench) -> None:
    """The run has ended and its request is still there: the next driver is not led astray."""
    armed = {"POSTTRAIN_CRASHPOINT": "driver.before_done"}
    with closing(held_devices(bench)):
        run_id, _ = detached(bench, bench.run("run", "held.yaml", "--detach", env=armed))
        bench.run("stop", run_id)
        bench.wait("its end", lambda: not drivers(bench))
        assert row(bench, run_id)["driver"] is None
        _, pid = detached(bench, bench.run("retry", run_id, "--detach"))
        assert driver(bench, run_id) == ("background", pid)
        end_run(bench, run_id)


def test_a_suspended_driver_is_none(bench: Workbench) -> None:
    with closing(held_devices(bench)):
        run_id, pid = detach(bench, "held")
        with closing(sqlite3.connect(bench.root / "ledger.db", timeout=60)) as other:
            other.execute("BEGIN IMMEDIATE")  # so that the driver is not stopped while it holds the lock
            os.kill(pid, signal.SIGSTOP)
        with bench.open() as workspace:
            owner = str(workspace.ledger.run(run_id).lease_owner)
            WorkQueue(workspace.ledger, owner).release([run_id])  # as if its lease had run out
        assert driver(bench, run_id) == ("none", None)
        os.kill(pid, signal.SIGCONT)
        bench.wait("it goes on", lambda: driver(bench, run_id) == ("background", pid))
        end_run(bench, run_id)


@pytest.mark.journey
@pytest.mark.parametrize("how", ["removed", "moved"])
def test_a_driver_ends_with_its_workspace(bench: Workbench, how: str) -> None:
    with closing(held_devices(bench)):
        run_id, _ = detach(bench, "held")
        wait_driven(bench)  # else it may be making the attempt's folder at this moment
        moved = bench.root.with_name("moved")
        bench.root.rename(moved)
        if how == "removed":
            shutil.rmtree(moved)
        bench.wait("the driver's end", lambda: not drivers(bench))
        assert not bench.root.exists(), "nothing is made there again"
        if how == "moved":
            moved.rename(bench.root)
            assert driver(bench, run_id) == ("none", None)
            end_run(bench, run_id)


@pytest.mark.journey
def test_all_stages_gates_and_the_release_without_a_terminal(reference: Reference, tmp_path: Path) -> None:
    """From the stage cache: nothing is trained again."""
    copy = reference.bench.copy(tmp_path / "bench")
    run_id, _ = detached(copy, copy.run("run", "run.yaml", "--again", "--detach"))
    with copy.open() as workspace:
        copy.wait("its end", lambda: workspace.ledger.run(run_id).state == "succeeded")
    copy.wait("the driver's own end", lambda: not drivers(copy))
    copy.check(run_id)
    assert copy.outputs(run_id) == reference.outputs
    assert copy.run("get", "prod", "-o", "json").json["history"][-1]["run_id"] in (run_id, reference.run_id)
    assert (copy.root / "runs" / run_id / "report.html").exists()
    assert copy.run("attach", run_id).code == 0
    assert (copy.root / "drivers" / "runs").is_dir()


def test_a_program_gives_its_run_away(bench: Workbench) -> None:
    bench.write("program.py", "import posttrain\n\nprint(posttrain.submit('held.yaml').detach())\n")
    with closing(held_devices(bench)):
        process = psutil.Popen(
            [bench.python, "program.py"], cwd=bench.folder, env=bench.variables(), stdout=-1, text=True
        )
        out, _ = process.communicate()
        run_id = bench.run_id()
        assert out == f"background, pid {drivers(bench)[0]}\n"
        assert driver(bench, run_id)[0] == "background"
        end_run(bench, run_id)
