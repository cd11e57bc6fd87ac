"""What the ends of an edge are called: as in a run file and on the command line.

========================== ============================================================
`run:RUN/STAGE`            a stage of a run; `run:RUN` a run as a whole
`dataset:NAME@VERSION` …   a registered version: also `model:`, `reward:`, `history:`
`channel:NAME@RELEASE`     a release
`path:NAME`, `hf:ORG/NAME@REVISION`, `package.module:function`   files that only a run file names
========================== ============================================================

An edge with an empty consumer says what its producer made, one with an empty producer that nobody knows who made it.
Outputs of a stage have the names that its contract gives them.
"""

from __future__ import annotations

from typing import Final

from posttrain.domain.canonical import digest_bytes
from posttrain.domain.contracts import BEST

MANIFEST: Final = "manifest"  # slots of what is no stage: a run's manifest
PARENT: Final = "parent"  # what an asset was made from
IMPORT: Final = "import"  # the record of the outside run that an asset came from
ORIGIN: Final = "origin"  # the run or stage that made an asset
REUSED: Final = "reused"  # the stage whose results another took from the stage cache
IMPORTED: Final = "imported"  # in an asset's meta: the digest of that record
_LONGEST = 512  # characters of a name: an index entry has a most


def run_end(run_id: str) -> str:
    """`run:RUN`."""
    return f"run:{run_id}"


def stage_end(run_id: str, stage: str) -> str:
    """`run:RUN/STAGE`."""
    return f"run:{run_id}/{stage}"


def stage_of(end: str) -> tuple[str, str] | None:
    """Run and stage of `run:RUN/STAGE`; None of any other end."""
    head, _, rest = end.partition(":")
    run_id, mark, stage = rest.partition("/")
    return (run_id, stage) if head == "run" and mark else None


def release_end(channel: str, sequence: int) -> str:
    """`channel:NAME@RELEASE`."""
    return f"channel:{channel}@{sequence}"


def release_of(end: str) -> tuple[str, int] | None:
    """Channel and number of `channel:NAME@RELEASE`; None of any other end."""
    head, _, rest = end.partition(":")
    channel, mark, sequence = rest.rpartition("@")
    return (channel, int(sequence)) if head == "channel" and mark and sequence.isdecimal() else None


def source_of(name: str) -> tuple[str, str]:
    """Producer and output that the name of a stage's input means: `RUN/sft`, `run:RUN/grpo/best`, `dataset:train@1`.

    The output is empty where the name does not say it.
    """
    head, colon, rest = name.partition(":")
    run_id, mark, word = (rest if colon and head == "run" else name if not colon else "").partition("/")
    if not mark or not word:
        return named(name), ""
    stage, _, output = word.partition("/")
    return stage_end(run_id, stage), output if output == BEST else ""


def named(name: str) -> str:
    """`name`, or its beginning and digest where it is a book."""
    return name if len(name) <= _LONGEST else f"{name[: _LONGEST // 2]}…{digest_bytes(name.encode())}"
