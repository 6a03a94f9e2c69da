"""Environments of every kind, and a mix of them, over vLLM; and what was trained on.

vLLM's scheduler is made to write down each request that ends: the prompt as it was computed and
the tokens that were sampled. Nothing of Telescope's takes part in that record.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tests.ports import free_port

from telescope_core.base.chains import sampled_tokens
from telescope_core.records import RolloutRow, RunFolder
from telescope_core.types import Completion, Message, Rollout, RolloutStatus, Turn
from telescope_train.batches.samples import samples_from_rollout
from telescope_train.inference.server import SERVED_MODEL_NAME, ServerSettings, running
from telescope_train.models.tiny import make_tiny_model

sys.path.insert(0, str(Path(__file__).parent))
from taught import teach

pytestmark = pytest.mark.engine
Request = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids of the prompt and of what was sampled."""
ROOT = Path(__file__).parents[2]
VARIABLE = "SAMPLED_TOKENS"
PLUGIN = """
import json, os


def install():
    from vllm.v1.core.sched.scheduler import Scheduler

    if hasattr(Scheduler, "writes_down"):
        return
    Scheduler.writes_down = True
    free_request = Scheduler._free_request

    def written_down(self, request, *arguments, **keywords):
        line = {
            "prompt": list(request.prompt_token_ids),
            "sampled": list(request.output_token_ids),
        }
        with open(os.environ["SAMPLED_TOKENS"], "a") as file:
            file.write(json.dumps(line) + "\\n")
        return free_request(self, request, *arguments, **keywords)

    Scheduler._free_request = written_down
"""
LAKE = "gym:FrozenLake-v1"
PROBLEMS = Path(__file__).with_name("problems.jsonl")
ENVIRONMENTS = [
    {
        "name": "math-reasoning",
        "max_tokens": 8,
        "env": {"level": "digit", "operations": "+", "instruction": ""},
    },
    {
        "name": "countdown",
        "max_tokens": 8,
        "env": {"max_numbers": 3, "max_number": 9, "instruction": ""},
    },
    {"name": "wordle", "max_tokens": 24, "env": {"max_guesses": 3}},
    {"name": "tool-calculator", "max_tokens": 110, "env": {"num_steps": 1}},
    {"name": "reverse-text", "max_tokens": 24},
    {"name": "alphabet-sort", "max_tokens": 24, "env": {"max_rounds": 2}},
    {"name": "wiki-search", "max_tokens": 24},
    {
        "name": "i3-code",
        "max_tokens": 40,
        "env": {"path": str(PROBLEMS), "instruction": False, "test_timeout_s": 5},
    },
    {"name": "swe-small", "max_tokens": 24},
    {"name": LAKE, "weight": 1.5, "max_tokens": 8, "env": {"max_turns": 3}},
]
"""One turn, several turns, tools, programs in a sandbox, and one of another framework. With these
weights, the seed of the run draws each of them within its 24 groups."""
SMALL = {
    "number_of_steps": 3,
    "group_size": 4,
    "prompts_batch_size_for_trainer": 8,
    "temperature": 0.7,
    "discard_group_zero_advantage": "false",
    "seq_len": 2048,
    "max_model_len": 2048,
    "learning_rate": "1e-5",
    "eval_after_training": "false",
    "evals": "[]",
    "environments": json.dumps(ENVIRONMENTS),
}


@pytest.fixture(scope="module")
def taught_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that calls the calculator and guesses words."""
    folder = tmp_path_factory.mktemp("models")
    return teach(make_tiny_model(folder / "tiny", seed=1), folder / "taught")


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """Variables under which vLLM writes its record to `tmp_path`."""
    about = tmp_path / "plugins" / "writes_down-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: writes-down\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nwrites_down = writes_down:install\n"
    )
    (about.parent / "writes_down.py").write_text(PLUGIN)
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(about.parent),
        VARIABLE: str(tmp_path / "sampled.jsonl"),
    }


@pytest.fixture
def server(
    taught_model: Path, environ: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The base URL of a server of the taught model."""
    for name in ("PYTHONPATH", VARIABLE):
        monkeypatch.setenv(name, environ[name])
    settings = ServerSettings(
        model_path=str(taught_model),
        port=free_port(),
        log_path=tmp_path / "server.log",
        max_model_len=2048,
    )
    with running(settings, deadline_s=180):
        yield f"{settings.base_url}/v1"


def telescope(place: Path, environ: dict[str, str], *arguments: str) -> str:
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env=environ,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout


def server_record(environ: dict[str, str]) -> list[Request]:
    """Return every request, in the order in which they ended."""
    lines = Path(environ[VARIABLE]).read_text().splitlines()
    read = [json.loads(line) for line in lines]
    return [(tuple(line["prompt"]), tuple(line["sampled"])) for line in read]


def rollout_of(row: RolloutRow) -> Rollout:
    turns = tuple(
        Turn(
            completion=Completion(
                message=Message(role="assistant", content=""),
                finish_reason="stop",
                tokens=tokens,
            ),
            started_s=0.0,
            ended_s=0.0,
        )
        for tokens in row.tokens
    )
    return Rollout(
        environment=row.environment,
        example_id=row.example_id,
        group_id=row.group_id,
        index=row.index,
        turns=turns,
    )


def test_a_mix_is_trained_on_exactly_what_the_server_sampled(
    tmp_path: Path, taught_model: Path, environ: dict[str, str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environ["TELESCOPE_HOME"] = str(tmp_path / "home")
    telescope(tmp_path, environ, "env", "link", LAKE)
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]
    where = ["--model", str(taught_model), "--inference_base_port", str(free_port())]
    telescope(tmp_path, environ, "train", "examples/mixed.toml", *where, *flags)

    rows = RunFolder.open(tmp_path / "runs" / "mixed").rollouts()
    assert {row.status for row in rows} == {RolloutStatus.KEPT}, [row.error for row in rows]
    assert {row.environment for row in rows} == {about["name"] for about in ENVIRONMENTS}
    by_name = {
        about["name"]: [row for row in rows if row.environment == about["name"]]
        for about in ENVIRONMENTS
    }
    assert max(row.num_turns for row in by_name["wordle"]) == 3
    assert max(row.num_turns for row in by_name["alphabet-sort"]) == 2
    assert sum(row.metrics["tool_calls/calculate"] for row in by_name["tool-calculator"]) > 0

    record = server_record(environ)
    require_as_sampled(rows, record)
    first, *others = rows[0].tokens
    wrong_ids = [first.completion_ids[0] + 1, *first.completion_ids[1:]]
    wrong = sampled_tokens(first.prompt_ids, wrong_ids, first.logprobs)
    forged = replace(rows[0], tokens=(wrong, *others))
    with pytest.raises(AssertionError, match="no request of the server"):
        require_as_sampled([forged], record)


def require_as_sampled(rows: Sequence[RolloutRow], record: Sequence[Request]) -> None:
    """Every turn is a request of the server's; what is trained on is what it sampled there."""
    left = Counter(record)
    for row in rows:
        turns = [
            (tuple(prompt), tuple(completion))
            for prompt, completion in zip(row.prompt_ids, row.completion_ids, strict=True)
        ]
        left.subtract(turns)
        assert not [turn for turn in turns if left[turn] < 0], "no request of the server"
        samples = samples_from_rollout(rollout_of(row), 1.0, 0.7)
        num_sampled = 0
        for prompt, sampled in turns:
            whole = [*prompt, *sampled]
            places = slice(len(prompt), len(whole))
            assert any(
                sample.token_ids[: len(whole)].tolist() == whole and sample.mask[places].all()
                for sample in samples
            ), "a turn is not trained where it was sampled"
            num_sampled += len(sampled)
        assert sum(int(sample.mask.sum()) for sample in samples) == num_sampled


@pytest.mark.nightly
def test_evals_of_the_new_environments(
    tmp_path: Path, environ: dict[str, str], server: str
) -> None:
    shape = ["--examples", "4", "--rollouts", "2", "--temperature", "0.7", "--json"]
    cases = [
        ("wordle", ["--max-tokens", "24", "--env.max_guesses", "3"], "guesses"),
        ("tool-calculator", ["--max-tokens", "110", "--env.num_steps", "1"], "tool_calls"),
        ("reverse-text", ["--max-tokens", "24"], None),
        ("alphabet-sort", ["--max-tokens", "24"], None),
        (
            "tool-calls",
            ["--max-tokens", "24", "--env.tool_call_format", "xml", "--env.num_functions", "3"],
            None,
        ),
        ("wiki-search", ["--max-tokens", "24"], None),
        ("deepdive", ["--max-tokens", "24"], None),
        ("text-games", ["--max-tokens", "24"], "moves"),
    ]
    num_turns = 0
    for name, flags, metric in cases:
        where = ["--base-url", server, "--model", SERVED_MODEL_NAME, "--output", name]
        told = telescope(tmp_path, environ, "eval", name, *where, *shape, *flags)
        assert json.loads(told)["num_scored"] == 8
        rows = [json.loads(line) for line in (tmp_path / name / "rollouts.jsonl").open()]
        assert metric is None or sum(row["metrics"][metric] for row in rows) > 0
        num_turns += sum(row["num_turns"] for row in rows)
    assert len(server_record(environ)) == num_turns
