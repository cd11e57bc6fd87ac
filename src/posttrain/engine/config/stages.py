"""The configuration of every kind of stage that the engine carries out, by the kind's name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from posttrain.domain.errors import InputError
from posttrain.domain.kinds import OWN, AlgorithmSpec, Driver, StageKind, installed_kind
from posttrain.engine.config.evaluation import EvaluateConfig, InitModelConfig
from posttrain.engine.config.rows import RowsConfig
from posttrain.engine.config.sampling import SamplingConfig
from posttrain.engine.config.training import TrainingConfig

StageConfig = TrainingConfig | EvaluateConfig | InitModelConfig


def named(path: str) -> Any:
    """What a `module:Name` names; its module is imported.

    Raises:
        ImportError, AttributeError: there is no such thing.
    """
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def algorithm_config(spec: AlgorithmSpec) -> type[TrainingConfig]:
    """The parameters of a kind that trains.

    Raises:
        InputError: the spec names something else.
    """
    found = named(spec.config)
    if not (isinstance(found, type) and issubclass(found, RowsConfig | SamplingConfig)):
        raise InputError(
            f"algorithm {spec.algorithm}: its parameters must be a RowsConfig or a SamplingConfig, got {spec.config}; "
            "begin with one"
        )
    return found


def _own(kind: StageKind) -> type[StageConfig]:
    if kind.algorithm:
        return algorithm_config(kind.algorithm)
    return EvaluateConfig if kind.measures else InitModelConfig


STAGE_CONFIGS: dict[str, type[StageConfig]] = {
    name: _own(kind) for name, kind in OWN.items() if kind.driver is Driver.JOB
}


def config_class(kind: str) -> type[StageConfig] | None:
    """What a stage's parameters are; None: the engine has no such kind.

    Raises:
        InputError: the package that it comes from is broken.
    """
    own = STAGE_CONFIGS.get(kind)
    found = None if own else installed_kind(kind)
    if found is None or found.kind.algorithm is None:
        return own
    with found.plugin.calling(f"loading {found.kind.algorithm.config}"):
        return algorithm_config(found.kind.algorithm)


def stage_config(kind: str, params: dict[str, Any]) -> StageConfig:
    """Validate the parameters of a stage.

    Raises:
        InputError: an unknown kind.
        pydantic.ValidationError: an unknown or ill-typed parameter.
    """
    found = config_class(kind)
    if found is None:
        raise InputError(f"kind must be one that the engine carries out, got {kind!r}; see posttrain plan")
    config: StageConfig = found.model_validate(params)
    return config
