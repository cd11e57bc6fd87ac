"""What a stage's probe decides (`keep_best`, `early_stopping`), and what that does to evidence and release."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from posttrain.data.rows import Row, contamination
from posttrain.domain.kinds import BEST, UNCHANGED
from posttrain.domain.manifest import InputRef, Manifest, StageManifest

_SELECTED = "what was selected on rows is no evidence on them; probe other rows"
_LEARNT = "what it learnt by heart looks best; probe rows that it is not trained on"
_STEP = "best/step"  # the metric that says after which step the best model was kept


def dataset_slots(stage: StageManifest) -> list[tuple[str, InputRef]]:
    """The data a stage works through: not its reward, its model or its probe."""
    return [(slot, ref) for slot, ref in stage.inputs.items() if slot == "data" or slot.startswith("suites.")]


def selects(stage: StageManifest) -> bool:
    """Whether the stage's probe decides anything."""
    return "probe" in stage.inputs and bool(stage.params.get("keep_best") or stage.params.get("early_stopping"))


def selected_on(manifest: Manifest, rows: Mapping[str, Sequence[Row] | None]) -> Iterator[str]:
    """One warning for each probe that a stage selects by and whose rows a suite measures, or the stage trains on.

    Args:
        rows: digest of a data set → its rows; None: they were not read, so only the digests are compared.
    """
    suites = {str(ref.digest): ref for stage in manifest.stages if stage.measures for _, ref in dataset_slots(stage)}
    for stage in filter(selects, manifest.stages):
        probe, data = stage.inputs["probe"], stage.inputs["data"]
        read = rows.get(str(probe.digest))
        asked = None if read is None else read[: int(stage.params["probe"]["items"])]
        for digest, other in {**suites, str(data.digest): data}.items():
            place, known = f"{stage.name}: the probe's {probe.name}", rows.get(digest)
            trained = digest == str(data.digest)
            little = _LEARNT if trained else _SELECTED
            if digest == str(probe.digest):
                yield f"{place} is {'what the stage trains on' if trained else 'the data of a suite'}: {little}"
            elif asked is not None and known is not None:
                report = contamination(known, asked)
                if report.found:
                    yield f"{place} against {other.name}: {report}: {little}"


def choice_warnings(manifest: Manifest, metrics: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """What a run trained or its probes chose that tells or ships less than it seems to, one line each.

    Args:
        metrics: stage → what it measured, as far as it has ended.
    """
    yield from selected_on(manifest, {})
    for name, measured in metrics.items():
        if measured.get(UNCHANGED):
            yield f"{name}: no step updated weights, so what it leaves is what it began with; look at its rewards"
    if manifest.release is None:
        return
    stages = {stage.name: stage for stage in manifest.stages}
    name, _, output = manifest.release.model.partition("/")  # a manifest of before may hold a word that is refused now
    while name in stages:
        if output == BEST and metrics.get(name, {}).get(_STEP) == 0:
            yield (
                f"{name}: its best model by the probe is the one that it began with (step 0), so nothing that was "
                f"trained in {name} ships"
            )
        ref = stages[name].inputs.get("model")
        if ref is None or ref.source != "stage":
            return
        name, output = ref.name, str(ref.output)


def selected(metrics: Mapping[str, float]) -> str:
    """`probe/accuracy 0.91 at step 40`, of a stage whose probe chose; else empty."""
    found = [name for name in metrics if name.startswith("best/probe/")]
    return f"{found[0].removeprefix('best/')} {metrics[found[0]]:.4g} at step {metrics['best/step']:g}" if found else ""


def selection_words(metrics: Mapping[str, float]) -> str:
    """`best: probe/accuracy 0.91 at step 40; stopped early at step 60`; empty where no probe decided anything."""
    early = f"; stopped early at step {metrics['stopped_early/step']:g}" if "stopped_early/step" in metrics else ""
    return f"best: {selected(metrics)}{early}" if selected(metrics) else ""
