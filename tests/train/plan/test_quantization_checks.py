"""Servers that compute in 8 bits: what corrects for it, where they are refused, how they start."""

from pathlib import Path

import pytest

from telescope_core.errors import ConfigError
from telescope_train.algorithms.corrections import algorithm_in_use
from telescope_train.inference.fleet import server_settings
from telescope_train.models import device
from telescope_train.plan.checks.cluster import weights_device_problems
from telescope_train.plan.load import load_train_config

FLAGS = ["--name", "x", "--number_of_steps", "2", "--model", "m", "--max_async_rollout", "0"]
ENVIRONMENTS = ["--environments", '[{"name": "a"}]']
BFLOAT16 = ["--mixed_precision_dtype", "bfloat16"]


def config(*more: str, kind: str = "fp8"):
    return load_train_config([], [*FLAGS, *ENVIRONMENTS, "--inference_quantization", kind, *more])


def test_tokens_are_weighted_where_nothing_else_corrects_for_8_bits():
    assert algorithm_in_use(config()).use_tis
    assert not algorithm_in_use(config(kind="none")).use_tis
    for corrected in (
        ["--algorithm", "gspo"],
        ["--use_ppo_clip"],
        ["--use_ppo_clip", "--use_decoupled_loss"],
    ):
        assert not algorithm_in_use(config(*corrected)).use_tis
    # The ratio to log-probs that the trainer recomputes says nothing of the sampler.
    recomputed = ["--use_ppo_clip", "--ppo_clip_ref_logprobs", "batch"]
    assert algorithm_in_use(config(*recomputed)).use_tis


def test_a_ratio_to_recomputed_logprobs_corrects_for_no_older_weights():
    for loss in (["--use_ppo_clip"], ["--algorithm", "cispo"], ["--algorithm", "sapo"]):
        flags = [*loss, "--ppo_clip_ref_logprobs", "batch"]
        late, in_time = (["--max_async_rollout", number] for number in "10")
        assert algorithm_in_use(config(*flags, *late, kind="none")).use_tis
        assert not algorithm_in_use(config(*flags, *in_time, kind="none")).use_tis
        several = [*in_time, "--ppo_epochs", "2"]
        assert not algorithm_in_use(config(*flags, *several, kind="none")).use_tis
        unread = ["--recompute_logprob", "false"]
        assert not algorithm_in_use(config(*flags, *late, *unread, kind="none")).use_tis


def test_a_run_in_which_nothing_corrects_for_8_bits_is_refused():
    with pytest.raises(ConfigError, match="nothing corrects for it; remove use_tis = false"):
        config("--use_tis", "false")
    assert config("--use_tis", "false", kind="none")
    for corrected in (["--seq_is_masking"], ["--algorithm", "dapo"]):
        assert config("--use_tis", "false", *corrected)


def test_layers_in_float32_are_refused():
    with pytest.raises(ConfigError, match="needs layers in bfloat16; remove"):
        config("--mixed_precision_dtype", "float32")


@pytest.mark.parametrize("flag", ["--quantization", "-q", "--quantization-config"])
def test_vllm_is_not_told_of_it_past_the_setting(flag):
    with pytest.raises(ConfigError, match="inference_quantization"):
        config("--vllm_arguments", f'["{flag}", "fp8"]')


@pytest.mark.parametrize(
    ("flags", "more", "said"),
    [
        ("amx_bf16 avx512f amx_tile amx_int8", BFLOAT16, None),
        ("amx_bf16 avx512f amx_tile amx_int8", [], "set mixed_precision_dtype = 'bfloat16'"),
        ("avx2 avx512f", BFLOAT16, "this machine has neither"),
    ],
)
def test_on_a_cpu_it_needs_amx(monkeypatch, tmp_path, flags, more, said):
    facts = tmp_path / "cpuinfo"
    facts.write_text(f"processor : 0\nflags\t\t: fpu vme {flags}\n")
    monkeypatch.setattr(device, "CPU_FACTS", facts)
    found = [one for one in weights_device_problems(config(*more), "cpu") if "quantiz" in one]
    assert bool(found) == (said is not None)
    assert all(said in one for one in found)
    assert not list(weights_device_problems(config(*more), "cuda"))
    assert not list(weights_device_problems(config(*more, kind="none"), "cpu"))


def test_a_server_rounds_in_blocks():
    for kind, expected in (("fp8", ["fp8_per_block"]), ("none", [])):
        (settings,) = server_settings(
            config(kind=kind),
            device="cuda",
            dtype="bfloat16",
            max_model_len=64,
            log_folder=Path("logs"),
        )
        arguments = settings.arguments()
        places = [n + 1 for n, one in enumerate(arguments) if one == "--quantization"]
        assert [arguments[place] for place in places] == expected
