"""A reward function in one or several separate processes, and weighted sums of rewards.

A process that exceeds its deadline is killed and started again. `placement: {reward: {cpus: 8}}` runs several processes
in parallel. `reward: {right: 1.0, brief: 0.2}` combines rewards: total = Σ wᵢ · rᵢ.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, final

from posttrain.domain.errors import InfrastructureError, InputError
from posttrain.pacing.balance import balance
from posttrain.sandbox.dialects import BATCHED
from posttrain.sandbox.port import (
    RewardCall,
    RewardError,
    RewardFunction,
    Score,
    groups_of,
    part_of,
    refuse_failures,
    shortened,
    weighted,
)
from posttrain.sandbox.protocol import Answers, End, Fault, MalformedError, Opened
from posttrain.sandbox.session import (
    EndedError,
    LateError,
    Log,
    NotConfinedError,
    Provision,
    Scratch,
    Session,
    lay_out,
    source_file,
)

TRUST = "allow user namespaces in the kernel, or trust the workspace's rewards: posttrain init --rewards trusted"
LOAD_TIMEOUT = 30.0  # seconds for importing the reward's source, on a busy machine
_KILLED_MOST = 3  # consecutive kills from outside that are tolerated
_PAUSE = 0.2  # seconds before a restart


class ProcessReward:
    """A reward function in a worker process; see `open_reward`."""

    notes: tuple[str, ...]  # missing restrictions, as text
    confined: bool  # whether the worker has namespaces and a separate root

    def __init__(
        self,
        path: Path,
        entry: str | None,
        timeout: float,
        dialect: str,
        name: str,
        source: str = "",
        hidden: Sequence[Path] = (),
        provision: Provision | None = None,
        confined: bool = False,
    ) -> None:
        file, _, function = (entry or "").rpartition(":")
        found = source_file(path, file)
        self._timeout, self._entry, self._wanted = timeout, function or None, None if dialect == "auto" else dialect
        self._file = found.name if found.suffix == ".py" else Path(source or "reward.py").name
        self._name = name or f"reward {source or found.name}"
        self._scratch = Scratch()
        self._closed, self._killed = False, 0
        self._fatal = ""  # the message of the fatal error
        self._killed_at: list[int] = []
        self._places: list[int] = []
        self._log = Log()
        self._session: Session | None = None
        try:
            given = provision or Provision({})
            self._network, self._secrets = given.network, given.secrets
            self._plan = lay_out(
                self._scratch.path, found, self._file, whole=path.is_dir(), hidden=hidden, provision=given
            )
            self._must_be_confined = confined
            self._opened()
        except BaseException:
            self.close()
            raise

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch; the time-out applies to each request. See `RewardFunction.score`.

        Raises:
            RewardError: more than `allowed` completions failed, or all of them; an answer is for an unknown completion.
            InfrastructureError: the process was repeatedly killed from outside.
        """
        if not len(call):
            return []
        if self._fatal:  # later calls raise the same error
            raise RewardError(self._fatal)
        if self._closed:
            raise InputError(f"{self._name} is closed; open it again to score")
        found: dict[int, Score] = {}
        self._places = list(range(len(call)) if places is None else places)
        parts = deque([list(range(len(call)))])
        while parts:
            part = parts.popleft()
            fault = self._ask(call, part, found)
            if fault:
                parts.extendleft(reversed(self._again(call, [i for i in part if i not in found], fault, found)))
            refuse_failures(found.values(), len(call) if places is None else None, allowed)
        return [found[i] for i in range(len(call))]

    def close(self) -> None:
        """Kill the worker and all its descendants, detached or not; remove its scratch folder."""
        self._closed = True
        if self._session:
            self._session.close()
            self._session = None
        self._scratch.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one request --------------------------------------------------------------------------------------------------

    def _ask(self, call: RewardCall, part: list[int], found: dict[int, Score]) -> _Fault | None:
        """Score a part into `found`. Return None if the whole part is scored, else the fault.

        A worker that was killed from outside is started again and receives the same request.
        """
        while True:
            chosen = [i for i in part if i not in found]
            given = part_of(call, chosen)
            columns = {field.name: getattr(given, field.name) for field in fields(given)}
            session = self._opened()
            waiting = {self._places[i]: i for i in chosen}  # the indices in worker messages and errors
            at = list(waiting)
            try:
                for message in session.ask({"op": "score", "at": at, **columns}, self._timeout):
                    self._take(message, waiting, found)
                self._killed, self._killed_at = 0, []
                return None
            except _PartFailedError as fault:
                return _Fault(fault.score, session.at, at[0])
            except LateError:
                self._session = None
                late = f"{self._name} took longer than its timeout of {self._timeout:g} s"
                return _Fault(Score.failure("timeout", late), session.at, at[0])
            except EndedError as error:
                self._session = None
                self._killed_at.append(session.at)
                own = self._killed_at[-3:] == [session.at] * 3 and session.at in at  # three times at one completion
                if not error.killed or (own and self.dialect not in BATCHED):
                    return _Fault(Score.failure("error", f"{self._name} {error}"), session.at, at[0])
                for i in chosen:  # all completions are scored again, so that random numbers are the same
                    found.pop(i, None)
                self._count_kill(error)
            except MalformedError as error:
                raise self._ended(f"answered {error}; the reward must not write to its worker's socket") from None
            except (ValueError, TypeError) as error:
                raise self._ended(f"received values that are not JSON: {error}; fix the data set") from None

    def _take(self, message: Any, waiting: dict[int, int], found: dict[int, Score]) -> None:
        if isinstance(message, Answers):
            for answer in message.answers:
                if answer.at not in waiting:
                    raise MalformedError("a completion that was not requested, or one completion twice")
                found[waiting.pop(answer.at)] = (
                    Score.failure("error", f"{self._name}: {answer.error}")
                    if answer.error is not None
                    else Score(answer.score, answer.components, at=answer.placed)
                )
        elif isinstance(message, Fault):
            if message.kind == "load":
                raise InputError(f"{self._name}: {message.message}")
            if message.kind == "answer":
                raise RewardError(f"{self._name}: {message.message}")
            raise _PartFailedError(Score.failure("error", f"{self._name}: {message.message}"))
        elif not isinstance(message, End):
            raise MalformedError("with a message that is not an answer")
        elif waiting:
            raise MalformedError("with an end before every completion had an answer")

    def _again(self, call: RewardCall, left: list[int], fault: _Fault, found: dict[int, Score]) -> list[list[int]]:
        """Return the next requests after a failure: smaller parts, until each failing completion is isolated.

        If a function scores one completion after another, the worker reports the completion that failed; a batched
        function is called per prompt, then per completion. A slow batch is not a hanging completion: a completion that
        timed out in the middle of a part is scored alone, with the full time-out.
        """
        if self.dialect not in BATCHED:
            culprit = next((i for i in left if self._places[i] == fault.at), None)
            if culprit is None and len(left) > 1 and fault.score.status == "timeout":  # at no completion of the part
                return [[i] for i in left]
            culprit = left[0] if culprit is None else culprit
            rest = [i for i in left if i != culprit]
            if fault.score.status == "timeout" and self._places[culprit] != fault.first:
                return [[culprit], rest] if rest else [[culprit]]
            found[culprit] = self._located(fault, call, culprit)
            return [rest] if rest else []
        if len(left) == 1:
            found[left[0]] = self._located(fault, call, left[0])
            return []
        groups = groups_of(call, left)
        return groups if len(groups) > 1 else [[i] for i in left]

    def _located(self, fault: _Fault, call: RewardCall, index: int) -> Score:
        place, message = self._places[index], fault.score.message
        where = f"completion {place} {shortened(call.completions[index])}"
        if fault.score.status == "timeout":
            act = "keep no state between completions (a possible cause), make it faster or raise reward_timeout"
            return Score.failure("timeout", f"{message} to score {where} and was killed; {act}")
        return Score.failure("error", message if f"completion {place} " in message else f"{message} on {where}")

    # --- the worker ---------------------------------------------------------------------------------------------------

    def _opened(self) -> Session:
        """Return the worker with the reward loaded, starting it if necessary."""
        while self._session is None:
            if self._closed:
                raise InputError(f"{self._name} is closed; open it again to score")
            try:
                session = Session(self._plan, self._network, self._log, self._secrets)
                if self._must_be_confined and not session.confined:
                    session.close()
                    raise InputError(f"{self._name} must be confined: {'; '.join(session.notes)}; {TRUST}")
                message = self._loaded(session)
            except EndedError as error:
                if not error.killed:
                    raise RewardError(f"{self._name} {error} while it was imported") from None
                self._count_kill(error)
                continue
            except NotConfinedError as error:
                raise InfrastructureError(f"{self._name}: {error}; check the machine's load, then retry") from None
            except LateError:
                raise RewardError(
                    f"{self._name} took longer than its timeout of {max(self._timeout, LOAD_TIMEOUT):g} s to load "
                    "and was killed; make the reward load faster, or raise reward_timeout"
                ) from None
            except MalformedError as error:
                raise RewardError(
                    f"{self._name} answered {error}; the reward must not write to its worker's socket"
                ) from None
            if self._closed:  # another thread has closed it
                session.close()
                raise InputError(f"{self._name} is closed; open it again to score")
            self._session, self.confined, self.notes = session, session.confined, session.notes
            self.dialect, self.where = message.dialect, message.where
        return self._session

    def _ended(self, why: str) -> RewardError:
        """Close the reward permanently and return the error."""
        self.close()
        self._fatal = f"{self._name} {why}"
        return RewardError(self._fatal)

    def _loaded(self, session: Session) -> Opened:
        order = {"op": "open", "file": self._file, "entry": self._entry, "dialect": self._wanted}
        try:
            answer = next(session.ask(order, max(self._timeout, LOAD_TIMEOUT)))
            if isinstance(answer, Fault):
                kind = InputError if answer.kind == "load" else RewardError
                raise kind(f"{self._name}: {answer.message}")
            if not isinstance(answer, Opened):
                raise MalformedError("with a message that is not the report of its import")
        except BaseException:
            session.close()
            raise
        return answer

    def _count_kill(self, error: EndedError) -> None:
        self._killed += 1
        if self._killed > _KILLED_MOST:
            raise InfrastructureError(
                f"{self._name} {error}, {self._killed} times in a row; check the machine's memory, then retry"
            ) from None
        time.sleep(_PAUSE)


@dataclass(frozen=True, slots=True)
class _Fault:
    """The reason why a part could not be scored as a whole."""

    score: Score
    at: int  # the completion that the worker reported
    first: int  # the first completion of the part


class _PartFailedError(Exception):
    """A part of a call could not be scored as a whole."""

    def __init__(self, score: Score) -> None:
        super().__init__(score.message)
        self.score = score


def open_reward(
    path: Path,
    entry: str | None = None,
    *,
    timeout: float,
    dialect: str | None = "auto",
    name: str = "",
    source: str = "",
    hidden: Sequence[Path] = (),
    provision: Provision | None = None,
    confined: bool = False,
) -> ProcessReward:
    """Start a worker for one reward function; the caller closes it when the job ends.

    The function may be written in any dialect of `sandbox.dialects`. It runs with a minimal environment in a cell
    (`sandbox.cell`): a read-only root with the interpreter, its environment, the reward's source and declared files; a
    bounded scratch folder as home; a network of only the declared hosts; no other processes; bounds on memory,
    processes and output. `notes` lists the restrictions that the kernel does not provide; `confined` is true if the
    kernel provides all of them. The worker and its descendants end when the reward is closed, when the reward exceeds
    its time-out, and when the thread that opened the reward ends. The function must return the same scores for the same
    call; therefore Python's and numpy's global generators are seeded from the call.

    Args:
        path: the source file, or a folder that is the reward.
        entry: `function`, `file.py:function` or `file.py:`. Without a function name, the function is `score`,
            `compute_score` or the only public function; without a file name, a folder must have `reward.py` or one
            Python file.
        timeout: seconds for each request.
        dialect: a name from `DIALECTS` if the parameter names are ambiguous; `auto`: the parameter names determine it.
        name: the reward's name in errors, e.g. `reward:exact@1`.
        source: the file's original name for error messages, if `path` is a blob named by its digest.
        hidden: folders that are empty for the reward, such as the workspace.
        provision: files, hosts and secrets that the run declares.
        confined: whether to reject the reward if the kernel cannot confine it completely.

    Raises:
        InputError: the file or function does not exist; the file is not Python; the dialect is unknown, or no dialect
            has these parameters; the reward is not confined.
        RewardError: the reward's code raises or hangs while it is imported.
        InfrastructureError: the process is repeatedly killed from outside.
    """
    return ProcessReward(path, entry, timeout, dialect or "auto", name, source, hidden, provision, confined)


@final
class ParallelReward:
    """A `RewardFunction` of equal functions, each in a separate process.

    Completions of one prompt stay together, because a function may compare them. The number of processes determines
    which *other* prompts a function gets, so a score must not depend on them.

    Args:
        functions: at least one; closed with this object.
    """

    def __init__(self, functions: Sequence[RewardFunction]) -> None:
        self._functions = tuple(functions)
        self._threads = ThreadPoolExecutor(len(self._functions), thread_name_prefix="reward")

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users, from one process."""
        return self._functions[0].notes

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch, of which at most `allowed` completions may fail; of several errors, raise the first.

        Raises:
            RewardError, InputError: see `RewardFunction`.
        """
        if len(self._functions) == 1:
            return self._functions[0].score(call, allowed, places)
        groups = groups_of(call, range(len(call)))
        shards = balance([sum(len(call.completions[i]) + 1 for i in g) for g in groups], len(self._functions)).shards
        chosen = [[i for group in shard for i in groups[group]] for shard in shards]
        asked = [
            (
                mine,
                self._threads.submit(
                    function.score, part_of(call, mine), allowed, mine if places is None else [places[i] for i in mine]
                ),
            )
            for function, mine in zip(self._functions, chosen, strict=True)
            if mine
        ]
        wait([answer for _, answer in asked])  # if one process fails, the others may still be busy
        scores: dict[int, Score] = {}
        for mine, answer in asked:
            scores |= zip(mine, answer.result(), strict=True)
        refuse_failures(scores.values(), len(call) if places is None else None, allowed)
        return [scores[i] for i in range(len(call))]

    def close(self) -> None:
        """Kill every process."""
        for function in self._functions:
            function.close()
        self._threads.shutdown(wait=True, cancel_futures=True)


@final
class WeightedReward:
    """A weighted sum of several reward functions; each scores every completion, one function after another.

    A completion on which any function fails has no score. A function that returns `None` adds nothing, as in TRL; if
    all return `None` there is no score. The sum is rounded once (`math.fsum`), so the order is irrelevant, and a single
    reward with weight 1 scores as it does alone, bit for bit.

    Args:
        parts: name → weight and function; at least one; closed with this object.
    """

    def __init__(self, parts: Mapping[str, tuple[float, RewardFunction]]) -> None:
        self._parts = {name: parts[name] for name in sorted(parts)}

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for users, from all functions, each line once."""
        return tuple(dict.fromkeys(note for _, function in self._parts.values() for note in function.notes))

    def score(self, call: RewardCall, allowed: int = 0, places: Sequence[int] | None = None) -> list[Score]:
        """Score one batch; a completion on which several rewards fail counts once.

        Raises:
            RewardError, InputError: see `RewardFunction`.
        """
        told = {name: function.score(call, allowed, places) for name, (_, function) in self._parts.items()}
        weights = {name: weight for name, (weight, _) in self._parts.items()}
        totals = [weighted(weights, {name: scores[i] for name, scores in told.items()}) for i in range(len(call))]
        refuse_failures(totals, len(call) if places is None else None, allowed)
        return totals

    def close(self) -> None:
        """Close every function."""
        for _, function in self._parts.values():
            function.close()
