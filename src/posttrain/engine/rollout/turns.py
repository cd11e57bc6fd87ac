"""Samples of one or several turns on one rank of the rollout, from their first generation to whole groups.

A sample with several turns is one sequence, in which an environment replies to each response except the last one:

::

    generation ─▶ response ─▶ the last turn, or cut at its limit ─────▶ ended
                      │
                      └─▶ waits for the reply ─▶ the end, or a fault ─▶ ended
                                   └─▶ an observation ─▶ the next generation, in the same session of the engine

No sample waits for another one: the next turn of a sample begins as soon as its reply arrives. The exception is an
engine without sessions, which decodes the waiting generations as one batch. There, the next turns begin when all
replies have arrived, so that no clock decides which samples are in a batch. A group is passed on when all its samples
have ended.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import final

from posttrain.domain.canonical import derive_seed
from posttrain.engine.rollout.port import Generation, OpenSample, Reply, SamplingParams
from posttrain.engine.samples import Group, Trajectory, groups_of

_Place = tuple[int, int]  # key and sample


@final
class Conversations:
    """The groups of one rank that have not been passed on.

    Args:
        samples: number of samples of each prompt.
        turns: maximum number of responses of a sample.
        sampling: of the first turns; a later turn has its own seed, derived from this one and the turn.
        together: whether next turns begin together.
    """

    def __init__(self, samples: int, turns: int, sampling: SamplingParams, *, together: bool = False) -> None:
        self._samples, self._turns, self._sampling, self._together = samples, turns, sampling, together
        self._ready: list[Generation] = []  # next turns that have not begun
        self._ended: dict[int, dict[int, Trajectory]] = {}  # key → sample → its sequence
        self._waiting: dict[_Place, Trajectory] = {}
        self._observed: dict[_Place, tuple[Trajectory, tuple[int, ...]]] = {}  # sequences that are being continued
        self._came: list[OpenSample] = []
        self._over: list[str] = []
        self._later: dict[int, SamplingParams] = {}  # of later turns
        self.sampling = 0  # number of unanswered generations

    @property
    def any(self) -> bool:
        """Whether there is a group."""
        return bool(self._ended)

    @property
    def resting(self) -> bool:
        """Whether nothing can be sampled before a reply arrives."""
        return bool(self._waiting) and not self.sampling

    def begin(self, keys: Collection[int], work: Sequence[Generation]) -> list[Generation]:
        """Begin groups; return their generations, with sessions if a sample has several turns."""
        self._ended |= {key: {} for key in keys}
        self.sampling += len(work)
        return [replace(one, session=_session(one.key, one.sample)) for one in work] if self._turns > 1 else list(work)

    def replied(self, replies: Sequence[Reply], call: int) -> list[Generation]:
        """Return the next generations of samples that were observed; samples without an observation end.

        A reply to a turn that no sample waits for is ignored: a process that was lost had sampled the turn, this one
        samples it again, and the reply will come again.

        Args:
            call: a number for the ids of the generations.
        """
        for reply in replies:
            place = reply.key, reply.sample
            so_far = self._waiting.get(place)
            if so_far is None or len(so_far.turns) != reply.turn:
                continue
            del self._waiting[place]
            if reply.observed is None:
                self._end(place, so_far.ended("error", reply.fault) if reply.fault else so_far)
                continue
            self._observed[place] = so_far, reply.observed
            tokens = (*so_far.prompt.tolist(), *so_far.response.tolist(), *reply.observed)
            drawn = self._sampled_at(reply.turn)
            words = _session(*place), tokens, reply.key, drawn, drawn.max_new_tokens, reply.sample
            self._ready.append(Generation(*words, session=_session(*place)))
        if self._together and (self._waiting or self.sampling):
            return []
        found = [
            replace(one, id=f"{call}.{one.id}") for one in sorted(self._ready, key=lambda one: (one.key, one.sample))
        ]
        self._ready = []
        self.sampling += len(found)
        return found

    def take(self, answers: Sequence[tuple[Generation, Trajectory]]) -> None:
        """Take the answers of an engine."""
        self.sampling -= len(answers)
        for asked, answer in answers:
            place = asked.key, asked.sample
            so_far, observed = self._observed.pop(place, (None, ()))
            whole = answer if so_far is None else so_far.went_on(observed, answer)
            if whole.status == "ok" and len(whole.turns) < self._turns:
                self._waiting[place] = whole
                self._came.append(OpenSample(*place, whole))
            else:
                self._end(place, whole)

    def passed(self) -> tuple[tuple[Group, ...], tuple[OpenSample, ...], list[str]]:
        """Return whole groups, samples that have begun to wait, and sessions that have ended; each of them once."""
        whole = [key for key, samples in self._ended.items() if len(samples) == self._samples]
        ended = {key: self._ended.pop(key) for key in whole}
        rows = [ended[key][sample] for key in whole for sample in range(self._samples)]
        came, over, self._came, self._over = self._came, self._over, [], []
        return groups_of(rows, whole, self._samples), tuple(came), over

    def _sampled_at(self, turn: int) -> SamplingParams:
        if turn not in self._later:
            self._later[turn] = replace(self._sampling, seed=derive_seed(self._sampling.seed, "turn", turn))
        return self._later[turn]

    def _end(self, place: _Place, whole: Trajectory) -> None:
        key, sample = place
        self._ended[key][sample] = whole
        if self._turns > 1:
            self._over.append(_session(key, sample))


def _session(key: int, sample: int) -> str:
    return f"{key}.{sample}"
