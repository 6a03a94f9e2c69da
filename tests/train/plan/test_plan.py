"""The dry run: arithmetic, memory, and everything that keeps a run from starting."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from telescope_cli.main import main
from telescope_core.errors import ConfigError
from telescope_train.models import fit
from telescope_train.models.device import compute_dtype, machine_device
from telescope_train.models.facts import UNKNOWN_FACTS, facts_of, read_model_facts
from telescope_train.models.tiny import character_tokenizer
from telescope_train.plan.load import load_train_config
from telescope_train.plan.memory import BYTES_PER_VALUE, MemoryPlan, _reference, _training_state
from telescope_train.plan.node_checks import with_absolute_model
from telescope_train.plan.notes import notes_of
from telescope_train.plan.plan import Plan, how_activations_are_kept, make_plan
from telescope_train.plan.prepared import prepare
from telescope_train.plan.text import render_plan
from telescope_train.run import announce

QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
ENVIRONMENT = """
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward

class Echo(SingleTurnEnvironment):
    def examples(self, split):
        return ListSource([Example(id=str(split), prompt="say")])

    @reward
    def right(self, rollout, example):
        return 1.0
"""


@pytest.fixture(scope="session")
def save_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return what writes a random model with a tokenizer of characters."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from telescope_train.models.tiny import character_tokenizer

    def save(**fields: Any) -> Path:
        folder = tmp_path_factory.mktemp("saved")
        tokenizer = character_tokenizer()
        config = AutoConfig.for_model(**fields, eos_token_id=tokenizer.eos_token_id)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def saved(save_model: Callable[..., Path]) -> Path:
    return save_model(**QWEN3)


@pytest.fixture
def flags(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    shutil.copytree(saved, tmp_path / "model")
    (tmp_path / "plan_environment.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    entries = '[{"name": "plan_environment:Echo"}]'
    return [
        *("--name", "toy", "--number_of_steps", "3", "--output_dir", str(tmp_path / "runs")),
        *("--model", str(tmp_path / "model"), "--environments", entries),
        # A plan asks a worker what its environment may read, and few tests are about that.
        *("--inference_base_port", str(free_port()), "--env_isolation", "none"),
    ]


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("TELESCOPE_WORKER_TOKEN", "a token of the right length")


def plan(flags: list[str], *more: str) -> Plan:
    return make_plan(prepare(load_train_config([], [*flags, *more])))


def test_a_sound_plan_has_no_problems_and_the_right_sums(flags):
    found = plan(flags, "--group_size", "4", "--prompts_batch_size_for_trainer", "10")
    assert found.problems == ()
    assert found.rollouts_per_step == 40
    assert found.max_model_len == 512
    assert found.max_tokens_per_step == 40 * 512


def test_a_problem_of_several_lines_keeps_them(flags):
    long = "restore these settings, or start from an export of the weights of the run, with a name:"
    found = replace(plan(flags), problems=(f"{long}\n  one: 1 -> 2\n  two: 3 -> 4",))
    shown = render_plan(found).splitlines()
    assert "    one: 1 -> 2" in shown
    assert "    two: 3 -> 4" in shown
    assert max(map(len, shown)) <= 80


@pytest.mark.slow
def test_shares_follow_the_weights_and_group_sizes(flags):
    entries = [
        {"name": "plan_environment:Echo", "weight": 3},
        {"name": "elsewhere", "env_addresses": ["10.0.0.5:7000"], "group_size": 2},
    ]
    found = plan(flags, "--environments", json.dumps(entries), "--env_isolation", "auto")
    assert [share.share for share in found.environments] == [0.75, 0.25]
    assert [share.rollouts for share in found.environments] == [12 * 8, 4 * 2]


@pytest.mark.slow
def test_the_processes_of_environments_are_named(flags):
    here = {"name": "plan_environment:Echo"}
    away = {"name": "elsewhere", "env_addresses": ["10.0.0.5:7000"]}

    def processes(*entries: dict[str, object], more: list[str]) -> dict[str, int]:
        options = ("--environments", json.dumps(entries), "--env_isolation", "auto", *more)
        found = plan(flags, *options).processes
        return {part.detail: part.count for part in found if part.detail.startswith("plays")}

    elsewhere = "plays elsewhere: started at 10.0.0.5:7000"
    in_driver = f"plays {here['name']}: in the driver"
    assert processes(here, more=["--env_isolation", "none"]) == {in_driver: 0}
    assert processes(here, away, more=[]) == {f"{in_driver}'s interpreter": 1, elsewhere: 0}
    more = ["--env_isolation", "process", "--env_memory_limit_mb", "512"]
    limited = f"{in_driver}'s interpreter, at most 512 MiB each"
    assert processes({**here, "env_workers": 3}, more=more) == {limited: 3}


def test_servers_of_evals_are_named(flags):
    evals = ["--evals", '[{"name": "math-reasoning", "eval_every": 1, "top_k": 20}]']
    found = plan(flags, "--inference_num_workers", "3", "--eval_num_servers", "2", *evals)
    (server,) = (one for one in found.processes if one.name == "vLLM server")
    assert server.count == 3
    assert "the last 2 for evals" in server.detail


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], ""),
        (["--mixed_precision_dtype", "bfloat16"], ", logits in float32"),
        (
            ["--mixed_precision_dtype", "bfloat16", "--fp32_lm_head", "false"],
            ", logits in bfloat16",
        ),
        (["--inference_quantization", "fp8"], ", layers in 8 bits (fp8)"),
    ],
)
def test_the_plan_says_in_which_types_servers_compute(flags, more, expected):
    (server,) = (one for one in plan(flags, *more).processes if one.name == "vLLM server")
    assert server.detail.endswith(f"CPU each{expected}")


@pytest.mark.slow
def test_servers_of_older_versions_are_named_with_what_a_resume_keeps(flags):
    older = ["--inference_num_workers", "3", "--opponent_num_servers", "2"]
    found = plan(flags, *older)
    (server,) = (one for one in found.processes if one.name == "vLLM server")
    assert server.count == 3
    assert "2 of them for older versions (the oldest is replaced every 10 steps)" in server.detail
    assert any("divisor of opponent_update_every (10)" in note for note in found.notes)
    saved = ["--checkpoint_every", "5", "--checkpoint_keep_last", "1", "--number_of_steps", "20"]
    (note,) = (one for one in plan(flags, *older, *saved).notes if "older versions" in one)
    assert "--checkpoint_keep_every 10" in note
    kept = plan(flags, *older, *saved, "--checkpoint_keep_every", "10")
    assert not [note for note in kept.notes if "older versions" in note]


def test_the_parameter_count_is_that_of_transformers():
    import torch
    import transformers

    for extra in ({}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}):
        settings = {**QWEN3, **extra}
        with torch.device("meta"):
            model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
        assert facts_of(settings).num_parameters == sum(p.numel() for p in model.parameters())
    settings = {**QWEN3, "model_type": "llama"}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    assert facts_of(settings).num_parameters == sum(p.numel() for p in model.parameters())


MANY = ("--number_of_steps", "100")
KL_IN_REWARD = ("--kl_penalty_tau", "0.01", "--kl_in_reward", "true")
ON_EVAL = ("--environments", '[{"name": "plan_environment:Echo", "split": "eval"}]')
EVAL = '[{"name": "plan_environment:Echo", "eval_every": 1}]'
EVAL_ON_TRAIN = ("--evals", EVAL.replace("}", ', "split": "train"}'))
RANGED = ("--environments", '[{"name": "plan_environment:Echo", "reward_min": 0, "reward_max": 1}]')
ICEPOP = ("--use_tis", "true", "--tis_mode", "icepop")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (MANY, "no checkpoint is written before the last of 100 steps"),
        (MANY, "--checkpoint_every 20 --checkpoint_keep_last 2"),
        (("--batch_order", "finished"), "short answers are trained on earlier than long ones"),
        (("--batch_order", "finished"), "length_bias"),
        (
            ("--max_off_policy_steps", "3", "--max_async_rollout", "2"),
            "max_off_policy_steps (3) is never reached",
        ),
        (KL_IN_REWARD, "kl_in_reward with grpo"),
        ((*KL_IN_REWARD, "--algorithm", "dapo"), "kl_in_reward with dapo"),
        (ICEPOP, "tis_mode = 'icepop' with tis_floor = 0"),
        ((*RANGED, "--advantage_norm", "parts"), "reward_max of plan_environment:Echo clip and"),
        (ON_EVAL, 'split = "eval": the run trains on the examples that evals play of plan_env'),
        (EVAL_ON_TRAIN, "evals of plan_environment:Echo play the split that is trained on"),
    ],
)
def test_what_somebody_should_know_is_said_in_the_plan_and_at_the_start(
    flags, more, expected, capsys
):
    prepared = prepare(load_train_config([], [*flags, *more]))
    notes = notes_of(prepared)
    assert [one for one in notes if expected in one]
    assert make_plan(prepared).notes == notes
    text = " ".join(render_plan(make_plan(prepared)).split())
    assert all(one in text for one in notes)
    announce(prepared)
    said = capsys.readouterr().out
    assert all(f"note: {one}\n" in said for one in notes)


def test_a_split_that_is_trained_on_and_evaluated_is_told_once(flags):
    notes = notes_of(prepare(load_train_config([], [*flags, *ON_EVAL, "--evals", EVAL])))
    assert len([one for one in notes if "held out" in one]) == 1


@pytest.mark.parametrize(
    "more",
    [
        (),
        (*MANY, "--checkpoint_every", "10"),
        (*KL_IN_REWARD, "--advantage_norm", "batch"),
        (*KL_IN_REWARD, "--algorithm", "rloo"),
        ("--kl_penalty_tau", "0.01"),
        RANGED,
        ("--advantage_norm", "parts"),
        (*ICEPOP, "--tis_floor", "0.5"),
        ("--evals", '[{"name": "plan_environment:Echo", "eval_every": 1}]'),
    ],
)
def test_a_run_of_which_there_is_nothing_to_say_has_no_notes(flags, more):
    assert plan(flags, *more).notes == ()


def test_memory_is_sharded_over_ranks(flags):
    one, two = plan(flags).memory[0], plan(flags, "--trainer_num_workers", "2").memory[0]
    assert dict(one.parts)["Adam"] == 2 * dict(two.parts)["Adam"]
    assert one.total_bytes == sum(size for _, size in one.parts)


AUTO = ("--gradient_checkpointing", "auto")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ((), "recomputed in the backward pass, layer by layer"),
        (("--gradient_checkpointing", "false"), "all kept"),
        (AUTO, "half of the memory that is free when they start"),
        ((*AUTO, "--activation_memory_gib", "0.03"), "about 1 of 2 for a row of 4096 tokens"),
        ((*AUTO, "--activation_memory_gib", "0.04"), "about 0 of 2"),
    ],
)
def test_the_plan_says_how_many_layers_are_recomputed(flags, more, expected):
    found = plan(flags, *more)
    assert expected in found.activations
    assert expected in " ".join(render_plan(found).split())


def test_on_a_gpu_the_plan_goes_by_what_is_left_of_it(flags):
    prepared = prepare(load_train_config([], [*flags, *AUTO]))
    for gpus, said in (((2**31 + 2**30,), "about 0 of 2"), ((2**31,), "about 1 of 2")):
        on_gpu = replace(prepared, device="cuda", gpus=gpus)
        assert said in how_activations_are_kept(on_gpu)
    unknown = replace(prepared, device="cuda", gpus=(0,))
    assert "ranks measure" in how_activations_are_kept(unknown)


def test_on_a_gpu_with_room_the_plan_advises_to_recompute_less(flags):
    def said(gpu_bytes: int, *more: str) -> str:
        prepared = prepare(load_train_config([], [*flags, *more]))
        return how_activations_are_kept(replace(prepared, device="cuda", gpus=(gpu_bytes,)))

    advice = "gradient_checkpointing = 'auto' would be faster"
    assert f"only about 0 of 2 layers have to be: {advice}" in said(2**33)
    assert advice not in said(2**31)
    assert advice not in said(2**33, "--compile")
    assert advice not in said(2**33, "--gradient_checkpointing", "selective")


def test_a_model_of_another_kind_has_unknown_size_but_a_plan(flags, save_model):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 128}
    found = plan(flags, "--model", str(save_model(model_type="gpt2", **sizes)))
    assert found.num_parameters is None
    assert found.problems == ()
    assert "unknown" in render_plan(found)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--model", "./modle"], "model './modle' does not exist"),
        (["--environments", '[{"name": "plan_environment:Ech"}]'], "is not an Environment class"),
        (["--environments", '[{"name": "cuontdown"}]'], "unknown environment 'cuontdown'"),
        (
            ["--environments", '[{"name": "plan_environment:Echo", "env": {"levl": 1}}]'],
            "unknown setting 'levl'; known: none (env.levl of Echo (",
        ),
        (["--max_model_len", "1024"], "exceeds the 512 positions of the model"),
        (["--max_tokens", "512"], "must be below the length the model was made for (512)"),
        (
            ["--eval_after_training", "--evals", '[{"name": "plan_environment:No"}]'],
            "is not an Environment class",
        ),
        (
            ["--should_accept_fn", "telescope_train.rollouts.accept:has_signl"],
            "has no function 'has_signl'; did you mean has_signal?",
        ),
        (["--should_accept_fn", "keyword:nope"], "'nope'; give the name of one that it has"),
        (["--filter_gibberish"], "no token id of the model's 128 is above"),
        (
            ["--fsdp_context_parallel_size", "3", "--trainer_num_workers", "3"],
            "trainer.fsdp_context_parallel_size (3) must divide the model's 4 attention heads",
        ),
        (
            ["--use_lora", "--lora_target_modules", '["q_prj", "v_proj"]'],
            "no matrix in the decoder layers of Qwen3ForCausalLM is called q_prj; choose",
        ),
    ],
)
def test_what_keeps_a_run_from_starting_is_a_problem(flags, more, expected):
    found = plan(flags, *more)
    assert expected in "\n".join(found.problems)
    assert "The run cannot start" in render_plan(found)


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [
        (1000, "1000 B"),
        (134 * 2**30, "134 GiB"),
        (int(999.7 * 2**30), "1,000 GiB"),
        (1023 * 2**30, "1,023 GiB"),
        (1070 * 2**30, "1.04 TiB"),
        (5000 * 2**40, "5,000 TiB"),
    ],
)
def test_sizes_have_no_exponent(flags, num_bytes, shown):
    part = MemoryPlan(process="vLLM server", parts=(("weights", num_bytes),))
    found = replace(plan(flags), memory=(part,), num_parameters=1_043_000_000_000)
    words = " ".join(render_plan(found).split())
    assert f"{shown} = {shown} weights" in words
    assert "(1.04T parameters)" in words


def test_of_a_cluster_only_the_settings_are_said_to_be_in_order(flags):
    assert "The run can start on this machine." in render_plan(plan(flags))
    shown = render_plan(plan(flags, "--ray_address", "10.99.99.1:6379"))
    assert "this machine." not in shown
    said = " ".join(shown.split())
    assert "The settings are in order; the cluster at 10.99.99.1:6379 was not asked" in said
    assert max(map(len, shown.splitlines())) <= 80


def test_a_taken_port_names_the_port_and_the_setting(flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        problems = plan(flags, "--inference_base_port", str(port)).problems
    (problem,) = [one for one in problems if f"127.0.0.1:{port}" in one]
    assert f"in use by process {os.getpid()} " in problem
    assert "inference_base_port" in problem


def test_a_secret_that_could_be_guessed_is_found_before_the_start(flags, monkeypatch):
    monkeypatch.setenv("TELESCOPE_SERVER_SECRET", "guessed")
    (problem,) = plan(flags).problems
    assert "TELESCOPE_SERVER_SECRET must hold at least 16 characters, got 7" in problem


@pytest.mark.slow
def test_a_run_folder_with_something_in_it_is_kept(flags, tmp_path):
    (tmp_path / "runs" / "toy").mkdir(parents=True)
    assert plan(flags).problems == ()
    (tmp_path / "runs" / "toy" / "run.json").write_text("{}")
    assert "is not empty; give another --name, or move the folder" in plan(flags).problems[0]
    (tmp_path / "file").write_text("")
    assert "is a file" in plan(flags, "--output_dir", str(tmp_path / "file")).problems[0]


def test_the_place_of_checkpoints_is_told_in_full(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    told = dict(plan(flags, "--checkpoint_dir", "saved").outputs)["checkpoints"]
    assert told.endswith(f", in {tmp_path / 'saved' / 'toy'}")


def test_the_text_fits_80_columns(flags):
    long = [{"name": "plan_environment:Echo", "weight": 0.7}, {"name": "x" * 90, "weight": 0.3}]
    more = ["--environments", json.dumps(long), "--inference_num_workers", "3"]
    evals = ["--evals", '[{"name": "plan_environment:Echo", "eval_every": 2}]']
    for text in (render_plan(plan(flags)), render_plan(plan(flags, *more, *evals))):
        assert max(len(line) for line in text.splitlines() if " " in line.strip()) <= 80


def test_model_folders(tmp_path):
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart" / "config.json").write_text("{}")
    (tmp_path / "quickstart" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="quickstart"):
        read_model_facts(str(tmp_path / "quikstart"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_facts(str(tmp_path / "empty"))
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json.*JSON"):
        read_model_facts(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="experts"):
        facts_of({**QWEN3, "num_experts": 8})
    published = read_model_facts("somebody/model")
    assert (published.num_parameters, published.hidden_size) == (None, None)
    with pytest.raises(ConfigError, match="'runs/later'"):
        read_model_facts("runs/later")


@pytest.mark.slow
def test_a_dry_run_works_without_torch_transformers_and_ray(flags, tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'vllm', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from telescope_cli.main import main\n"
        f"main(['train', {str(tmp_path / 'run.toml')!r}, *sys.argv[1:]])\n"
    )
    (tmp_path / "run.toml").write_text("use_tis = true\n")
    done = subprocess.run(
        [sys.executable, "-c", code, *flags, "--dry-run", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rollouts_per_step"] == 128
    assert not (tmp_path / "runs").exists()


def test_the_command_refuses_in_one_message(flags, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("use_tsi = true\n")
    with pytest.raises(SystemExit) as ended:
        main(["train", str(tmp_path / "run.toml"), *flags])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "unknown setting 'use_tsi'; did you mean 'use_tis'" in said
    assert "Traceback" not in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"weights": 4, "gradients": 4, "Adam": 8}),
        (["--optimizer", "adamw_bf16"], {"weights": 4, "gradients": 4, "Adam": 4}),
        (["--optimizer", "adamw_8bit"], {"weights": 4, "gradients": 4, "Adam": 2}),
        (["--optimizer", "muon"], {"weights": 4, "gradients": 4, "Muon and Adam": 5.2}),
        (["--use_lora"], {"frozen weights": 4}),
        (
            ["--kl_penalty_tau", "0.1", "--mixed_precision_dtype", "bfloat16"],
            {"weights": 4, "gradients": 4, "Adam": 8, "reference model": 2},
        ),
        (["--kl_penalty_tau", "0.1", "--use_lora"], {"frozen weights": 4}),
        (
            ["--algorithm", "opd", "--reference_model", "a/c", "--use_lora"],
            {"frozen weights": 4, "reference model": 20},
        ),
    ],
)
def test_what_a_rank_keeps_of_the_model(flags, expected):
    """In bytes for each parameter."""
    base = ["--name", "a", "--number_of_steps", "1", "--model", "a/b"]
    config = load_train_config([], [*base, "--environments", '[{"name": "countdown"}]', *flags])
    compute = BYTES_PER_VALUE[compute_dtype(config.model.mixed_precision_dtype, "cpu")]
    other = replace(UNKNOWN_FACTS, num_parameters=5000) if "opd" in flags else None
    facts = replace(UNKNOWN_FACTS, num_parameters=1000, reference=other)
    state = _training_state(config, 1000, compute, num_matrix=700)
    state += _reference(config, facts, compute, 1)
    assert {name: size / 1000 for name, size in state} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--optimizer", "adamw_8bit"], "use 'adamw' or 'adamw_bf16'"),
        (["--optimizer_cpu_offload"], "optimizer_cpu_offload has no effect without a GPU"),
        (["--fsdp_cpu_offload"], "fsdp_cpu_offload has no effect without a GPU"),
    ],
)
def test_what_needs_a_gpu_stands_in_the_way_without_one(flags, expected):
    base = ["--name", "a", "--number_of_steps", "1", "--model", "a/b"]
    config = load_train_config([], [*base, "--environments", '[{"name": "countdown"}]', *flags])
    found = [problem for problem in make_plan(prepare(config)).problems if expected in problem]
    assert bool(found) == (machine_device() == "cpu")


def test_adapters_are_named_as_the_matrices_of_the_model_are(flags, save_model):
    sizes = {name: value for name, value in QWEN3.items() if name not in ("head_dim", "model_type")}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = ("--model", str(save_model(model_type="phi", **sizes)), "--use_lora")
    (problem,) = plan(flags, *model).problems
    assert "o_proj" in problem
    assert "dense, fc1, fc2" in problem
    assert plan(flags, *model, "--lora_target_modules", '["q_proj", "dense"]').problems == ()


def test_adapters_need_peft_before_anything_starts(flags, monkeypatch):
    monkeypatch.setattr(fit, "find_spec", lambda name: None)
    assert plan(flags).problems == ()
    (problem,) = plan(flags, "--use_lora").problems
    assert problem == "use_lora needs peft, which is not installed; install telescope-train[lora]"


def test_ranks_share_no_rows_of_a_model_with_windows_unless_there_is_a_gpu(flags, tmp_path):
    two = ("--fsdp_context_parallel_size", "2", "--trainer_num_workers", "2")
    assert plan(flags, *two).problems == ()
    path = tmp_path / "model" / "config.json"
    listed = ["sliding_attention", "full_attention"]
    changed = {"use_sliding_window": True, "sliding_window": 16, "layer_types": listed}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    found = "\n".join(plan(flags, *two).problems)
    assert ("sliding_window" in found) == (machine_device() == "cpu")
    assert ("set fsdp_context_parallel_size = 1" in found) == (machine_device() == "cpu")
    assert plan(flags).problems == ()


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' (only silu)"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 16}, "a sliding window of 16"),
        ({"mlp_only_layers": [0]}, "dense layers between those with experts"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, None),
        ({"model_type": "gemma2"}, "got a model of type 'gemma2'"),
    ],
)
def test_what_megatron_cannot_train_is_told_before_anything_starts(
    flags, tmp_path, changed, reason
):
    chosen = ("--train_backend", "megatron", "--gradient_checkpointing", "true")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    found = [one for one in plan(flags, *chosen).problems if "'fsdp'" in one]
    assert len(found) == (reason is not None)
    assert reason is None or reason in found[0]


def test_heads_that_vllm_cannot_compute_on_a_cpu_are_told(flags, tmp_path):
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": 16}))
    found = "\n".join(plan(flags).problems)
    assert ("heads of 32, 64" in found) == (machine_device() == "cpu")


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "merged; sampling is as fast"),
        (["--mixed_precision_dtype", "bfloat16"], "merged, rounded to be right on average;"),
        (["--lora_transfer", "adapter"], "compute it with every token; that slows sampling"),
        (
            ["--lora_transfer", "adapter", "--mixed_precision_dtype", "bfloat16"],
            "and in bfloat16 loses most of small changes",
        ),
    ],
)
def test_what_servers_get_of_an_adapter_is_said(flags, more, expected):
    found = plan(flags, "--use_lora", "--mixed_precision_dtype", "float32", *more)
    assert expected in " ".join(render_plan(found).split())
    assert "LoRA" not in render_plan(plan(flags))


def test_the_chat_template_is_looked_at(flags: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (own,) = folder.glob("chat_template.jinja")
    own.write_text(own.read_text() + "{# enable_thinking <think></think><tool_call> #}")
    plan = make_plan(prepare(load_train_config([], [*flags, "--enable_thinking", "false"])))
    assert not plan.problems
    assert "read: thinking as think, tool calls as hermes" in render_plan(plan)
    named = [*flags, "--tool_call_parser", "mistral", "--reasoning_parser", "none"]
    assert make_plan(prepare(load_train_config([], named))).replies == (
        "thinking as none, tool calls as mistral"
    )


@pytest.mark.parametrize(
    ("template", "more", "problem"),
    [
        ("plain", ["--enable_thinking", "true"], "enable_thinking has no effect"),
        (
            "plain",
            ["--chat_template", "chatml-keep-thinking"],
            "(chatml-keeps-thinking, deepseek-r1-keeps-thinking), got",
        ),
        ("", [], "has no chat template; set chat_template"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_a_problem(
    flags: list[str], tmp_path: Path, template: str, more: list[str], problem: str
) -> None:
    config = {"chat_template": [{"name": "default", "template": template}]}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "chat_template.jinja").unlink()
    (found,) = make_plan(prepare(load_train_config([], [*flags, *more]))).problems
    assert problem in found


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], "up to 1 version, weighted by use_tis (truncate, tis_cap 2)"),
        (["--max_async_rollout", "0"], "none: rollouts are sampled by the weights that they train"),
        (["--use_tis", "false"], "up to 1 version, not corrected: use_tis is off"),
        (
            ["--max_async_rollout", "3", "--algorithm", "dapo"],
            "up to 3 versions, corrected by the ratio in the loss",
        ),
        (
            ["--use_ppo_clip", "--ppo_clip_ref_logprobs", "batch"],
            "up to 1 version, weighted by use_tis (truncate, tis_cap 2)",
        ),
        (
            ["--use_ppo_clip", "--ppo_clip_ref_logprobs", "batch", "--use_tis", "false"],
            "up to 1 version, not corrected: use_tis is off",
        ),
        (
            ["--use_ppo_clip", "--use_decoupled_loss"],
            "up to 1 version, weighted by use_decoupled_loss",
        ),
        (
            ["--max_async_rollout", "0", "--inference_quantization", "fp8"],
            "none: rollouts are sampled by the weights that they train, in 8 bits, "
            "weighted by use_tis (truncate, tis_cap 2)",
        ),
        (
            ["--algorithm", "dapo", "--inference_quantization", "fp8"],
            "up to 1 version, in 8 bits, corrected by the ratio in the loss",
        ),
    ],
)
def test_the_plan_says_how_old_rollouts_are_and_what_corrects_for_it(flags, more, expected):
    assert make_plan(prepare(load_train_config([], [*flags, *more]))).age_of_rollouts == expected


@pytest.mark.slow
def test_the_plan_shows_the_secrets_that_environments_read(flags, tmp_path, monkeypatch):
    own = 'secrets = ("ECHO_KEY", "OTHER_KEY")\n\n    def examples'
    (tmp_path / "plan_environment.py").write_text(ENVIRONMENT.replace("def examples", own))
    monkeypatch.setenv("ECHO_KEY", "hunter2")
    monkeypatch.delenv("OTHER_KEY", raising=False)
    sys.modules.pop("plan_environment", None)
    for isolation in ("none", "process"):
        found = plan(flags, "--env_isolation", isolation)
        assert found.problems == ()
        assert found.secrets == {"plan_environment:Echo": {"ECHO_KEY": True, "OTHER_KEY": False}}
        text = render_plan(found)
        assert "secrets: ECHO_KEY (set), OTHER_KEY (not set)" in text
        assert "hunter2" not in text


def test_workers_elsewhere_get_no_secrets_so_none_are_shown(flags):
    entry = '[{"name": "elsewhere", "env_addresses": ["10.0.0.5:7000"]}]'
    assert plan(flags, "--environments", entry, "--env_isolation", "auto").secrets == {}


def test_a_model_whose_files_lack_a_tensor_cannot_start(flags, tmp_path):
    from safetensors.torch import load_file, save_file

    path = tmp_path / "model" / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if "1.mlp.down" not in name}
    save_file(kept, path, metadata={"format": "pt"})
    (problem,) = plan(flags).problems
    assert "model.layers.1.mlp.down_proj.weight" in problem


@pytest.mark.parametrize(
    ("more", "is_said"),
    [
        (["--model_dtype", "bfloat16"], True),
        (["--model_dtype", "bfloat16", "--learning_rate", "1e-3"], False),
        (["--model_dtype", "bfloat16", "--use_lora", "true"], False),
        ([], False),
    ],
)
def test_steps_too_small_for_the_dtype_of_the_weights_are_said(flags, more, is_said):
    notes = notes_of(prepare(load_train_config([], [*flags, *more])))
    assert any("bfloat16" in note and "float32" in note for note in notes) == is_said


OPD = ["--algorithm", "opd", "--group_size", "1", "--reference_model"]


@pytest.fixture(scope="session")
def teacher(save_model) -> Path:
    return save_model(**{**QWEN3, "hidden_size": 96, "num_hidden_layers": 3, "vocab_size": 160})


def problems_beside(flags, reference, *more) -> list[str]:
    prepared = prepare(load_train_config([], [*flags, *OPD, str(reference), *more]))
    return list(prepared.problems)


def test_a_plan_names_the_teacher_and_counts_it(flags, teacher):
    prepared = prepare(load_train_config([], [*flags, *OPD, str(teacher)]))
    assert not prepared.problems
    plan = make_plan(prepared)
    text = render_plan(plan)
    assert f"with the reference {teacher}" in " ".join(text.split()).replace("/ ", "/")
    size = prepared.facts.reference.num_parameters
    assert size > prepared.facts.num_parameters
    parts = dict(plan.memory[0].parts)
    assert parts["reference model"] == 4 * size
    assert any(name.startswith("algorithm.reference_model: ") for name in prepared.inputs)


def test_another_tokenizer_is_refused_with_what_differs(flags, teacher, tmp_path):
    other = shutil.copytree(teacher, tmp_path / "other")
    text = json.loads((other / "tokenizer.json").read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(text))
    (found,) = problems_beside(flags, other)
    own = character_tokenizer().get_vocab()
    assert f"of the model's {len(own)} tokens, 2 have another id there or none" in found
    assert f"'a' ({own['a']}), 'b' ({own['b']})" in found


def test_fewer_rows_or_positions_than_the_model_are_refused(flags, save_model):
    few = save_model(**{**QWEN3, "vocab_size": 110})
    (found,) = problems_beside(flags, few)
    assert "has 110 rows for tokens and the model 128" in found
    short = save_model(**{**QWEN3, "max_position_embeddings": 64})
    assert any(
        "was made for 64 positions, and samples may have" in one
        for one in problems_beside(flags, short)
    )


def test_a_folder_that_is_no_model_is_named(flags, tmp_path):
    assert all("reference_model" in one for one in problems_beside(flags, tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    (found,) = problems_beside(flags, tmp_path / "empty")
    assert found.startswith("algorithm.reference_model")


def test_ranks_get_absolute_paths(flags, teacher, monkeypatch):
    monkeypatch.chdir(teacher.parent)
    config = with_absolute_model(load_train_config([], [*flags, *OPD, teacher.name]))
    assert config.algorithm.reference_model == str(teacher)
