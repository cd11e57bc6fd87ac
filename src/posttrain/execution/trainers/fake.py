"""A trainer without an engine: any stage kind, any parameters. For tests of code that uses trainers."""

from collections.abc import Mapping
from typing import Any, ClassVar

from posttrain.domain.canonical import digest_json
from posttrain.domain.errors import InputError
from posttrain.domain.jobs import JobCommand, JobOrder, JobResult
from posttrain.domain.kinds import RATE, ItemRange, StageContract, kind_of
from posttrain.store.attempts import AttemptFolder

_INPUTS = {"model": "model", "data": "dataset", "reward": "reward"}  # parameter → asset kind


class FakeTrainer:
    """Every stage trains a model, except kind `evaluate`, which measures the metrics in its parameters.

    `metrics: [NAME, …]` are rates; `means: {NAME: [low, high]}` are means, `null` without a declared range.

    Args:
        module: the module that compiled jobs run.
    """

    name: ClassVar[str] = "fake"

    def __init__(self, module: str = "posttrain_fake_job") -> None:
        self._module = module

    def code_digest(self) -> str:
        """See `Trainer.code_digest`."""
        return digest_json({"trainer": self.name, "module": self._module})

    def check(self, kind: str, params: Mapping[str, Any]) -> StageContract:
        """See `Trainer.check`; only parameters that are not JSON are rejected."""
        try:
            digest_json(dict(params))
        except InputError as error:
            raise InputError(f"{kind}: {error}") from error
        inputs = {key: (asset, str(params[key])) for key, asset in _INPUTS.items() if key in params}
        measures = kind_of(kind).measures
        return StageContract(
            params={key: key if key in inputs else value for key, value in params.items()},
            inputs=inputs,
            outputs={"metrics": "file"} if measures else {"model": "tree"},
            metrics=_metrics(params) if measures else {},
            work={"steps": float(params.get("steps", 1))},
        )

    def devices(self, kind: str, params: Mapping[str, Any]) -> int:
        """See `Trainer.devices`; the number is the stage's parameter `devices`."""
        return int(params.get("devices", 0))

    def compile(self, order: JobOrder) -> JobCommand:
        """See `Trainer.compile`."""
        return JobCommand(self._module, devices=self.devices(order.kind, order.params))

    def collect(self, attempt: AttemptFolder) -> JobResult | None:
        """See `Trainer.collect`."""
        return attempt.read_result()


def _metrics(params: Mapping[str, Any]) -> dict[str, ItemRange | None]:
    means = {name: ends and ItemRange(*ends) for name, ends in params.get("means", {}).items()}
    return {**dict.fromkeys(params.get("metrics", ()), RATE), **means}
