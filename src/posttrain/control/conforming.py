"""Whether a manifest is what the policy of its channel asks: gates, suites, evaluators, and who measured what.

Asked of the plan, and again of what is about to be released: a locked manifest is a file that anybody may edit, and a
policy may change while a run goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from posttrain.control.deciding import BASELINE, EVIDENCE
from posttrain.decision.releases import refuse_weaker
from posttrain.domain.contracts import MODEL
from posttrain.domain.errors import InputError
from posttrain.domain.evaluators import measured_suites, suite_evaluator
from posttrain.domain.gates import CHANNEL
from posttrain.domain.kinds import kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest, model_output
from posttrain.domain.measures import better
from posttrain.domain.policies import PinnedPolicy, suite_of

_SHOWN = 19  # characters of a digest in an error


def check_suites(stages: Iterable[StageManifest], code: Mapping[str, str], pinned: PinnedPolicy) -> None:
    """Refuse evaluations that are not what a policy asks.

    Args:
        stages: those that measure the released model.
        code: of the manifest.

    Raises:
        InputError: a suite is missing, has other data, or is measured otherwise; names the field.
    """
    found = {suite: (stage, data) for stage in stages for suite, data in measured_suites(stage)}
    whose = f"the policy of channel {pinned.channel}"
    for name, wanted in pinned.policy.suites.items():
        if name not in found:
            has = f"there is {', '.join(sorted(found))}" if found else "there is none"
            raise InputError(
                f"stages: {whose} wants suite {name!r} ({wanted.data}) measured on the released model, and {has}; "
                f"add it to an evaluate stage of that model"
            )
        stage, data = found[name]
        field = f"stages.{stage.name}.suites.{name}"
        if data.digest != wanted.digest:
            raise InputError(
                f"{field}.data: {whose} wants {wanted.data} ({str(wanted.digest)[:_SHOWN]}…), got {data.name} "
                f"({str(data.digest)[:_SHOWN]}…); use that one"
            )
        evaluator = suite_evaluator(stage, code, name)
        if wanted.evaluators != "any" and evaluator not in wanted.evaluators:
            raise InputError(
                f"{field}: {whose} wants it measured by {_listed(wanted.evaluators)}, got {evaluator[:_SHOWN]}… (its "
                "code, settings and rewards); measure it as the policy says, or have the policy name this one"
            )


def check_manifest(manifest: Manifest, pinned: PinnedPolicy) -> None:
    """Refuse a manifest that was not planned under this policy, or was edited afterwards.

    Raises:
        InputError: what is wrong with it, in one line.
    """
    if manifest.policy != pinned.digest:
        planned = f"under {manifest.policy[:_SHOWN]}…" if manifest.policy else "without one"
        raise InputError(
            f"the policy of channel {pinned.channel} is {pinned.digest[:_SHOWN]}…, and this was planned {planned}; "
            "plan the run file again"
        )
    gate = _gate(manifest)
    if gate is None:
        raise InputError(f"stages: the policy of channel {pinned.channel} wants a gate, got none; plan it again")
    own = {rule.name: rule for rule in manifest.gates}
    for rule in pinned.policy.gates:
        if rule.name not in own:
            raise InputError(f"gates: the policy of channel {pinned.channel} wants {rule.name!r}; plan it again")
        refuse_weaker(own[rule.name], rule, pinned)
    evaluators = list(_evaluators(manifest, gate))
    check_suites(evaluators, manifest.code, pinned)
    if any(rule.meets_channel for rule in pinned.policy.gates):
        _check_baselines(manifest, gate, evaluators, pinned)


def released_evaluators(manifest: Manifest) -> list[StageManifest]:
    """The stages that measure the released model, for its gates; none where nothing is released."""
    gate = _gate(manifest)
    return list(_evaluators(manifest, gate)) if gate else []


def unguarded(manifest: Manifest) -> Iterator[str]:
    """A suggestion where no gate compares the released model with another one, with the gate that would."""
    maker = manifest.stage(model_output(manifest.release.model)[0]) if manifest.release else None
    if maker is None or MODEL not in maker.inputs or any(rule.needs_baseline for rule in manifest.gates):
        return
    evaluators = released_evaluators(manifest)
    suites = [f"{suite}/accuracy" for stage in evaluators for suite, _ in measured_suites(stage)]
    gated = [rule.metric for rule in manifest.gates if better(rule.metric)]
    for metric in [*gated, *suites][:1]:
        lower = "direction: lower, " if better(metric) == "lower" else ""
        yield (
            f"none compares with another model, so one that training made worse may ship; add "
            f"{{name: no-regression, metric: {metric}, {lower}not_worse_than: base, margin: 0.02}}"
        )


def _gate(manifest: Manifest) -> StageManifest | None:
    return next((stage for stage in manifest.stages if kind_of(stage.kind).judges), None)


def _evaluators(manifest: Manifest, gate: StageManifest) -> Iterator[StageManifest]:
    """The stages whose measurements of the candidate the gate reads."""
    candidate = gate.inputs.get("candidate")
    for slot, ref in gate.inputs.items():
        if not slot.startswith(EVIDENCE):
            continue
        stage = manifest.stage(ref.name) if ref.source == "stage" else None
        if stage is None or not stage.measures or stage.inputs[MODEL] != candidate:
            raise InputError(f"stages.{gate.name}.{slot}: must measure the released model, got {ref.name}; plan again")
        yield stage


def _check_baselines(
    manifest: Manifest, gate: StageManifest, evaluators: Iterable[StageManifest], pinned: PinnedPolicy
) -> None:
    """What the policy compares with is the channel's own model, measured by the same evaluators."""
    live = InputRef(source="channel", name=pinned.channel)
    wanted = {suite_of(rule.metric) for rule in pinned.policy.gates if rule.meets_channel}
    for stage in evaluators:
        if not wanted & {suite for suite, _ in measured_suites(stage)}:
            continue
        ref = gate.inputs.get(BASELINE + stage.name)
        other = manifest.stage(ref.name) if ref is not None and ref.source == "stage" else None
        same = stage.model_copy(update={"name": other.name, "inputs": {**stage.inputs, MODEL: live}}) if other else None
        if gate.inputs.get(CHANNEL) != live or other is None or other != same:
            raise InputError(
                f"stages.{gate.name}.{BASELINE}{stage.name}: must be the same measurement of what channel "
                f"{pinned.channel} points at; plan it again"
            )


def _listed(evaluators: Iterable[str]) -> str:
    return " or ".join(f"{one[:_SHOWN]}…" for one in evaluators)
