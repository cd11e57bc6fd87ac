"""What stands in the way of one stage: it is told, tried again with back-off, and stops no other stage.

A lost race is no trouble: the stage is looked at again with the rows as they are now. Bytes that do not match their
digest do not mend themselves: the stage fails. Everything else (a store that answers 503, a full disk, two reads that
do not agree) is tried again until it has gone on for too long; then the driver ends with it and the run stays as it is,
so that nothing a job has done is lost.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from posttrain.control.wiring import Wiring
from posttrain.domain.errors import ConflictError, InputError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import StageState
from posttrain.domain.records import StageRecord
from posttrain.store.atomic import make_folder, write_atomic

BACKOFF_SECONDS = (0.5, 2.0, 8.0, 30.0)
PATIENCE_SECONDS = 3600.0  # of one trouble, before the driver gives up
_UNEXPECTED = 5  # times that a bug may be tried again

Place = tuple[str, str]  # run, stage


@dataclass(frozen=True, slots=True)
class _Trouble:
    since: float
    times: int
    again_at: float
    said_before: tuple[str, str, str]  # the stage's reason, message and next action


class Troubles:
    """The stages that this process is in trouble with."""

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self._open: dict[Place, _Trouble] = {}

    def waits(self, stage: StageRecord) -> bool:
        """Whether the stage is not to be looked at yet."""
        known = self._open.get((stage.run_id, stage.name))
        return known is not None and self._wiring.clock.now() < known.again_at

    @contextmanager
    def kept_to(self, stage: StageRecord) -> Iterator[None]:
        """Whatever is raised inside concerns this stage only.

        Raises:
            Exception: what was raised, when it has gone on for too long, or cannot be told.
        """
        try:
            yield
        except ConflictError:  # somebody moved first: the next look sees the row as it is
            return
        except (InputError, IntegrityError) as error:
            if stage.state == StageState.READY:
                self._fail(stage, error)
            else:
                self._met(stage, error)
            return
        except Exception as error:
            self._met(stage, error)
            return
        self._over(stage)

    def _met(self, stage: StageRecord, error: Exception) -> None:
        now = self._wiring.clock.now()
        said = (stage.reason, stage.message, stage.next_action)
        before = self._open.get((stage.run_id, stage.name)) or _Trouble(now, 0, now, said)
        times = before.times + 1
        expected = isinstance(error, PosttrainError | OSError)
        if now - before.since >= PATIENCE_SECONDS or (not expected and times >= _UNEXPECTED):
            raise error
        wait = BACKOFF_SECONDS[min(times, len(BACKOFF_SECONDS)) - 1]
        self._open[stage.run_id, stage.name] = _Trouble(before.since, times, now + wait, before.said_before)
        line = _one_line(error) if expected else f"{_one_line(error)}; see {self._keep_traceback(stage)}"
        self._say(stage, "Troubled", f"{line}; looking again in {wait:g} s", "none needed")

    def _over(self, stage: StageRecord) -> None:
        """What was said of the trouble is taken back, unless the stage has moved on and says something else."""
        known = self._open.pop((stage.run_id, stage.name), None)
        if known is None:
            return
        now = next(s for s in self._wiring.ledger.stages(stage.run_id) if s.name == stage.name)
        if now.reason == "Troubled":
            self._say(now, *known.said_before)

    def _say(self, stage: StageRecord, reason: str, message: str, action: str) -> None:
        try:
            with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
                transaction.update_stage(stage, reason=reason, message=message, next_action=action)
        except ConflictError:  # the stage has moved on, which says more
            return

    def _fail(self, stage: StageRecord, error: Exception) -> None:
        reason = "Corrupt" if isinstance(error, IntegrityError) else "JobFailed:bad_input"
        action = f"mend what the message names, then posttrain retry {stage.run_id}"
        with self._wiring.ledger.transaction(self._wiring.actor) as transaction:
            transaction.update_stage(
                stage, state=StageState.FAILED, reason=reason, message=_one_line(error), next_action=action
            )

    def _keep_traceback(self, stage: StageRecord) -> str:
        folder = self._wiring.root / "runs" / stage.run_id
        make_folder(folder)
        path = folder / f"{stage.name}-trouble.txt"
        write_atomic(path, traceback.format_exc().encode(errors="replace"))
        return str(path)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {text}"
