"""An executor whose jobs run on another machine: it has a root of its own, and hands over nothing but a mailbox's URL.

The machine is a folder. Its scheduler is the local executor, started with an environment that contains the keys of S3
and nothing else of the driver, so that a job that needed a path of the driver would not run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from posttrain.domain.errors import InputError
from posttrain.domain.jobs import Capacity, LogPage, Observation, Submission
from posttrain.domain.jobspec import JobRef, JobSpec, Listed
from posttrain.execution.agent import Agent
from posttrain.execution.executors.local.executor import LocalExecutor
from posttrain.store.attempts import mailbox_at
from posttrain.store.staging import relayed_log

HERE = Path(__file__).parent


class Far:
    """Jobs under agents below `root`; several drivers that name the same root share the machine."""

    name, remote, attests, idempotent, images = "far", True, False, True, False

    def __init__(self, runs: Path, root: Path | None = None) -> None:
        self.root = root or Path(os.environ["FAR_ROOT"])
        self._local = LocalExecutor(runs=self.root / "runs", keep=_of_the_node)

    def submit(self, spec: JobSpec) -> Submission:
        if spec.image:
            raise InputError(f"job {spec.name} requests image {spec.image}; the node has none: request none")
        there = self.there(spec)
        there.folder.mkdir(parents=True, exist_ok=True)
        (there.folder / "mailbox").write_text(spec.mailbox)
        (there.folder / "bootstrap").write_text(spec.bootstrap)
        own = {"PYTHONPATH": str(HERE), "FAR_SCRATCH": str(self.scratch(spec)), "FAR_STARTS": str(self.root / "starts")}
        return self._local.submit(replace(spec, mailbox=there.mailbox, module="far", environment=own, secrets=()))

    def observe(self, jobs: Sequence[JobRef]) -> list[Observation]:
        return self._local.observe([self.there(job) for job in jobs])

    def kill(self, job: JobRef) -> None:
        self._local.kill(self.there(job))

    def list(self, prefix: str) -> list[Listed]:
        return self._local.list(prefix)

    def logs(self, job: JobRef, cursor: int = 0) -> LogPage:
        return relayed_log(mailbox_at(job.mailbox), cursor)

    def capacity(self) -> Capacity:
        return Capacity()

    def there(self, job: JobRef) -> JobRef:
        """The job as the machine's scheduler names it."""
        return JobRef(job.name, self.root.joinpath("runs", *job.mailbox.rsplit("/", 3)[1:]).as_uri())

    def scratch(self, job: JobRef) -> Path:
        return self.root / "scratch" / job.name


def _of_the_node(environment: Mapping[str, str]) -> dict[str, str]:
    keys = ("POSTTRAIN_CRASHPOINT", *(() if "FAR_KEYLESS" in environment else ("AWS_",)))
    return {name: value for name, value in environment.items() if name == "PATH" or name.startswith(keys)}


def main(folder: Path) -> int:
    """Run an agent, as the script of a scheduler does."""
    starts = Path(os.environ["FAR_STARTS"], folder.parent.parent.name + f"-{folder.parent.name}-{int(folder.name)}")
    starts.parent.mkdir(exist_ok=True)
    with starts.open("a") as file:
        file.write(f"{os.getpid()}\n")
    bootstrap = (folder / "bootstrap").read_text()
    return Agent((folder / "mailbox").read_text(), 0, Path(os.environ["FAR_SCRATCH"]), bootstrap).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
