"""Before anything runs: can the gates of a run tell what they are asked, with the items that their suites have?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from posttrain.control.deciding import measures
from posttrain.control.planning import Planned
from posttrain.decision.gates import NOT_TESTED
from posttrain.decision.looks import Look
from posttrain.decision.power import ENOUGH, PowerNote, gate_power, unknown_power
from posttrain.domain.gates import GateRule
from posttrain.domain.measures import ItemRange, compares
from posttrain.preflight.datasets import Dataset


def gates_power(
    planned: Planned, datasets: Mapping[str, Dataset], empty: bool, looks: Mapping[str, Look]
) -> Iterator[PowerNote]:
    """What each gate can tell.

    Args:
        empty: nothing is live in the channel of the release.
        looks: rule → which look at its items the run will take.
    """
    manifest = planned.manifest
    for rule in manifest.gates:
        for name in measures(rule, manifest.stage("gate"), planned.contracts):
            stage, possible = manifest.stage(name), planned.contracts[name].metrics[rule.metric]
            if possible is None:
                continue
            suite = stage.inputs.get(f"suites.{rule.metric.rpartition('/')[0]}")
            if suite is None:  # of an installed kind, which has no suites: nobody knows how many items it will measure
                continue
            data = datasets[str(suite.digest)]
            items = data.answered if compares(rule.metric) else data.items
            if data.items is None or items is None:
                continue
            note = _looked(rule, items, possible, empty, looks.get(rule.name))
            if not items:
                why = f"{rule.metric} compares with answers, and {suite.name} has none; gate the suite's reward"
                note = replace(note, refusal=why)
            repeated = (data.rows or 0) - data.items
            if note.refusal and repeated > 0:
                note = replace(note, refusal=f"{note.refusal} ({repeated} of {data.rows} rows repeat another)")
            yield note


def _looked(rule: GateRule, items: int, possible: ItemRange, empty: bool, look: Look | None) -> PowerNote:
    """The forecast at the confidence of this look; a look that is not corrected for is warned of."""
    if look is None:
        return _forecast(rule, items, possible, empty)
    judged = look.rule(rule)
    note = _forecast(judged, items, possible, empty)
    if look.spent:
        return replace(
            note, refusal=f"this would be {look.words}, of {look.budget} that the policy allows; use new items"
        )
    if judged.confidence != rule.confidence:
        return replace(
            note, assumption=f"{note.assumption}; {look.words}, judged at confidence {judged.confidence:.6g}"
        )
    if look.number == 1 or note.test == NOT_TESTED:
        return note
    corrected = replace(look, budget="corrected").rule(rule)
    needed = _forecast(corrected, items, possible, empty).needed
    said = (
        f"gate {rule.name}: this is {look.words}: with each judged at confidence {rule.confidence:g} alone, one of "
        f"{look.number} models on the threshold passes with a chance of up to {look.inflated(rule.confidence):.0%}; "
        "use new items, or set `looks` in the policy of the channel"
    )
    said += f" ({needed} items give {ENOUGH:.0%} then)" if needed is not None else ""
    return replace(note, warning="; ".join(filter(None, (note.warning, said))))


def _forecast(rule: GateRule, items: int, possible: ItemRange, empty: bool) -> PowerNote:
    """A number that cannot be computed ends no command: the gate itself will judge."""
    try:
        return gate_power(rule, items, possible, channel_empty=empty)
    except (ArithmeticError, ValueError) as error:
        return unknown_power(rule, items, f"{type(error).__name__}: {error}")
