"""What stands in the way of one object: it is told, tried again with back-off, and stops no other.

A lost race is no trouble: the stage is looked at again with the rows as they are now. Bytes that do not match their
digest do not mend themselves: a stage that had not begun fails. Everything else (a store that answers 503, a full disk,
two reads that do not agree) is tried again until it has gone on for too long; then the object is set aside with its
traceback (`posttrain dead`) and stays as it is, so that nothing a job has done is lost. All of that is in the work
queue: it outlives the driver.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from posttrain.control.stores import Stores
from posttrain.domain.errors import ConflictError, InputError, IntegrityError, PosttrainError
from posttrain.domain.lifecycle import Reason, StageState
from posttrain.domain.records import StageRecord
from posttrain.store.waking import STAGE
from posttrain.store.work import Work, WorkQueue

BACKOFF_SECONDS = (0.5, 2.0, 8.0, 30.0)
PATIENCE_SECONDS = 3600.0  # of one trouble, before the object is set aside
_UNEXPECTED = 5  # times that a bug may be tried again


class Troubles:
    """The objects of one run that are in trouble, as the queue's rows tell."""

    def __init__(self, stores: Stores, queue: WorkQueue, rows: Iterable[Work]) -> None:
        self._stores, self._queue = stores, queue
        self.raced = False
        self._open = {one.object: one for one in rows if one.kind == STAGE}

    def __bool__(self) -> bool:
        """Whether there is any, or a race was lost: then the rows are read again before anything else is done."""
        return self.raced or bool(self._open)

    def waits(self, stage: StageRecord) -> bool:
        """Whether the stage is not to be looked at yet, or not before a person says so."""
        known = self._open.get(_name(stage))
        return known is not None and (known.dead_at is not None or known.due_in > 0)

    @property
    def again_after(self) -> float | None:
        """Seconds until the first of them is looked at again; None: none waits."""
        due = [one.due_in for one in self._open.values() if one.dead_at is None]
        return max(0.0, min(due)) if due else None

    @property
    def set_aside(self) -> frozenset[str]:
        """Stages that wait for a person."""
        return frozenset(one.object.partition("/")[2] for one in self._open.values() if one.dead_at is not None)

    @contextmanager
    def kept_to(self, stage: StageRecord) -> Iterator[None]:
        """Whatever is raised inside concerns this stage only."""
        try:
            yield
        except ConflictError:  # somebody moved first: the next look sees the row as it is
            self.raced = True  # and it need not be somebody who woke this run
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
        if self._open.pop(_name(stage), None) is not None:
            self._over(stage)

    def _met(self, stage: StageRecord, error: Exception) -> None:
        self._open[_name(stage)] = known = record_trouble(
            self._queue, STAGE, _name(stage), error, self._open.get(_name(stage))
        )
        if known.dead_at is not None:
            how = f"{one_line(error)}; set aside after {known.failures} tries"
            self._say(stage, Reason.SET_ASIDE, how, f"mend the cause, then posttrain dead {_name(stage)} --retry")
        else:
            wait = known.due_in
            self._say(stage, Reason.TROUBLED, f"{one_line(error)}; looking again in {wait:.2g} s", "none needed")

    def _over(self, stage: StageRecord) -> None:
        """What was said of the trouble is taken back, unless the stage has moved on and says something else."""
        self._queue.over(STAGE, _name(stage))
        now = next(s for s in self._stores.ledger.stages(stage.run_id) if s.name == stage.name)
        if now.reason in (Reason.TROUBLED, Reason.SET_ASIDE):
            self._say(now, *self._usual(now), "none needed")

    def _say(self, stage: StageRecord, reason: Reason, message: str, action: str) -> None:
        try:
            self._stores.update_stage(stage, reason=reason, message=message, next_action=action)
        except ConflictError:  # the stage has moved on, which says more
            return

    def _usual(self, stage: StageRecord) -> tuple[Reason, str]:
        """What a stage says of itself when nothing stands in its way."""
        if stage.state == StageState.RUNNING:
            return Reason.RUNNING, f"attempt {len(self._stores.ledger.attempts(stage.run_id, stage.name))}"
        pending = stage.state == StageState.PENDING
        return (Reason.WAITING_FOR_INPUTS, "waiting for its turn") if pending else (Reason.READY, "inputs are there")

    def _fail(self, stage: StageRecord, error: Exception) -> None:
        reason = Reason.CORRUPT if isinstance(error, IntegrityError) else Reason.JOB_FAILED_BAD_INPUT
        action = f"mend what the message names, then posttrain retry {stage.run_id}"
        self._stores.update_stage(
            stage, state=StageState.FAILED, reason=reason, message=one_line(error), next_action=action
        )


def record_trouble(
    queue: WorkQueue, kind: str, name: str, error: Exception, before: Work | None, held: Work | None = None
) -> Work:
    """Write down that a look at an object raised: when it is looked at again, or that it is set aside.

    Args:
        before: its row, where one is known.
        held: the claim that it was looked at with, if it is an object that is claimed.

    Raises:
        StaleWriteError: another driver has it by now.
    """
    times, lasts = (before.failures if before else 0) + 1, (before and before.failed_for) or 0.0
    expected = isinstance(error, PosttrainError | OSError)
    over = lasts >= PATIENCE_SECONDS or (not expected and times >= _UNEXPECTED)
    wait = BACKOFF_SECONDS[min(times, len(BACKOFF_SECONDS)) - 1]
    trace = "".join(traceback.format_exception(error))
    return queue.failed(kind, name, one_line(error), trace, None if over else wait, held)


def one_line(error: Exception) -> str:
    """What an error says, in one line; of one that nobody expected, its class too."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if isinstance(error, PosttrainError) else f"unexpected {type(error).__name__}: {text}"


def _name(stage: StageRecord) -> str:
    return f"{stage.run_id}/{stage.name}"
