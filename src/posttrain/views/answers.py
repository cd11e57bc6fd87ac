"""A few of a run's responses to look at: recorded training samples, and what its evaluations got wrong and right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from posttrain.control.deciding import ADDED
from posttrain.control.scores import Answered, Response, Responses, model_words, released, spread
from posttrain.domain.errors import IntegrityError, NotFoundError
from posttrain.domain.facts import Sample
from posttrain.domain.manifest import Manifest
from posttrain.domain.records import StageRecord
from posttrain.views.drawn import sampling_words
from posttrain.views.tracing import stage_attempts
from posttrain.web.report import SampledStep, StageSamples, SuiteAnswers
from posttrain.workspace.opened import OpenWorkspace

_SEGMENTS = 24  # of recorded samples that are read
_STEPS = 5  # of a stage that are shown, from the first to the last
_MEMBERS = 4  # of a group
_WRONG, _RIGHT = 24, 6  # answers of a suite
_CUT = 4_000  # characters of a text that a page is given


def stage_samples(workspace: OpenWorkspace, run_id: str, stages: Sequence[StageRecord]) -> Iterator[StageSamples]:
    """Of every stage that recorded samples: one group at a few steps, its best and its worst member among them."""
    for row in stages:
        said = [
            sample
            for _, _, folder in stage_attempts(workspace, run_id, row.name)
            for sample in folder.some_samples(_SEGMENTS)
        ]
        steps: dict[int, dict[str, dict[str, Sample]]] = {}
        for sample in said:  # of a step that was redone, the last attempt's
            steps.setdefault(sample.step, {}).setdefault(_group(sample), {})[sample.id] = sample
        known = sorted(steps)
        chosen = known if len(known) <= _STEPS else [known[n * (len(known) - 1) // (_STEPS - 1)] for n in range(_STEPS)]
        if chosen:
            groups = (next(iter(steps[step].values())) for step in chosen)
            shown = tuple(
                SampledStep(step, len(group), tuple(_members(list(group.values()))))
                for step, group in zip(chosen, groups, strict=True)
            )
            yield StageSamples(row.name, shown)


def _group(sample: Sample) -> str:
    return sample.id.rpartition(".")[0]


def _members(group: list[Sample]) -> Iterator[Sample]:
    """The best, the worst and some between them, best first; what has no score last."""
    ordered = sorted(group, key=lambda one: (one.reward is None, -(one.reward or 0.0)))
    places = range(len(ordered)) if len(ordered) <= _MEMBERS else _evenly(len(ordered), _MEMBERS)
    yield from (ordered[place] for place in places)


def _evenly(count: int, most: int) -> list[int]:
    return [place * (count - 1) // (most - 1) for place in range(most)]


def suite_answers(
    workspace: OpenWorkspace, manifest: Manifest, rows: Sequence[StageRecord], troubles: list[str]
) -> Iterator[SuiteAnswers]:
    """Wrong and right greedy answers of each suite of every evaluation that the run file asks for, the released model's
    first.

    Args:
        troubles: gets a line for what cannot be read.
    """
    records = {row.name: row for row in rows}
    evaluations = [s for s in manifest.stages if s.measures and not s.name.startswith(ADDED)]
    for stage in sorted(evaluations, key=lambda one: one.inputs["model"].word != released(manifest)):
        made = records[stage.name].outputs.get("items")
        if made is None:
            continue
        try:
            found = Responses(workspace.blobs.get(made["digest"]), stage.name)
            for suite in found.suites:
                greedy = found.greedy(suite)
                shown = _suite(found, greedy, stage.name, suite, model_words(manifest, stage.inputs["model"]))
                suites = stage.params.get("suites")  # of another kind it may be anything
                asked = suites.get(suite) if isinstance(suites, Mapping) else None
                yield replace(shown, sampled=sampling_words(asked if isinstance(asked, Mapping) else {}))
        except (IntegrityError, NotFoundError) as error:
            troubles.append(f"{stage.name}: {error}")


def _suite(found: Responses, greedy: Sequence[Answered], stage: str, suite: str, of: str) -> SuiteAnswers:
    wrong = [one for one in greedy if one.correct is False]
    right = [one for one in greedy if one.correct]
    scored = [one for one in greedy if one.correct is None and one.reward is not None]
    scored.sort(key=lambda one: one.reward or 0.0)
    shown_wrong, shown_right = spread(wrong, _WRONG), spread(right, _RIGHT)
    low, high = scored[: _WRONG // 2], scored[_WRONG // 2 :][-_RIGHT:]
    texts = found.texts({*shown_wrong, *shown_right, *low, *high})
    return SuiteAnswers(
        stage=stage,
        suite=suite,
        of=of,
        items=len(wrong) + len(right),
        wrong=len(wrong),
        cut=sum(one.truncated for one in wrong),
        wrong_shown=tuple(shortened(texts[one.row]) for one in shown_wrong),
        right_shown=tuple(shortened(texts[one.row]) for one in shown_right),
        scored=len(scored),
        low_shown=tuple(shortened(texts[one.row]) for one in low),
        high_shown=tuple(shortened(texts[one.row]) for one in reversed(high)),
    )


def shortened(one: Response) -> Response:
    """With texts of a length that a page may be given."""
    extracted = None if one.extracted is None else one.extracted[:_CUT]
    return replace(
        one, prompt=one.prompt[:_CUT], answer=one.answer[:_CUT], response=one.response[:_CUT], extracted=extracted
    )
