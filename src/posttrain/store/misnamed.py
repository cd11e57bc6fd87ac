"""What to tell whoever names a run that there is not: what the word is instead, what is like it, what there is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from posttrain.domain.errors import meant
from posttrain.domain.records import ReleaseEntry

if TYPE_CHECKING:
    from posttrain.store.snapshot import Snapshot

_CHANNEL = "channel:"
_SEARCHED = 1000  # of the newest runs, for one that a person may have meant
_LISTED = 3


def no_run(now: Snapshot, word: str) -> str:
    """One line with a next action."""
    names = [record.name for record in now.channel_records()]
    channel, _, number = word.removeprefix(_CHANNEL).partition("@")
    if channel in names:
        return f"there is no run {word!r}: {_of_channel(channel, number, now.history(channel), now.channel(channel))}"
    newest = now.runs(limit=_SEARCHED)
    known = {name for run in newest for name in (run.id, run.name)}
    whole, of_a_stage, _ = word.partition("/")
    if of_a_stage and whole in known:
        hint = f" ({whole!r} is a run, and its stages are shown with it)"
    else:
        listed = ", ".join(run.id for run in newest[:_LISTED])
        hint = meant(word, known) or (f" (the newest: {listed})" if listed else " (there is none yet)")
    return f"there is no run {word!r}{hint}; `posttrain ls` shows them"


def _of_channel(channel: str, number: str, history: Sequence[ReleaseEntry], live: ReleaseEntry | None) -> str:
    """What somebody sees who took a channel, or a release of one, for a run."""
    see = f"posttrain get {channel}"
    if live is None:
        return f"{channel} is a channel, and nothing was released to it yet; see {see}"
    if not number:
        return f"{channel} is a channel, which serves release {live.sequence}{_made(live)}; see {see}"
    entry = next((one for one in history if str(one.sequence) == number), None)
    if entry is None:
        first, last = history[0].sequence, history[-1].sequence
        has = f"releases {first} to {last}" if first < last else f"release {first} only"
        return f"channel {channel} has no release {number}, it has {has}; see {see}"
    return f"that is release {number} of channel {channel}{_made(entry)}; see {see}"


def _made(entry: ReleaseEntry) -> str:
    return f", made by run {entry.run_id}: name that run" if entry.run_id else ", which no run made"
