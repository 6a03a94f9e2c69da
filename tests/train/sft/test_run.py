import errno
import json
import math
import os
import shutil
import sys
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from telescope_core.errors import (
    ConfigError,
    EnvironmentLoadError,
    NoRoomError,
    NotWrittenError,
    TelescopeError,
)
from telescope_core.records import RunFolder
from telescope_core.reports.verdict import RunOutcome, run_verdict
from telescope_train.backends import layout_of
from telescope_train.backends.protocol import GpuMemoryError
from telescope_train.checkpoints.export import export_checkpoint
from telescope_train.checkpoints.folders import read_checkpoint
from telescope_train.models import device
from telescope_train.models.location import require_replaceable
from telescope_train.models.tiny import character_tokenizer, make_tiny_model
from telescope_train.sft import run as sft_run
from telescope_train.sft.checkpoints import resume_notes, sft_resume_point
from telescope_train.sft.config import load_sft_config
from telescope_train.sft.examples import gold_samples
from telescope_train.sft.run import backend_settings, run_sft
from telescope_train.trainer.worker import TrainerWorker

sys.path.insert(0, str(Path(__file__).parents[1]))

MEGATRON = ("--train_backend", "megatron")


def test_supervised_training_reaches_the_settings_of_megatron(config_file):
    flags = [*MEGATRON, "--trainer_num_workers", "2", "--megatron_tensor_parallel_size", "2"]
    settings = backend_settings(load_sft_config([config_file], flags))
    assert layout_of(settings).tensor == 2
    assert settings.trainer.train_backend == "megatron"
    assert settings.trainer.share_prefixes is False, "each example has a prompt of its own"


def test_a_cooldown_reaches_the_ranks_and_leaves_warm_up_what_is_left(config_file):
    config = load_sft_config([config_file], ["--number_of_steps", "12", "--cooldown_steps", "5"])
    assert (config.warmup_steps, backend_settings(config).trainer.cooldown_steps) == (7, 5)


def test_warm_up_takes_at_most_all_steps_unless_it_is_set(config_file):
    for num_steps, expected in [("3", 3), ("10", 10), ("40", 10)]:
        config = load_sft_config([config_file], ["--number_of_steps", num_steps])
        assert config.warmup_steps == expected
        assert "warmup_steps" not in config.model_fields_set


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "sft.toml"
    path.write_text(
        f"""
        model = "{tmp_path}/base"
        make_tiny_model = true
        output = "{tmp_path}/warm"
        number_of_steps = 40
        batch_size = 32
        num_examples = 200
        num_held_out = 20
        learning_rate = 3e-3
        loss_log_every = 20
        [[environments]]
        name = "toy_digits:LastDigit"
        """
    )
    return path


@pytest.fixture(scope="module", autouse=True)
def _gold_answers_are_read_once():
    """Read an environment once for all trainings that ask the same of it: each is a process."""
    read, known = sft_run.gold_samples, {}

    async def read_once(config, tokenizer, *, moment=None, **more):
        asked = (config.environments, config.num_examples, config.num_held_out, config.seq_len)
        if (name := repr(asked)) not in known:
            known[name] = await read(config, tokenizer, moment=moment, **more)
        return replace(known[name], moment=moment or datetime.now())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sft_run, "gold_samples", read_once)
        yield


@pytest.mark.slow
def test_sft_lowers_the_loss_and_learns(config_file, tmp_path):
    rows = []
    output = run_sft(load_sft_config([config_file]), on_row=rows.append)
    assert output == tmp_path / "warm"
    assert [row.step for row in rows] == [0, 20, 40]
    assert rows[-1].metrics["loss/total"] < 0.7 * rows[1].metrics["loss/total"]
    assert rows[0].accuracy < 0.01
    assert rows[-1].accuracy > 0.05
    lines = (tmp_path / "warm-log" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 20, 40]
    assert json.loads(lines[-1])["accuracy/toy_digits:LastDigit"] == rows[-1].accuracy
    assert json.loads((tmp_path / "warm-log" / "config.json").read_text())["batch_size"] == 32
    run = RunFolder.open(tmp_path / "warm-log")
    assert (run.info().name, run.info().state) == ("warm", "finished")
    assert run_verdict(run).outcome is RunOutcome.LEARNED
    assert len(AutoTokenizer.from_pretrained(output)) == 103
    assert AutoModelForCausalLM.from_pretrained(output).num_parameters() > 500_000


@pytest.mark.slow
def test_it_stops_at_the_accuracy_that_is_enough(config_file, tmp_path):
    rows = []
    flags = ["--stop_at_accuracy", "1e-12", "--loss_log_every", "2", "--checkpoint_every", "40"]
    run_sft(load_sft_config([config_file], flags), on_row=rows.append)
    assert [row.step for row in rows] == [0, 2]
    assert [one.name for one in (tmp_path / "warm-log" / "checkpoints").iterdir()] == [
        "step-000002"
    ]


@pytest.mark.slow
def test_a_model_that_is_worth_it_is_trained_on_all_cores(config_file, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "usable_cores", lambda: 3)
    found = []
    flags = ["--stop_at_accuracy", "1e-12", "--loss_log_every", "1"]
    try:
        for least in (device.WORTH_ALL_CORES, 1):
            monkeypatch.setattr(device, "WORTH_ALL_CORES", least)
            config = load_sft_config([config_file], flags)
            run_sft(config, on_row=lambda _: found.append(torch.get_num_threads()))
            shutil.rmtree(config.output)
    finally:
        torch.set_num_threads(before)
    assert found == [1, 1, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("toy_digits:NoGold", ConfigError, "has no gold answers"),
        ("toy_digits:BadGold", EnvironmentLoadError, "below the success threshold"),
        ("nowhere", ConfigError, "unknown environment 'nowhere'"),
    ],
)
def test_environments_that_cannot_be_learnt_from(config_file, tmp_path, name, error, message):
    entry = json.dumps([{"name": name}])
    with pytest.raises(error, match=message):
        run_sft(load_sft_config([config_file], ["--environments", entry]))
    assert [path.name for path in tmp_path.iterdir()] == ["sft.toml"]


@pytest.mark.slow
async def test_gold_answers_are_learned_behind_the_tools_that_rollouts_are_offered():
    env = {"tool_call_format": "native"}
    entry = json.dumps([{"name": "toy_digits:Counter", "env": env}])
    flags = ["--model", "base", "--output", "warm", "--environments", entry]
    config = load_sft_config([], [*flags, "--num_held_out", "2"])
    with pytest.raises(ConfigError, match="chat_template"):
        await gold_samples(config, character_tokenizer())
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (Path(__file__).parents[3] / "examples" / "agent.jinja").read_text()
    samples = await gold_samples(config, tokenizer)
    for sample in (*samples.learnt, *samples.held_out):
        text = tokenizer.decode(sample.token_ids)
        assert text.startswith("<|system|>Tools: count(text)<|end|>"), text
        assert "Tools:" not in tokenizer.decode(sample.token_ids[sample.mask])
    assert (len(samples.learnt), len(samples.held_out)) == (4, 2)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rat", "1"], "learning_rate"),
        (["--run", "1"], "'run'.*`telescope train`"),
        (["--batch_size", "0"], "batch_size"),
        (["--lr_scheduler", "none"], "constant \\(with warmup_steps = 0"),
        (["--warmup_steps", "41"], r"^warmup_steps \(41\) must not exceed the 40"),
        (["--cooldown_steps", "41"], r"cooldown_steps \(41\) must not exceed the 40"),
        (["--lr_scheduler", "constant", "--cooldown_steps", "4"], "^cooldown_steps has no effect"),
        (["--environments", "[]"], "environments"),
        (["--lora_rank", "4"], "lora_rank.*use_lora"),
        (["--ray_address", "127.0.0.1:6379"], "ray_address"),
        (["--fsdp_context_parallel_size", "2"], "fsdp_context_parallel_size"),
        (["--trainer_num_workers", "3", "--fsdp_replicate_size", "2"], r"\b3 groups"),
        (["--optimizer", "sgd"], "optimizer"),
        (["--train_backend", "megatorn"], "'megatron'"),
        (["--megatron_tensor_parallel_size", "2"], "tensor_parallel_size.*'fsdp'"),
        (
            [*MEGATRON, "--megatron_tensor_parallel_size", "2"],
            r"^trainer_num_workers \(1\)",
        ),
        (
            [*MEGATRON, "--megatron_optimizer_cpu_offload", "true"],
            "^megatron_optimizer_cpu_offload.*GPU",
        ),
        (["--use_lora", "true", "--optimizer", "muon"], "^optimizer = 'muon'.*use_lora"),
        (["--optimizer", "muon", "--muon_momentum", "0.9"], "'muon_momentum'.*by default"),
        ([*MEGATRON, "--optimizer", "adamw_bf16"], "^optimizer = 'adamw_bf16'.*fsdp"),
        (
            [*MEGATRON, "--use_lora", "true"],
            "^use_lora.*'megatron'",
        ),
        ([*MEGATRON, "--fsdp_replicate_size", "2"], "^fsdp_replicate_size.*'megatron'"),
    ],
)
def test_settings_that_cannot_be_used(config_file, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_sft_config([config_file], flags)
    assert [path.name for path in tmp_path.iterdir()] == ["sft.toml"]


@pytest.mark.slow
def test_an_example_longer_than_seq_len_is_refused(config_file, tmp_path):
    with pytest.raises(ConfigError, match=r"seq_len.*\b6\b"):
        run_sft(load_sft_config([config_file], ["--seq_len", "6"]))
    assert not (tmp_path / "warm").exists(), "no model is written"


class Killed(Exception):
    """What ends a training in the middle."""


def rows_of(output: Path) -> list[dict]:
    lines = (output.with_name(f"{output.name}-log") / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "time_s"} for line in lines]


def trained(config_file: Path, output: Path, *flags: str, killed_at: int | None = None) -> Path:
    def on_row(row):
        if row.step == killed_at:
            raise Killed

    short = ("--batch_size", "6", "--loss_log_every", "1")
    if "--number_of_epochs" in flags:
        text = config_file.read_text().replace("number_of_steps = 40", "")
        config_file = output.with_name("epochs.toml")
        config_file.write_text(text)
    else:
        short += ("--number_of_steps", "10")
    return run_sft(
        load_sft_config([config_file], [*short, "--output", str(output), *flags]), on_row=on_row
    )


SAVED = ("--checkpoint_every", "5", "--num_examples", "20")
LATEST = (*SAVED, "--resume_from_checkpoint", "latest")
ELSEWHERE = "a machine that may be gone"


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}


@pytest.mark.engine
def test_two_ranks_with_adapters_learn_what_one_does(config_file, tmp_path):
    """On Ray, with an optimizer of choice; the second half on two ranks, from a checkpoint."""
    lora = ("--use_lora", "true", "--lora_rank", "4", "--optimizer", "adamw_bf16")
    alone = trained(config_file, tmp_path / "one", *SAVED, *lora)
    with pytest.raises(Killed):
        trained(config_file, tmp_path / "two", *SAVED, *lora, killed_at=6)
    two = trained(config_file, tmp_path / "two", *LATEST, *lora, "--trainer_num_workers", "2")
    expected, found, base = (weights_of(one) for one in (alone, two, tmp_path / "base"))
    learnt = math.sqrt(sum(((expected[n] - base[n]) ** 2).sum() for n in base))
    differs = math.sqrt(sum(((expected[n] - found[n]) ** 2).sum() for n in base))
    # Moments are rounded to 16 bits at random, a little differently in each part of a matrix.
    assert differs < 0.1 * learnt
    adapter = load_file(two / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == 3 * 7 * 2
    assert list((tmp_path / "two-log" / "logs").rglob("*"))
    rows = [row for row in rows_of(two) if row["step"] > 5]
    for row, other in zip(rows, rows_of(alone)[6:], strict=True):
        assert row["nll/held_out"] == pytest.approx(other["nll/held_out"], rel=1e-2)


@pytest.mark.slow
def test_ten_steps_equal_five_and_a_resume_and_five(config_file, tmp_path):
    """To the bit: weights and every number measured. 20 examples are several epochs."""
    straight = trained(config_file, tmp_path / "straight", *SAVED)
    with pytest.raises(Killed):
        trained(config_file, tmp_path / "b", *SAVED, killed_at=8)
    assert len(rows_of(tmp_path / "b")) == 9
    with (tmp_path / "b-log" / "metrics.jsonl").open("a") as torn:
        torn.write('{"step":9,"nl')
    # 3 passes through 20 examples in batches of 6.
    resumed = trained(config_file, tmp_path / "b", *LATEST, "--number_of_epochs", "3")
    found, expected = (load_file(one / "model.safetensors") for one in (resumed, straight))
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert rows_of(resumed) == rows_of(straight)
    saved = tmp_path / "b-log" / "checkpoints"
    assert sorted(path.name for path in saved.iterdir()) == ["step-000005", "step-000010"]
    middle = export_checkpoint(
        read_checkpoint(saved / "step-000005"),
        tmp_path / "middle",
        dtype=None,
        max_shard_size="5GB",
    )
    assert AutoModelForCausalLM.from_pretrained(middle.path).num_parameters() > 500_000

    with pytest.raises(ConfigError, match="holds checkpoints of an earlier training"):
        trained(config_file, tmp_path / "b", *SAVED)
    with pytest.raises(ConfigError, match="batch_size: 6 -> 7"):
        trained(config_file, tmp_path / "b", *LATEST, "--batch_size", "7")
    for asked in ((), ("--number_of_epochs", "3")):
        with pytest.raises(ConfigError, match="raise number_of_steps, or number_of_epochs"):
            trained(config_file, tmp_path / "b", *LATEST, *asked)
    trained(config_file, tmp_path / "b", *LATEST, "--number_of_steps", "11")
    assert [row["step"] for row in rows_of(tmp_path / "b")] == list(range(12))
    other = ("--resume_from_checkpoint", str(saved / "step-000005"), "--learning_rate", "1e-3")
    forked = trained(config_file, tmp_path / "c", "--num_examples", "20", *other)
    assert [row["step"] for row in rows_of(forked)] == [6, 7, 8, 9, 10]


class Kept:
    """A tracker that keeps what it gets."""

    def __init__(self, got: list[object]) -> None:
        self.got = got

    def begin(self, run):
        self.got.append((run.name, run.first_step, run.config["batch_size"]))

    def log_metrics(self, step, row):
        self.got.append((step, row["accuracy"], row["nll/held_out"]))

    def log_rollouts(self, step, rows):
        raise AssertionError("there are none")

    def end(self, state):
        self.got.append(state)


@pytest.mark.slow
def test_trackers_get_each_row_also_of_a_training_that_goes_on(config_file, tmp_path, monkeypatch):
    got: list[object] = []
    monkeypatch.setattr(sft_run, "load_tracker", lambda name: Kept(got))
    asked = (*SAVED, "--use_tensorboard")
    with pytest.raises(Killed):
        trained(config_file, tmp_path / "b", *asked, killed_at=6)
    trained(config_file, tmp_path / "b", *LATEST, "--use_tensorboard")
    rows = [(row["step"], row["accuracy"], row["nll/held_out"]) for row in rows_of(tmp_path / "b")]
    assert got == [
        *[("b", 0, 6), *rows[:6], got[7], "failed"],
        *[("b", 6, 6), *rows[6:], "finished"],
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trackers", '["trackoi"]'], "unknown tracker 'trackoi'; did you mean 'trackio'"),
        (["--wandb_project", "p"], "^wandb_project has no effect without use_wandb"),
        (["--report_to", "wandb"], "here it is called 'use_wandb'"),
    ],
)
def test_trackers_that_cannot_be_are_refused(config_file, flags, message):
    with pytest.raises(ConfigError, match=message):
        load_sft_config([config_file], flags)


def test_a_tracker_without_its_login_is_refused_before_anything_is_read(
    config_file, tmp_path, monkeypatch
):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = load_sft_config([config_file], ["--output", str(tmp_path / "b"), "--use_wandb"])
    with pytest.raises(ConfigError, match="no login for Weights & Biases"):
        run_sft(config)
    assert not (tmp_path / "b-log").exists()


def end_killed(info: Path) -> None:
    """Make the finished training of this `run.json` one that a kill ended before it was that."""
    fields = json.loads(info.read_text()) | {"state": "running", "ended_at": None}
    info.write_text(json.dumps(fields | {"process_started": "gone"}))


@pytest.mark.slow
@pytest.mark.parametrize("enough", [(), ("--stop_at_accuracy", "1e-12")])
def test_a_training_that_is_killed_after_its_last_checkpoint_is_finished(
    config_file, tmp_path, enough
):
    output = trained(config_file, tmp_path / "b", *SAVED, *enough)
    expected, rows = load_file(output / "model.safetensors"), rows_of(output)
    log = tmp_path / "b-log"
    newest = log / "checkpoints" / f"step-{rows[-1]['step']:06}" / "checkpoint.json"
    written = newest.stat().st_mtime_ns
    for has_row in (True, False) if not enough else (True,):
        end_killed(log / "run.json")
        shutil.rmtree(output)
        if not has_row:
            lines = (log / "metrics.jsonl").read_text().splitlines(keepends=True)
            (log / "metrics.jsonl").write_text("".join(lines[:-1]))
        told = []
        run_sft(
            load_sft_config(
                [config_file],
                [
                    *("--number_of_steps", "10", "--batch_size", "6", "--loss_log_every", "1"),
                    *("--output", str(output), *LATEST, *enough),
                ],
            ),
            on_row=told.append,
        )
        found = load_file(output / "model.safetensors")
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
        assert RunFolder.open(log).info().state == "finished"
        assert [row["step"] for row in rows_of(output)] == [row["step"] for row in rows]
        assert rows_of(output)[-1]["accuracy"] == pytest.approx(rows[-1]["accuracy"])
        assert (rows_of(output) == rows) == has_row
        assert [row.step for row in told] == [rows[-1]["step"]]
        assert newest.stat().st_mtime_ns == written, "no step is saved again"


@pytest.mark.parametrize("part", ["warm", "warm-log", "base", "."])
def test_a_folder_that_cannot_be_written_is_refused_at_once(
    config_file, tmp_path, monkeypatch, part
):
    (tmp_path / part).mkdir(exist_ok=True)
    closed = tmp_path / part
    rights = os.access
    # The superuser, as whom tests may run, can write in any folder.
    monkeypatch.setattr(
        os, "access", lambda path, *more: Path(path) != closed and rights(path, *more)
    )
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match=rf"cannot be written: {closed} is not writable"):
        run_sft(load_sft_config([config_file]))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_a_finished_training_whose_checkpoint_is_refused_stays_finished(config_file, tmp_path):
    trained(config_file, tmp_path / "b", *SAVED)
    log = tmp_path / "b-log"
    names = ("run.json", "config.json", "metrics.jsonl")
    before = [(log / name).read_bytes() for name in names]
    shard = log / "checkpoints" / "step-000010" / "state" / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    with pytest.raises(TelescopeError, match="step-000010"):
        trained(config_file, tmp_path / "b", *LATEST, "--number_of_steps", "11")
    assert RunFolder.open(log).info().state == "finished"
    assert [(log / name).read_bytes() for name in names] == before


@pytest.mark.slow
def test_checkpoints_that_are_not_kept_go(config_file, tmp_path):
    flags = ("--checkpoint_every", "2", "--checkpoint_keep_last", "1", "--checkpoint_keep_every=4")
    output = trained(config_file, tmp_path / "a", *flags)
    kept = (output.with_name("a-log") / "checkpoints").iterdir()
    assert sorted(path.name for path in kept) == ["step-000004", "step-000008", "step-000010"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--checkpoint_keep_last", "2"], "^checkpoint_keep_last.*checkpoint_every"),
        (["--checkpoint_every", "41"], r"checkpoint_every.*\b40 steps.*no checkpoint$"),
        (["--resume_from_checkpoint", "latest"], "warm-log"),
        (["--resume_from_checkpoint", "nowhere"], "nowhere"),
    ],
)
def test_checkpoint_settings_that_cannot_be_used(config_file, tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        run_sft(load_sft_config([config_file], flags))
    assert not (tmp_path / "warm").exists(), "no model is written"


@pytest.mark.parametrize(
    ("flags", "host"),
    [*product([[], ["--checkpoint_every", "2"]], [None, ELSEWHERE]), ([*LATEST], None)],
)
def test_an_output_that_another_training_writes_is_left_alone(config_file, tmp_path, flags, host):
    log = tmp_path / "warm-log"
    RunFolder.begin(log, name="warm").log_metrics({"step": 1})
    info = log / "run.json"
    if host is not None:
        info.write_text(json.dumps(json.loads(info.read_text()) | {"host": host}))
    # It replaces its newest checkpoint now, which nobody else may end.
    half = log / "checkpoints" / ".final.old"
    half.mkdir(parents=True)
    half.with_name(".final.partial").mkdir()
    files = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="still going on") as refused:
        run_sft(load_sft_config([config_file], flags))
    assert (f"remove {info}" in str(refused.value)) == (host is not None)
    assert sorted(tmp_path.rglob("*")) == files


def test_latest_goes_on_after_a_machine_that_cannot_be_asked(config_file, tmp_path):
    info = tmp_path / "warm-log/run.json"
    RunFolder.begin(info.parent, name="warm")
    info.write_text(json.dumps(json.loads(info.read_text()) | {"host": ELSEWHERE}))
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        run_sft(load_sft_config([config_file], [*LATEST]))
    RunFolder.begin(info.parent, name="warm", has_ended_elsewhere=True)


@pytest.mark.slow
def test_of_two_trainings_that_start_at_once_one_makes_the_model(
    config_file, tmp_path, monkeypatch
):
    """The other one begins between the first look at the folder and the lock on it."""
    read = sft_run.gold_samples

    async def read_beside(*arguments, **more):
        found = await read(*arguments, **more)
        RunFolder.begin(tmp_path / "warm-log", name="warm")
        return found

    monkeypatch.setattr(sft_run, "gold_samples", read_beside)
    with pytest.raises(ConfigError, match="still going on"):
        run_sft(load_sft_config([config_file]))
    assert not (tmp_path / "base").exists()
    assert not (tmp_path / "warm").exists()


@pytest.mark.slow
def test_a_resume_proves_its_checkpoint_and_what_it_reads(config_file, tmp_path):
    with pytest.raises(Killed):
        trained(config_file, tmp_path / "b", *SAVED, "--checkpoint_every", "2", killed_at=5)
    config = load_sft_config(
        [config_file],
        [
            *("--number_of_steps", "10", "--batch_size", "6", "--output", str(tmp_path / "b")),
            *LATEST,
        ],
    )
    assert sft_resume_point(config).step == 4
    newest = tmp_path / "b-log" / "checkpoints" / "step-000004"
    weights = tmp_path / "base" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(kept + b" ")
    with pytest.raises(ConfigError, match=r"model\.safetensors: its content is another one"):
        sft_resume_point(config)
    weights.write_bytes(kept)
    shard = newest / "state" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    point = sft_resume_point(config)
    (note,) = resume_notes(config, point)
    assert point.step == 2
    assert all(part in note for part in ("step-000004", "__0_0.distcp", "step-000002"))
    description = newest.with_name("step-000002") / "model" / "config.json"
    description.write_text(description.read_text().replace("{", "{ ", 1)[:-1])
    with pytest.raises(ConfigError, match=r"model/config\.json"):
        sft_resume_point(config)
    again = load_sft_config([config_file], ["--output", str(tmp_path / "b")])
    with pytest.raises(ConfigError, match="of an earlier training"):
        sft_resume_point(again)


def test_an_output_that_cannot_be_put_in_place_is_refused_at_the_start(tmp_path, monkeypatch):
    """Its log folder may be there from before, so that nothing else would fail until the end."""
    require_replaceable(tmp_path / "new" / "warm")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    with pytest.raises(ConfigError, match=f"cannot be written: {tmp_path} is not writable"):
        require_replaceable(tmp_path / "warm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 is full."),
            GpuMemoryError,
            "the trainer ran out of GPU memory: Tried to allocate 9 GiB. GPU 0 is full; set "
            "gradient_checkpointing = true; no checkpoint was saved",
        ),
        (
            NoRoomError("the disk is full"),
            NoRoomError,
            "the disk is full; no checkpoint was saved",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "/data/warm"),
            NotWrittenError,
            "cannot use /data/warm: Read-only file system; no checkpoint was saved",
        ),
    ],
)
def test_where_room_is_missing_is_said_what_needs_less_and_how_to_go_on(
    config_file, tmp_path, monkeypatch, error, kind, text
):
    def fails(*_: object) -> None:
        raise error

    monkeypatch.setattr(TrainerWorker, "train_minibatches", fails)
    with pytest.raises(kind) as caught:
        run_sft(load_sft_config([config_file], ["--gradient_checkpointing", "false"]))
    assert str(caught.value).startswith(text)
    assert RunFolder.open(tmp_path / "warm-log").info().state == "failed"


def test_the_secrets_that_an_environment_reads_are_told_by_name(config_file, tmp_path, monkeypatch):
    """It is opened in a process of its own, where the class has to say so itself."""
    (tmp_path / "keyed.py").write_text(
        "from toy_digits import LastDigit\n\n\n"
        "class Keyed(LastDigit):\n    secrets = ('DIGITS_KEY',)\n"
    )
    name = f"{tmp_path / 'keyed.py'}:Keyed"
    config_file.write_text(config_file.read_text().replace("toy_digits:LastDigit", name))
    monkeypatch.setenv("DIGITS_KEY", "hunter2")
    told = []
    flags = ["--number_of_steps", "1", "--warmup_steps", "1", "--loss_log_every", "1"]
    run_sft(load_sft_config([config_file], flags), tell=told.append)
    (line,) = (one for one in told if "DIGITS_KEY" in one)
    for fact in (name, "DIGITS_KEY (set)"):
        assert fact in line
    assert "hunter2" not in " ".join(told)


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        (
            ["--use_lora", "true", "--lora_target_modules", '["q_prj"]'],
            {},
            "is called q_prj; choose",
        ),
        (
            ["--fsdp_context_parallel_size", "2", "--trainer_num_workers", "2"],
            {"layer_types": ["sliding_attention"] * 3, "sliding_window": 8},
            r"fsdp_context_parallel_size \(2\).*sliding_window",
        ),
        (
            ["--fsdp_context_parallel_size", "3", "--trainer_num_workers", "3"],
            {},
            r"fsdp_context_parallel_size \(3\) must divide",
        ),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_anything_is_written(
    config_file, tmp_path, monkeypatch, flags, fields, message
):
    monkeypatch.setattr(sft_run, "machine_device", lambda: "cpu")
    path = make_tiny_model(tmp_path / "base", seed=0) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    config_file.write_text(config_file.read_text().replace("make_tiny_model = true", ""))
    with pytest.raises(ConfigError, match=message):
        run_sft(load_sft_config([config_file], flags))
    assert not (tmp_path / "warm-log").exists()


def test_adapters_are_refused_for_layers_of_another_kind(config_file, tmp_path):
    path = make_tiny_model(tmp_path / "base", seed=0)
    config = GPT2Config(vocab_size=128, n_embd=16, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(path)
    text = config_file.read_text().replace("make_tiny_model = true", "")
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=r"not supported for GPT2LMHeadModel.*Llama, Qwen"):
        run_sft(load_sft_config([config_file], ["--use_lora", "true"]))
    assert not (tmp_path / "warm-log").exists()


def test_a_model_that_lacks_a_tensor_is_refused_before_anything_is_written(config_file, tmp_path):
    path = make_tiny_model(tmp_path / "base", seed=0) / "model.safetensors"
    kept = {name: value for name, value in load_file(path).items() if name != "model.norm.weight"}
    save_file(kept, path, metadata={"format": "pt"})
    text = config_file.read_text().replace("make_tiny_model = true", "")
    config_file.write_text(text)
    with pytest.raises(ConfigError, match=r"base.*model\.norm\.weight"):
        run_sft(load_sft_config([config_file]))
    assert not (tmp_path / "warm").exists()
    assert not (tmp_path / "warm-log").exists()


@pytest.mark.parametrize("what", ["trained", "with notes", "of another kind", "no model"])
def test_a_folder_that_is_no_new_tiny_model_is_never_replaced(config_file, tmp_path, what):
    base = tmp_path / "base"
    if what != "no model":
        make_tiny_model(base, seed=0)
    base.mkdir(exist_ok=True)
    if what == "trained":  # with the same config
        path = base / "model.safetensors"
        trained = {name: value + 1 for name, value in load_file(path).items()}
        save_file(trained, path, metadata={"format": "pt"})
    elif what == "of another kind":
        (base / "TINY_MODEL").unlink()
    else:
        (base / "notes.txt").write_text("mine")
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    with pytest.raises(ConfigError, match=r"make_tiny_model.*base.*name another folder"):
        run_sft(load_sft_config([config_file]))
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "sft.toml"]


def test_a_new_tiny_model_is_made_again(tmp_path):
    first = (make_tiny_model(tmp_path / "base", seed=0) / "model.safetensors").read_bytes()
    again = make_tiny_model(tmp_path / "base", seed=1) / "model.safetensors"
    assert again.read_bytes() != first


@pytest.mark.parametrize(
    "other", ["README.md", "src/train.py", "data.jsonl", "step-000004/config.json", "adapter/mine"]
)
def test_files_of_a_users_own_beside_a_model_are_never_replaced(tmp_path, other):
    model = tmp_path / "model"
    for name in ("config.json", "model-00001-of-00002.safetensors", "adapter/adapter_config.json"):
        (model / name).parent.mkdir(parents=True, exist_ok=True)
        (model / name).write_text('{"model_type": "qwen3"}')
    require_replaceable(model)
    (model / other).parent.mkdir(exist_ok=True)
    (model / other).write_text("mine")
    with pytest.raises(ConfigError, match=f"and '{other.split('/')[0]}', which are no part"):
        require_replaceable(model)


def test_code_is_part_of_a_model_that_has_its_own(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "own", "auto_map": {}}')
    (tmp_path / "helpers.py").write_text("")
    require_replaceable(tmp_path)
