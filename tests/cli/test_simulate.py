"""`telescope simulate`: what is printed, what is refused, and lengths from a recorded run."""

import json
import subprocess
import sys

import pytest
from tests.measured_run import write_measured_run

from telescope_cli.main import main
from telescope_core.base.chains import sampled_tokens
from telescope_core.records import RunFolder, row_of
from telescope_core.types import Completion, Message, Rollout, Turn

SETTINGS = """
environments = [{ name = "math-reasoning" }, { name = "countdown" }]
[run]
name = "planned"
number_of_steps = 1000
[model]
model = "org/not-here"
[rollout]
group_size = 2
prompts_batch_size_for_trainer = 4
max_tokens = 2048
[trainer]
seq_len = 8192
"""


@pytest.fixture
def settings(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(SETTINGS)
    return str(path)


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Return exit code, output and messages."""
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *arguments])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


@pytest.mark.slow
def test_a_run_is_estimated_with_other_divisions(settings, capsys):
    few = ("--gpus", "8", "--parameters", "8B", "--steps", "3")
    code, text, _ = run(capsys, settings, *few, "--servers", "4")
    assert code == 0
    assert "4 servers and 4 trainer GPUs (H100)" in text
    assert "other divisions of the GPUs" in text
    assert all(len(line.rstrip()) <= 80 for line in text.splitlines())
    again = run(capsys, settings, *few, "--servers", "4")[1]
    assert again == text, "the same command gives the same numbers"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ["simulate", "run.toml", "--gpus", "4", "--parameters", "1B", "--steps", "2"],
            marks=pytest.mark.slow,
        ),
        ["train", "--help"],
    ],
    ids=["simulate", "help"],
)
def test_what_trains_nothing_imports_no_heavy_library(arguments, settings, tmp_path):
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'ray', 'vllm', 'datasets'):\n"
        "    sys.modules[name] = None\n"
        "from telescope_cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_run_is_drawn_over_time_and_as_a_page(settings, capsys, tmp_path):
    page = tmp_path / "plan.html"
    few = ("--gpus", "8", "--parameters", "8B", "--steps", "3", "--page", str(page))
    code, text, _ = run(capsys, settings, *few)
    assert code == 0
    for name in ("servers busy", "ranks busy", "slot queue", "groups ready", "staleness"):
        assert name in text
    assert page.read_text().count('<svg class="chart"') == 4


@pytest.mark.slow
def test_larger_runs_are_simulated_in_several_processes_with_the_same_result(
    settings, capsys, monkeypatch
):
    from telescope_train.simulation import estimate

    few = ("--gpus", "4", "--servers", "2", "--parameters", "8B", "--steps", "3", "--json")
    alone = json.loads(run(capsys, settings, *few)[1])
    monkeypatch.setattr(estimate, "_FEW_ROLLOUTS", 0)
    code, text, _ = run(capsys, settings, *few)
    assert code == 0
    assert json.loads(text) == alone
    assert len(alone["course"]["steps"]) == 3
    assert {"servers_busy", "rollouts_waiting"} <= set(alone["course"]["usage"][0])


@pytest.mark.slow
def test_numbers_come_as_json_and_follow_the_settings(settings, capsys):
    found = {}
    for ahead in (0, 1):
        code, text, _ = run(
            capsys,
            settings,
            *("--gpus", "4", "--servers", "2", "--parameters", "600M", "--steps", "6", "--json"),
            *("--max_async_rollout", str(ahead)),
        )
        assert code == 0
        found[ahead] = json.loads(text)["chosen"]
    assert found[0]["staleness_max"] == 0
    assert found[1]["staleness_max"] == 1
    assert found[1]["steps_per_hour"] > found[0]["steps_per_hour"]
    assert found[0]["num_servers"] == found[0]["num_ranks"] == 2


def test_lengths_come_from_the_rollouts_of_a_run(settings, capsys, tmp_path):
    folder = RunFolder.create(tmp_path / "small", config={})
    for step, length in enumerate((10, 1000), start=1):
        completion = Completion(
            message=Message(role="assistant", content=""),
            finish_reason="stop",
            tokens=sampled_tokens([1] * 20, [2] * length, [-1.0] * length),
        )
        turn = Turn(completion=completion, started_s=0.0, ended_s=1.0)
        rollout = Rollout(
            environment="e", example_id="x", group_id="0.0", index=0, turns=(turn,), reward=1.0
        )
        folder.write_rollouts(step, [row_of(rollout, step=step, with_tokens=True)])
    code, text, _ = run(
        capsys,
        settings,
        *("--gpus", "2", "--parameters", "1B", "--steps", "4", "--json"),
        *("--lengths-of", str(tmp_path / "small")),
    )
    assert code == 0
    recorded = json.loads(text)["chosen"]
    text = run(
        capsys,
        settings,
        *("--gpus", "2", "--parameters", "1B", "--steps", "4", "--json", "--mean-length", "4000"),
    )[1]
    assert json.loads(text)["chosen"]["step_s"] > recorded["step_s"]


@pytest.mark.slow
def test_speeds_come_from_the_records_of_a_run(settings, capsys, tmp_path):
    write_measured_run(tmp_path / "small")
    small = ("--speeds-of", str(tmp_path / "small"), "--lengths-of", str(tmp_path / "small"))
    machines = ("--gpus", "4", "--servers", "2", "--steps", "3")
    code, text, _ = run(capsys, settings, *machines, *small)
    assert code == 0
    assert "as fast as those of" in text
    code, text, _ = run(
        capsys, settings, *machines, *small, "--prompts_batch_size_for_trainer", "16", "--json"
    )
    chosen = json.loads(text)["chosen"]
    # 32 rollouts over two servers: the longest answer takes about 280 steps of 20 to 84 ms each.
    assert 5 < chosen["generate_s"] < 30
    code, _, error = run(capsys, settings, "--speeds-of", str(tmp_path))
    assert code == 2
    assert "0 steps" in error or "run.json" in error


@pytest.mark.slow
def test_agents_with_tools_are_estimated(settings, capsys):
    agents = ("--mean-length", "300", "--spread", "0.8", "--turns", "2-6")
    machines = ("--gpus", "4", "--parameters", "8B", "--steps", "4", "--json")
    found = [
        json.loads(run(capsys, settings, *machines, *agents, "--tool-seconds", seconds)[1])
        for seconds in ("0", "20")
    ]
    fast, slow = (one["chosen"]["step_s"] for one in found)
    assert slow > fast + 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--parameters", "1e400B"), "expected a size such as 600M or 8B, got '1e400B'"),
        (("--parameters", "nanM"), "expected a size such as 600M or 8B, got 'nanM'"),
        (("--parameters=-8B",), "expected a size such as 600M or 8B, got '-8B'"),
        (("--parameters", "0B"), "expected a size such as 600M or 8B, got '0B'"),
        (("--mean-length", "inf", "--parameters", "8B"), "less than or equal to 1000000000"),
        (("--spread", "inf", "--parameters", "8B"), "less than or equal to 10"),
        (("--tool-seconds", "inf", "--parameters", "8B"), "less than or equal to 1000000000"),
        (("--reward-seconds", "inf", "--parameters", "8B"), "less than or equal to 1000000000"),
        (
            ("--inference_tensor_parallel_size", "2", "--tensor-parallel", "4"),
            "--tensor-parallel 4 and inference_tensor_parallel_size = 2 of the settings",
        ),
        (
            ("--inference_tensor_parallel_size", "4", "--servers", "2", "--parameters", "8B"),
            "2 servers of 4 GPUs leave 0 of 8 GPUs",
        ),
        (("--parameters", "8X"), "expected a size such as 600M or 8B, got '8X'"),
        ((), "the size of the model is not known"),
        (("--gpu", "H10", "--parameters", "8B"), "unknown GPU 'H10'; did you mean"),
        (("--servers", "8", "--parameters", "8B"), "leave 0 of 8 GPUs for the trainer"),
        (("--turns", "5-2", "--parameters", "8B"), "a range such as 2-40, got '5-2'"),
        (("--parameters", "1043B"), "1,043B parameters take 1,943 GiB"),
        (("--parameters", "70B"), "give each server more GPUs with --tensor-parallel"),
        (("--group_sise", "2"), "group_sise"),
        (("--parameters", "8B", "--lengths-of", "runs/nope"), "runs/nope: no such folder"),
        (("--parameters", "8B", "--speeds-of", "runs/nope"), "runs/nope: no such folder"),
    ],
)
def test_what_cannot_be_simulated_is_one_message(settings, capsys, arguments, message):
    code, text, error = run(capsys, settings, *arguments)
    assert code == 2
    assert not text
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("name", ["--tensor-parallel", "inference_tensor_parallel_size"])
def test_gpus_that_cannot_share_the_heads_of_the_model_are_refused(
    settings, capsys, tmp_path, name
):
    sizes = {"hidden_size": 64, "num_attention_heads": 32, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 128, "intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    flag = f"--{name.removeprefix('--')}"
    code, _, error = run(capsys, settings, flag, "3", "--model", str(tmp_path))
    assert code == 2
    assert f"{name} (3) must divide the model's 32 attention heads" in " ".join(error.split())


def test_a_settings_file_is_asked_for(capsys):
    code, _, error = run(capsys)
    assert code == 2
    assert "telescope simulate run.toml" in error


def test_a_run_without_tokens_is_refused(settings, capsys, tmp_path):
    RunFolder.create(tmp_path / "empty", config={})
    code, _, error = run(
        capsys, settings, "--parameters", "1B", "--lengths-of", str(tmp_path / "empty")
    )
    assert code == 2
    assert "no rollouts with recorded tokens" in error
