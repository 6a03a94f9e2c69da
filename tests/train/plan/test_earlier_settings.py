"""Settings of earlier versions: answered where they are written, read where a run recorded them."""

import json
import sys
from pathlib import Path

import pytest
from tests.train.plan.test_fork import a_run, changed

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_train.checkpoints.resume import resume_point
from telescope_train.config.earlier import FREE, ONE_VALUE, TAKEN_IN
from telescope_train.config.fields import decided
from telescope_train.plan.fork import load_fork

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import config_of, records_of

MASKED = "--seq_is_masking"
MEGATRON = ("--train_backend", "megatron", "--megatron_gradient_checkpointing", "false")
ALL_FLOAT32 = {
    f"megatron.megatron_{name}_dtype": "float32"
    for name in ("main_grads", "main_params", "exp_avg", "exp_avg_sq")
}
RECORDED = {
    **ONE_VALUE,
    **dict.fromkeys(FREE),
    "algorithm.seq_is_mask_low": 0.8,
    "algorithm.seq_is_mask_high": 1.2,
    "weights.weight_broadcast_mode": "bucket",
    "weights.weight_broadcast_cpu_staging": False,
    "weights.weight_broadcast_pin_memory": True,
    "inference.max_num_batched_tokens": None,
    "megatron.megatron_use_precision_aware_optimizer": False,
    **ALL_FLOAT32,
}
"""What a run recorded of settings that are gone if nobody set them."""
STAGED = {"weights.weight_broadcast_cpu_staging": True}
AWARE = {"megatron.megatron_use_precision_aware_optimizer": True}


def of_optimizer(name: str, dtype: str):
    flags = ("--megatron_optimizer_dtypes", json.dumps({name: dtype}))
    return {**AWARE, f"megatron.megatron_{name}_dtype": dtype}, (*MEGATRON, *flags)


SET: dict[str, tuple[dict[str, object], tuple[str, ...]]] = {
    **{name: ({name: value}, ()) for name, value in ONE_VALUE.items()},
    **{name: ({name: "mine"}, ()) for name in FREE},
    "algorithm.seq_is_mask_low": (
        {"algorithm.seq_is_mask_low": 0.5},
        (MASKED, "--seq_is_mask_range", "[0.5, 1.2]"),
    ),
    "algorithm.seq_is_mask_high": (
        {"algorithm.seq_is_mask_high": 3.0},
        (MASKED, "--seq_is_mask_range", "[0.8, 3.0]"),
    ),
    "weights.weight_broadcast_mode": (
        {"weights.weight_broadcast_mode": "per_tensor"},
        ("--weight_broadcast_bucket_mb", "0"),
    ),
    "weights.weight_broadcast_cpu_staging": (STAGED, ("--weight_broadcast_staging", "pinned")),
    "weights.weight_broadcast_pin_memory": (
        {**STAGED, "weights.weight_broadcast_pin_memory": False},
        ("--weight_broadcast_staging", "pageable"),
    ),
    "inference.max_num_batched_tokens": (
        {"inference.max_num_batched_tokens": 64},
        ("--vllm_arguments", '["--max-num-batched-tokens", "64"]'),
    ),
    "megatron.megatron_use_precision_aware_optimizer": (
        AWARE,
        (*MEGATRON, "--megatron_optimizer_dtypes", "{}"),
    ),
    "megatron.megatron_main_grads_dtype": of_optimizer("main_grads", "bfloat16"),
    "megatron.megatron_main_params_dtype": of_optimizer("main_params", "float16"),
    "megatron.megatron_exp_avg_dtype": of_optimizer("exp_avg", "fp8"),
    "megatron.megatron_exp_avg_sq_dtype": of_optimizer("exp_avg_sq", "fp8"),
}
"""Setting that is gone -> (what a run with a value of it recorded, the flags that say so today)."""


def run_of_earlier(config, given: dict[str, object]) -> RunFolder:
    """Return a run folder of `config` as a version wrote it that had the settings of `given`."""
    run = a_run(config)
    files = [run.path / "config.json", *run.checkpoints_path.glob("*/checkpoint.json")]
    for path in files:
        found = json.loads(path.read_text())
        settings = found if path.name == "config.json" else found["config"]
        for name in TAKEN_IN.values():
            section, key = name.split(".")
            if key not in ("vllm_arguments", "weight_broadcast_bucket_mb"):
                settings[section].pop(key, None)
        settings["inference"]["vllm_arguments"] = []
        settings["weights"]["weight_broadcast_bucket_mb"] = 256
        for name, value in {**RECORDED, **given}.items():
            section, key = name.split(".")
            settings[section][key] = value
        path.write_text(json.dumps(found))
    path = run.path / "settings.json"
    found = json.loads(path.read_text())
    names_now = {*TAKEN_IN.values()}
    found["set"] = [name for name in found["set"] if name not in names_now] + [*given]
    path.write_text(json.dumps(found))
    return run


def test_every_setting_that_is_gone_is_tried():
    assert {*SET} == {*RECORDED} == {*ONE_VALUE, *FREE, *TAKEN_IN}


@pytest.mark.slow
@pytest.mark.parametrize("name", SET)
def test_a_setting_that_is_gone_is_answered_and_its_runs_go_on(name, tiny, tmp_path):
    given, flags = SET[name]
    with pytest.raises(ConfigError) as refused:
        config_of(tmp_path, tiny, f"--{name}", str(given[name]))
    assert name.partition(".")[2] in str(refused.value)
    assert "did you mean" not in str(refused.value)
    assert TAKEN_IN.get(name, "").partition(".")[2] in str(refused.value)
    config = config_of(tmp_path, tiny, *flags)
    run = run_of_earlier(config, given)
    again = config_of(tmp_path, tiny, *flags, "--resume_from_checkpoint", "latest")
    point = resume_point(again, records_of(again))
    assert point is not None
    assert (point.checkpoint.step, point.changed) == (5, ())
    assert changed(config, load_fork(run, 5)) == {}


def test_a_setting_that_the_earlier_version_did_not_know_is_no_change(tiny, tmp_path):
    run = a_run(config_of(tmp_path, tiny))
    path = run.checkpoints_path / "step-000005" / "checkpoint.json"
    found = json.loads(path.read_text())
    del found["config"]["scheduling"]["batch_order"], found["config"]["trainer"]["grad_clip"]
    del found["config"]["inference"]["colocate"]
    path.write_text(json.dumps(found))
    latest = ("--resume_from_checkpoint", "latest", "--grad_clip", "0.5")
    again = config_of(tmp_path, tiny, *latest)
    # What the command makes of "auto" on this machine.
    apart = decided(again.inference, colocate=False)
    again = again.model_copy(update={"inference": apart})
    point = resume_point(again, records_of(again))
    assert point is not None
    assert point.changed == ("trainer.grad_clip: 1.0 -> 0.5",)


def test_a_value_that_there_is_no_more_is_told_and_refused(tiny, tmp_path):
    config = config_of(tmp_path, tiny)
    run = run_of_earlier(config, {"trainer.fsdp_prefetch_layers": 2})
    again = config_of(tmp_path, tiny, "--resume_from_checkpoint", "latest")
    point = resume_point(again, records_of(again))
    assert point is not None
    assert point.changed == ("trainer.fsdp_prefetch_layers: 2 -> 'not set'",)
    with pytest.raises(ConfigError, match="fsdp_prefetch_layers"):
        load_fork(run, 5)


def test_a_run_without_warm_up_goes_on(tiny, tmp_path):
    config = config_of(tmp_path, tiny, "--lr_scheduler", "constant", "--warmup_steps", "0")
    run = run_of_earlier(config, {"trainer.lr_scheduler": "none"})
    assert changed(config, load_fork(run, 5)) == {}


def test_a_run_that_cut_its_stop_texts_goes_on_so_only_where_that_is_said(tiny, tmp_path):
    stop = ("--stop", '["\\n"]')
    run = a_run(config_of(tmp_path, tiny, *stop))
    for path in (run.path / "config.json", *run.checkpoints_path.glob("*/checkpoint.json")):
        found = json.loads(path.read_text())
        settings = found if path.name == "config.json" else found["config"]
        del settings["rollout"]["include_stop_str_in_output"]
        path.write_text(json.dumps(found))
    assert not load_fork(run, 5).rollout.include_stop_str_in_output
    latest = (*stop, "--resume_from_checkpoint", "latest")
    for flags, told in (
        ((), ("rollout.include_stop_str_in_output: False -> True",)),
        (("--include_stop_str_in_output", "false"), ()),
    ):
        again = config_of(tmp_path, tiny, *latest, *flags)
        point = resume_point(again, records_of(again))
        assert point is not None
        assert point.changed == told
