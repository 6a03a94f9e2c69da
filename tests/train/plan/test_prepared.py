"""What is read before a run is read once, and decided in one place."""

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.ports import free_port

from telescope_core.base.environment_record import record_of
from telescope_core.errors import ConfigError
from telescope_core.finding.locate import locate_environment
from telescope_core.records import RunState
from telescope_core.settings.config import load_config
from telescope_train import run
from telescope_train.checkpoints.folders import FINAL, CheckpointManifest, checkpoints_folder
from telescope_train.checkpoints.resume import open_run_folder, resume_point
from telescope_train.checkpoints.sampler_state import write_sampler_state
from telescope_train.cluster.ports import port_problems
from telescope_train.models.device import compute_dtype, machine_device
from telescope_train.models.facts import read_model_facts
from telescope_train.plan import prepared as prepared_module
from telescope_train.plan.load import load_train_config
from telescope_train.plan.prepared import prepare
from telescope_train.rollouts.sampled import SamplerState
from telescope_train.run import run_training

ONCE = (
    *(load_config, read_model_facts, resume_point, port_problems, machine_device),
    *(locate_environment, record_of),
)


class Started(Exception):
    """Raised where the first process of the run would be started."""


def settings(tmp_path, model) -> list[str]:
    entry = '[{"name": "plan_environment:Echo"}]'
    return [
        *("--name", "counted", "--number_of_steps", "1", "--model", str(model)),
        *("--environments", entry, "--output_dir", str(tmp_path / "runs")),
        *("--inference_base_port", str(free_port()), "--max_tokens", "64"),
    ]


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch):
    (tmp_path / "plan_environment.py").write_text(
        "from telescope_core import Example, ListSource, SingleTurnEnvironment, reward\n"
        "class Echo(SingleTurnEnvironment):\n"
        "    def examples(self, split):\n"
        "        return ListSource([Example(id='a', prompt='a', answer='a')])\n"
        "    @reward\n"
        "    def same(self, rollout, example):\n"
        "        return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.slow
def test_the_machine_is_read_once_from_the_settings_to_the_first_process(
    tmp_path, tiny, monkeypatch
):
    def never(*arguments, **named):
        raise Started

    monkeypatch.setattr(run, "ray_cluster", never)
    names = {function.__code__: function.__name__ for function in ONCE}
    calls: Counter[str] = Counter()

    def count(frame, event, argument):
        if event == "call" and frame.f_code in names:
            calls[names[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        with pytest.raises(Started):
            run_training(prepare(load_train_config([], settings(tmp_path, tiny))))
    finally:
        sys.setprofile(None)
    assert calls == dict.fromkeys((function.__name__ for function in ONCE), 1)


@pytest.mark.slow
def test_what_stands_in_the_way_is_raised_before_anything_is_written(tmp_path, tiny):
    prepared = prepare(
        load_train_config([], [*settings(tmp_path, tiny), "--env_workers", "1"][:-2])
    )
    assert prepared.problems == ()
    nowhere = ("--environments", '[{"name": "nowhere:Echo"}]')
    broken = prepare(load_train_config([], [*settings(tmp_path, tiny), *nowhere]))
    with pytest.raises(ConfigError, match="cannot import environment 'nowhere:Echo'"):
        run_training(broken)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_resume_that_ends_before_its_first_step_leaves_a_finished_run_as_it_was(
    tmp_path, tiny, monkeypatch
):
    first = prepare(load_train_config([], settings(tmp_path, tiny)))
    path = tmp_path / "runs" / "counted"
    folder = open_run_folder(first.config, None, first.environments.records, first.inputs)
    folder.log_metrics({"step": 1})
    folder.write_summary({"steps": 1})
    folder.report_path.write_text("the report")
    (folder.evals_path / "plan_environment-Echo-after").mkdir()
    (folder.evals_path / "plan_environment-Echo-after" / "results.json").write_text("{}")
    folder.finish()
    saved = checkpoints_folder(first.config) / FINAL
    (saved / "state").mkdir(parents=True)
    (saved / "state" / ".metadata").touch()
    write_sampler_state(saved, SamplerState(next_batch=1, draw_position=0, batches={}))
    manifest = CheckpointManifest(
        run="counted",
        step=1,
        num_ranks=1,
        has_training_state=True,
        config=first.config.model_dump(mode="json"),
        environment_records=dict(first.environments.records),
    )
    (saved / "checkpoint.json").write_text(manifest.model_dump_json())

    def files() -> dict[Path, bytes]:
        found = (one for one in path.rglob("*") if one.is_file())
        return {one: one.read_bytes() for one in found if folder.logs_path not in one.parents}

    def damaged(*arguments, **named):
        assert folder.info().state is RunState.RUNNING
        raise ConfigError("the checkpoint is damaged")

    monkeypatch.setattr(run, "ray_cluster", damaged)
    before = files()
    flags = ["--number_of_steps", "2", "--resume_from_checkpoint", "latest"]
    with pytest.raises(ConfigError, match="is damaged"):
        run_training(prepare(load_train_config([], [*settings(tmp_path, tiny), *flags])))
    assert files() == before
    assert folder.info().state is RunState.FINISHED


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        (None, "cpu", "float32"),
        (None, "cuda", "bfloat16"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float32", "cuda", "float32"),
    ],
)
def test_the_dtype_follows_the_setting_and_then_the_device(given, device, expected):
    assert compute_dtype(given, device) == expected


@pytest.mark.parametrize(
    ("devices", "visible", "torch_cuda", "expected"),
    [
        (["nvidia0"], None, True, "cuda"),
        (["nvidia0"], "", True, "cpu"),
        (["nvidia0"], "-1", True, "cpu"),
        (["nvidia0"], None, False, "cpu"),
        (["nvidiactl"], None, True, "cpu"),
        (["dxg"], None, True, "cuda"),
        ([], None, True, "cpu"),
    ],
)
def test_the_device_takes_a_gpu_and_a_torch_that_was_built_for_it(
    devices, visible, torch_cuda, expected, tmp_path, monkeypatch
):
    from telescope_train.models import device

    for name in devices:
        (tmp_path / name).touch()
    monkeypatch.setattr(device, "DEVICES", tmp_path)
    monkeypatch.setattr(device, "torch_has_cuda", lambda: torch_cuda)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine_device() == expected


def test_this_machine_computes_on_what_torch_can_use():
    import torch

    assert (machine_device() == "cuda") == torch.cuda.is_available()


@pytest.mark.slow
def test_secrets_are_told_before_the_first_process(tmp_path, tiny, monkeypatch, capsys):
    module = tmp_path / "plan_environment.py"
    own = "    secrets = ('ECHO_KEY', 'OTHER_KEY')\n    def examples"
    module.write_text(module.read_text().replace("    def examples", own))
    monkeypatch.setenv("ECHO_KEY", "hunter2")
    sys.modules.pop("plan_environment", None)

    def never(*arguments, **named):
        raise Started

    monkeypatch.setattr(run, "ray_cluster", never)
    with pytest.raises(Started):
        run_training(prepare(load_train_config([], settings(tmp_path, tiny))))
    listed = "ECHO_KEY (set), OTHER_KEY (not set)\n"
    line = f"plan_environment:Echo may read these environment variables: {listed}"
    said = capsys.readouterr()
    assert said.err.count(line) == 1
    assert "hunter2" not in said.out + said.err


@pytest.mark.slow
def test_how_turns_end_is_known_before_anything_starts(tmp_path, tiny):
    model = shutil.copytree(tiny, tmp_path / "base")
    for name in ("config.json", "generation_config.json"):
        file = model / name
        known = json.loads(file.read_text())
        # As in a base model: another token than the one that ends turns.
        file.write_text(json.dumps({**known, "eos_token_id": 1}))
    (problem,) = prepare(load_train_config([], settings(tmp_path, model))).problems
    assert "the chat template ends an answer with '<|end|>' (token 2)" in problem
    assert "add 2 to eos_token_id in generation_config.json" in problem

    plain = tmp_path / "plain.jinja"
    plain.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    flags = [*settings(tmp_path, tiny), "--chat_template", str(plain)]
    prepared = prepare(load_train_config([], flags))
    assert prepared.problems == ()
    assert [note for note in prepared.notes if "does not learn to stop" in note]


def test_little_shared_memory_of_a_machine_with_gpus_is_a_note(tmp_path, monkeypatch):
    for name, found in (
        ("machine_device", "cuda"),
        ("machine_gpus", [80 * 2**30] * 2),
        ("shared_memory_bytes", 64 * 2**20),
    ):
        monkeypatch.setattr(prepared_module, name, lambda found=found: found)
    config = load_train_config([], settings(tmp_path, tmp_path / "none"))
    prepared = prepare(config)
    assert [note for note in prepared.notes if "/dev/shm has 64 MiB" in note]
    assert not [one for one in prepared.problems if "/dev/shm" in one]
