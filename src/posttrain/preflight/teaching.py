"""Before anything runs: does a teacher speak the student's language?

Before anything runs: does the model that is to judge responses score them?
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN, kind_of
from posttrain.domain.manifest import InputRef, Manifest, StageManifest
from posttrain.domain.rendering import is_classifier
from posttrain.preflight.fitting import model_files, origin, word_of
from posttrain.preflight.placing import stored_config, vocabulary_of
from posttrain.preflight.rewarding import bytes_of
from posttrain.workspace.opened import OpenWorkspace

_JUDGE = "reward_model"
_SLOT, _TOKENIZER = "teacher", "tokenizer.json"


def refuse_judges_without_scores(
    manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None
) -> None:
    """Refuse a stage whose `reward_model` makes text: every response would be worth the same.

    What a channel serves is known once the stage is bound; its job asks then.

    Args:
        source: the run file or lock, for errors.
        model: how the run file names its base model; None: it is in the store.

    Raises:
        InputError: naming file, stage and judge.
    """
    for stage in manifest.stages:
        if _JUDGE in stage.inputs and scores(manifest, stage, _JUDGE, workspace, source, model) is False:
            raise InputError(
                f"{source}: stages.{stage.name}.{_JUDGE}: must score responses, got {stage.inputs[_JUDGE].name}, which "
                "is no sequence classifier; name a stage of kind reward_model, or a model that such a stage made"
            )


def scores(
    manifest: Manifest, stage: StageManifest, slot: str, workspace: OpenWorkspace, source: Path, model: str | None
) -> bool | None:
    """Whether the model in a slot scores responses; None where nobody knows yet."""
    ref = stage.inputs[slot]
    if ref.source == "stage":
        made = manifest.stage(ref.name).kind
        return kind_of(made).scores if made in OWN else None
    config, _ = stored_config(ref, workspace, source, model)
    return is_classifier(config) if config else None


def check_teachers(
    manifest: Manifest, workspace: OpenWorkspace, source: Path, model: str | None = None
) -> Iterator[str]:
    """Refuse a stage whose `teacher` makes no text, has other tokens than the student, or has not so many as it asks;
    yield a warning where both are one model.

    What nobody knows yet (a channel's model, a tokenizer without `tokenizer.json`, one of two models made in this run)
    the stage's job asks.

    Args:
        source: the run file or lock, for errors.
        model: how the run file names its base model; None: it is in the store.

    Raises:
        InputError: naming file, stage and teacher.
    """
    for stage in manifest.stages:
        if _SLOT in stage.inputs:
            asked = _Asked(manifest, stage, workspace, source, model)
            fault = asked.scores() or asked.speaks_otherwise() or asked.has_fewer()
            if fault:
                raise InputError(f"{source}: stages.{stage.name}.{fault}")
            yield from asked.is_the_student()


class _Asked:
    """One stage's teacher, and its student."""

    def __init__(
        self, manifest: Manifest, stage: StageManifest, workspace: OpenWorkspace, source: Path, model: str | None
    ) -> None:
        self._manifest, self._stage, self._workspace = manifest, stage, workspace
        self._source, self._model, self._name = source, model, stage.inputs[_SLOT].name

    def scores(self) -> str:
        """Why it makes no text."""
        if not scores(self._manifest, self._stage, _SLOT, self._workspace, self._source, self._model):
            return ""
        return f"{_SLOT}: must make text, got {self._name}, which scores responses; name a model that a policy can be"

    def speaks_otherwise(self) -> str:
        """Why its tokens are not the student's."""
        began = [origin(self._manifest, self._stage, slot) for slot in ("model", _SLOT)]
        if len({type(one) for one in began}) > 1:  # one is made in this run, the other is there: the job compares them
            return ""
        found = [self._tokens(one) for one in began]
        if None in found or found[0] == found[1]:
            return ""
        sizes = " and ".join(str(len(tokens or ())) for tokens in found)
        return (
            f"{_SLOT}: must have the student's tokenizer, got {self._name}, which has another (vocabularies of {sizes} "
            "tokens); name a model of the student's family"
        )

    def has_fewer(self) -> str:
        """Why there are not so many tokens to be the likeliest."""
        asked = self._stage.params.get("top_k")
        sizes = [size for slot in ("model", _SLOT) if (size := self._size(slot))]
        if not isinstance(asked, int) or not sizes or asked <= min(sizes):
            return ""
        return f"top_k: must be at most {min(sizes)}, the tokens of the vocabulary, got {asked}; lower it"

    def is_the_student(self) -> Iterator[str]:
        """A warning: from a copy of itself, which the student is at first, it learns nothing."""
        student, teacher = self._stage.inputs.get("model"), self._stage.inputs[_SLOT]
        if student is None or student.source != teacher.source:
            return
        told = (student.word, teacher.word) if student.source == "stage" else (student.digest, teacher.digest)
        if told[0] and told[0] == told[1]:
            yield f"{self._stage.name}: teacher {teacher.word} is the model that is trained, so nothing will be learnt"

    def _size(self, slot: str) -> int | None:
        began = origin(self._manifest, self._stage, slot)
        if isinstance(began, StageManifest):
            return vocabulary_of(began)
        config, _ = stored_config(began, self._workspace, self._source, self._model)
        size = {**config, **(config.get("text_config") or {})}.get("vocab_size")
        return size if isinstance(size, int) else None

    def _tokens(self, began: InputRef | StageManifest) -> Mapping[str, Any] | None:
        """Token → id, as far as a plan can tell; of a model made from nothing its characters."""
        if isinstance(began, StageManifest):
            characters = began.params.get("characters")
            return dict.fromkeys(str(characters)) if characters else None
        word = word_of(began, self._model)
        if began.digest is None or (word is None and not self._workspace.blobs.has(began.digest)):
            return None
        with bytes_of(began):
            read = model_files(self._workspace, began, word, self._source.parent).read
            return _vocabulary(read(_TOKENIZER))


def _vocabulary(data: bytes | None) -> Mapping[str, Any] | None:
    try:
        found = json.loads(data or b"null")
        known, added = found["model"]["vocab"], found.get("added_tokens") or []
        tokens = known if isinstance(known, dict) else {token: at for at, (token, _) in enumerate(known)}
        return {**tokens, **{each["content"]: each["id"] for each in added}}
    except (ValueError, TypeError, KeyError):  # the job, which loads it, says what is wrong with it
        return None
