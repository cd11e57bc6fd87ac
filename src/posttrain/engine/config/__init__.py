"""What jobs read. Torch-free, so that a plan can be checked on the control side.

One class per kind of stage. A field's comment gives meaning, unit and the reason for its default.
"""

from posttrain.engine.config.dataflow import DataflowConfig, TurnsConfig
from posttrain.engine.config.distillation import DistillConfig
from posttrain.engine.config.evaluation import EvaluateConfig, InitModelConfig, SuiteConfig
from posttrain.engine.config.rows import (
    DPOConfig,
    RewardModelConfig,
    RowsConfig,
    SFTConfig,
)
from posttrain.engine.config.sampling import (
    AdvantageConfig,
    CriticConfig,
    DAPOConfig,
    GroupConfig,
    GRPOConfig,
    KLConfig,
    OnPolicyConfig,
    OverlongConfig,
    PPOConfig,
    PPOKLConfig,
    ReinforcePlusPlusConfig,
    RewardKLConfig,
    SamplingConfig,
    TraceConfig,
)
from posttrain.engine.config.stages import (
    STAGE_CONFIGS,
    StageConfig,
    algorithm_config,
    config_class,
    named,
    stage_config,
)
from posttrain.engine.config.training import TrainingConfig

__all__ = [
    "STAGE_CONFIGS",
    "AdvantageConfig",
    "CriticConfig",
    "DAPOConfig",
    "DPOConfig",
    "DataflowConfig",
    "DistillConfig",
    "EvaluateConfig",
    "GRPOConfig",
    "GroupConfig",
    "InitModelConfig",
    "KLConfig",
    "OnPolicyConfig",
    "OverlongConfig",
    "PPOConfig",
    "PPOKLConfig",
    "ReinforcePlusPlusConfig",
    "RewardKLConfig",
    "RewardModelConfig",
    "RowsConfig",
    "SFTConfig",
    "SamplingConfig",
    "StageConfig",
    "SuiteConfig",
    "TraceConfig",
    "TrainingConfig",
    "TurnsConfig",
    "algorithm_config",
    "config_class",
    "named",
    "stage_config",
]
