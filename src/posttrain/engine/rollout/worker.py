"""The rollout role: samples responses, from the policy's own weights where it stands beside them, else from a copy."""

from __future__ import annotations

from typing import Literal, final

from posttrain.domain.errors import InputError, IntegrityError
from posttrain.engine.batch import Provenance
from posttrain.engine.groups.place import Place
from posttrain.engine.groups.port import Stored
from posttrain.engine.models.language_model import LanguageModel
from posttrain.engine.models.source import ModelSource
from posttrain.engine.rollout.batches import PromptBatch, Rollouts
from posttrain.engine.rollout.generating import generate
from posttrain.engine.rollout.opening import decoding_fallbacks, open_rollout
from posttrain.engine.rollout.port import RolloutEngine, SamplingParams
from posttrain.engine.samples import groups_of
from posttrain.engine.weights.view import PolicyVersion, Weights, fingerprint, load_weights


@final
class RolloutWorker:
    """One rank of the rollout role.

    Args:
        place: where it stands; a `LanguageModel` lent there is decoded from in place (an `alias` view of the policy).
        source: where it loads a copy of its own from otherwise (`gathered` views arrive by `load`).
        engine: instead of the one that fits the model, in the controller's process.
        kv_cache: bytes that keys and values may take; None: not bounded.
    """

    def __init__(
        self,
        place: Place,
        source: ModelSource | None = None,
        engine: RolloutEngine | None = None,
        *,
        kv_cache: int | None = None,
    ) -> None:
        lent = place.borrow(LanguageModel)
        model = source.open(place.device) if lent is None and source else lent
        if model is None:
            raise InputError(
                f"rollout rank {place.rank} needs a model, got none lent and no source; place it by policy"
            )
        self._view: Literal["alias", "gathered"] = "gathered" if lent is None else "alias"
        self._module = model.module
        self._engine = engine or open_rollout(model, kv_cache)
        self._fallbacks = {} if engine else decoding_fallbacks(model)
        self._rank, self._version = place.rank, PolicyVersion()
        self._say(self._version)

    def view(self) -> str:
        """`alias`: reads the policy's weights where they are; `gathered`: a copy that `load` brings up to date."""
        return self._view

    def fallbacks(self) -> dict[str, str]:
        """See `Backbone.fallbacks`."""
        return dict(self._fallbacks)

    def serve(self, version: PolicyVersion) -> str:
        """From now on say that `version` samples; for `alias` views, whose weights change in place."""
        self._say(version)
        return str(version)

    def load(self, weights: Stored[Weights]) -> str:
        """Copy a version of the policy into this engine, and prove that it arrived.

        Returns:
            The digest of what this engine now samples with.

        Raises:
            IntegrityError: the digest is not the one that was published.
        """
        arrived = weights.value()
        load_weights(self._module, arrived.tensors)
        found = fingerprint(self._module)
        if found != arrived.version.digest:
            raise IntegrityError(
                f"rollout rank {self._rank} must serve policy {arrived.version} ({arrived.version.digest[:19]}…), "
                f"got {found[:19]}…; the weights were altered on the way"
            )
        self._say(arrived.version)
        return found

    def generate(self, prompts: PromptBatch, sampling: SamplingParams, samples: int) -> Rollouts:
        """`samples` responses to every prompt.

        Raises:
            InputError, JobFailedError, IntegrityError: see `generating.generate`.
        """
        provenance = Provenance(role="rollout", rank=self._rank)
        if not len(prompts):
            return Rollouts((), provenance)
        answers = generate(
            self._engine,
            prompts.tokens,
            samples=samples,
            sampling=sampling,
            prompt_keys=prompts.keys,
            version=str(self._version),
        )
        return Rollouts(groups_of(answers, prompts.keys, samples), provenance)

    def _say(self, version: PolicyVersion) -> None:
        """From now on this version samples; nothing is in work between two calls."""
        self._engine.pause()
        self._engine.update("", str(version))
        self._engine.resume()
        self._version = version
