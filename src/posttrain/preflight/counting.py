"""How many documents a data set of a run file has, before anything runs."""

from __future__ import annotations

from pathlib import Path

from posttrain.control.planning import Count
from posttrain.data.rows import demonstrations
from posttrain.domain.manifest import InputRef
from posttrain.domain.runspec import RunSpec
from posttrain.preflight.fitting import read_dataset
from posttrain.workspace.opened import OpenWorkspace


def registered_rows(workspace: OpenWorkspace, ref: InputRef) -> int | None:
    """Rows of a registered data set; None: it is not registered."""
    metas = [asset.meta for asset in workspace.ledger.assets_by_digest(str(ref.digest)) if "rows" in asset.meta]
    return int(metas[0]["rows"]) if metas else None


def counter(workspace: OpenWorkspace, spec: RunSpec, source: Path) -> Count:
    """Counts the data sets of a run file.

    Args:
        source: the file; relative paths in it start at its folder.
    """

    def count(ref: InputRef, word: str, turns: bool) -> int:
        known = None if turns else registered_rows(workspace, ref)
        if known is not None:
            return known
        rows = read_dataset(workspace, ref, spec.data[word], source.parent)
        return sum(map(demonstrations, rows)) if turns else len(rows)

    return count
