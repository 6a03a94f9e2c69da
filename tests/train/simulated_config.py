"""The settings of a simulated run of small batches whose rollouts may be long."""

from typing import Any

from telescope_train.config.schema import TrainConfig


def small_batches(*, steps: int, **sections: Any) -> TrainConfig:
    """Return them for a number of steps, with further sections."""
    return TrainConfig.model_validate(
        {
            "run": {"name": "simulated", "number_of_steps": steps},
            "model": {"model": "none"},
            "environments": [{"name": "simulated"}],
            "rollout": {
                "group_size": 4,
                "prompts_batch_size_for_trainer": 4,
                "max_tokens": 32_768,
                "rollout_timeout_s": 360_000.0,
            },
            "trainer": {"seq_len": 65_536},
            "scheduling": {"follow_kv_cache_use": False},
            **sections,
        }
    )
