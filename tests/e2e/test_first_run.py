"""The commands of the tutorials, as written but smaller: warm start, training, evaluation."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import psutil
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.collector import collector, spans_of
from tests.ports import free_port
from tests.ui.browsing import require_shown

from telescope_core.evals import EvalFolder, read_result
from telescope_core.records import RunFolder
from telescope_core.records.output_logs import is_output

ROOT = Path(__file__).parents[2]
SMALL = ["--number_of_steps", "2", "--group_size", "4", "--prompts_batch_size_for_trainer", "4"]
DIGITS = ["--env.level", "digit", "--env.operations", "+", "--env.instruction="]
PUZZLES = {
    "name": "countdown",
    "num_samples": 8,
    "rollouts": 2,
    "max_tokens": 12,
    "env": {"max_numbers": 3, "max_number": 9, "instruction": ""},
}


DEAD_PROXIES = {
    name: "http://127.0.0.1:9"
    for scheme in ("http", "https", "all", "grpc")
    for name in (f"{scheme}_proxy", f"{scheme}_proxy".upper())
}
"""Nobody listens there: whoever asks a process of the run by way of them gets no answer."""
UNPROXIED = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}


def telescope(place: Path, *arguments: str) -> str:
    code = "from telescope_cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=place,
        env=UNPROXIED | DEAD_PROXIES | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def processes_naming(text: str) -> list[str]:
    """Return the command lines of running processes that hold `text`."""
    running = psutil.process_iter(["cmdline"])
    lines = [" ".join(one.info["cmdline"] or []) for one in running]
    return [line for line in lines if text in line]


def require_recorded(run: RunFolder) -> None:
    """Assert that the timeline and the calls of a run tell where its time went."""
    calls = list(run.calls())
    of_training = [call for call in calls if call.step is not None]
    asked = Counter((call.group_id, call.index, call.attempt) for call in of_training)
    rollouts = run.rollouts()
    for row in rollouts:
        assert asked[row.group_id, row.index, row.attempt] == row.num_turns
    assert sum(call.num_completion_tokens for call in of_training if not call.error) >= sum(
        row.num_completion_tokens for row in rollouts
    )
    for call in calls:
        if not call.error:
            assert None not in (call.queue_s, call.prefill_s, call.decode_s, call.first_token_s)
            # The server's part of it is within what the driver saw; both clocks tell milliseconds.
            assert call.prefill_s + call.decode_s <= call.duration_s + 0.05
    of_evals = {call.environment for call in calls if call.step is None}
    assert {"countdown-before", "countdown-after"} <= of_evals

    spans = list(run.timeline())
    of_rank = {(span.name, span.step) for span in spans if span.source == "rank 0"}
    # A batch in which nothing is to be learned is not trained on.
    trained = [row["step"] for row in run.metrics() if "loss/total" in row]
    for step in trained:
        assert {("forward", step), ("backward", step), ("optimizer", step)} <= of_rank
    of_driver = Counter(span.name for span in spans if span.source == "driver")
    assert {"wait for rollouts", "train", "publish weights", "after the step"} <= set(of_driver)
    # On the driver's clock, what a rank did while the driver waited for it is within the wait.
    sends = [one for one in spans if one.name == "send weights"]
    for publishing in (one for one in spans if one.name == "publish weights"):
        end_s = publishing.time_s + publishing.duration_s
        assert any(
            publishing.time_s - 0.1 <= one.time_s and one.time_s + one.duration_s <= end_s + 0.1
            for one in sends
        )


def require_tokens(run: RunFolder) -> None:
    """Assert that the records of tokens are those that the metrics of the steps were made of."""
    metrics = {row["step"]: row for row in run.metrics()}
    for step in run.rollout_steps():
        rollouts = {(r.group_id, r.index, r.attempt): r for r in run.rollouts([step])}
        for row in rollouts.values():
            for spans, ids in zip(row.version_spans, row.completion_ids, strict=True):
                assert sum(span.num_tokens for span in spans) == len(ids)
            versions = [span.version for spans in row.version_spans for span in spans]
            assert (min(versions), max(versions)) == (row.oldest_version, row.newest_version)
        facts = list(run.token_facts(step))
        assert (run.path / "token_facts" / f"step-{step:06d}.parquet").is_file()
        kept = {key for key, row in rollouts.items() if row.status == "kept"}
        assert {(one.group_id, one.index, one.attempt) for one in facts} == kept
        apart, entropy = [], []
        for one in facts:
            row = rollouts[one.group_id, one.index, one.attempt]
            sampled = row.logprobs[one.turn]
            assert len(one.logprobs) == len(sampled)
            entropy += one.entropy
            if row.oldest_version == step - 1:
                apart += [abs(new - old) for new, old in zip(one.logprobs, sampled, strict=True)]
        assert sum(entropy) / len(entropy) == pytest.approx(metrics[step]["entropy"], rel=1e-3)
        assert max(apart, default=0) == pytest.approx(
            metrics[step].get("mismatch/max", 0), rel=1e-3
        )
        shares = sum(one.weight * len(one.logprobs) for one in facts)
        assert shares == pytest.approx(1.0, rel=1e-4)


def require_logged(run: RunFolder) -> None:
    """Assert that every process wrote its log, all in one form."""
    keys = ["time_s", "level", "component", "source", "life", "message"]
    logs = {
        path.name: [json.loads(line) for line in path.read_text().splitlines()]
        for path in run.logs_path.glob("*.jsonl")
    }
    for name, rows in logs.items():
        assert is_output(name) or rows[0]["message"].startswith("process ")
        for row in rows:
            assert list(row) == keys
            assert row["level"] in ("debug", "info", "warning", "error")
        # One process wrote each file.
        assert len({(row["component"], row["source"], row["life"]) for row in rows}) == 1
    sources = {(rows[0]["component"], rows[0]["source"]) for rows in logs.values()}
    (server,) = {event.server for event in run.server_events()}
    processes = {("driver", ""), ("trainer", "rank 0"), ("server", server), ("inference", "0")}
    assert processes <= sources
    assert list(run.logs_path.glob("*.log")) == []
    workers = {source for component, source in sources if component == "environment"}
    assert {"math-reasoning 0", "countdown 0", "countdown eval 0"} == workers
    told = [row["message"] for row in logs["driver.jsonl"]]
    assert "training" in told
    assert sum(" step 2/2 reward " in message for message in told) == 1
    of_rank = [row["message"] for row in logs["trainer-rank-0.jsonl"]]
    assert any("packing does not leak" in message for message in of_rank)


def require_metered(run: RunFolder) -> None:
    """Assert that the meters of this machine and of the server were read."""
    shown: dict[str, dict[str, list[float]]] = {}
    for sample in run.gauges():
        shown.setdefault(sample.source, {}).setdefault(sample.name, []).append(sample.value)
    (node,) = (source for source in shown if source.startswith("node "))
    assert min(shown[node]["memory/used_bytes"]) > 0
    assert max(shown[node]["cpu/used_share"]) > 0
    (server,) = (source for source in shown if source.startswith("http://"))
    assert len(shown[server]["vllm/requests_running"]) >= 2
    # Tokens of the plane bypass what vLLM counts by itself.
    assert max(shown[server]["vllm/generation_tokens_per_s"]) > 0


def require_traced(run: RunFolder, spans: list[Span]) -> None:
    """Assert that a collector has each attempt, its calls and what the server tells of them."""
    by_name: dict[str, list[Span]] = {}
    for span in spans:
        by_name.setdefault(span.name.split()[0], []).append(span)
    attempts = {span.span_id: span for span in by_name["invoke_agent"]}
    chats = {span.span_id: span for span in by_name["chat"]}
    assert len(attempts) == len(by_name["invoke_agent"]) >= len(run.rollouts())
    # Those of self-tests are of no environment.
    calls = [call for call in run.calls() if call.environment]
    of_training = [chat for chat in chats.values() if chat.parent_span_id]
    assert len(of_training) == len([call for call in calls if call.step is not None])
    assert len(chats) == len(calls)
    for chat in of_training:
        attempt = attempts[chat.parent_span_id]
        assert chat.trace_id == attempt.trace_id
        assert attempt.start_time_unix_nano <= chat.start_time_unix_nano
        assert chat.end_time_unix_nano <= attempt.end_time_unix_nano
    of_server = [span for span in by_name["llm_request"] if span.parent_span_id]
    assert len(of_server) == len([call for call in calls if not call.error])
    for span in of_server:
        assert span.trace_id == chats[span.parent_span_id].trace_id
        found = {one.key: one.value for one in span.attributes}
        assert found["gen_ai.usage.completion_tokens"].int_value > 0
        assert found["gen_ai.latency.time_in_model_decode"].double_value >= 0


@pytest.mark.engine
def test_the_commands_of_the_tutorial(tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    telescope(
        tmp_path,
        *("sft", "examples/sft.toml", "--number_of_steps", "12", "--warmup_steps", "2"),
        *("--batch_size", "32", "--num_examples", "500"),
    )
    # So small a batch may have no two rewards that differ: it is trained on all the same.
    keep = ["--discard_group_zero_advantage", "false"]
    train = ["train", "examples/quickstart.toml", *SMALL, *keep, "--evals", json.dumps([PUZZLES])]
    port = ["--inference_base_port", str(free_port())]
    with collector() as (endpoint, got):
        traced = ["--enable_vllm_tracing", "true", "--otlp_export_endpoint", endpoint]
        telescope(tmp_path, *train, *port, *traced)
    run = tmp_path / "runs" / "quickstart"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert set(summary["evals"]["countdown"]) == {"before", "after", "change"}
    assert (run / "report.html").stat().st_size > 1000
    assert len(list((run / "rollouts").glob("*.parquet"))) == 2

    require_recorded(RunFolder.open(run))
    require_tokens(RunFolder.open(run))
    require_logged(RunFolder.open(run))
    require_metered(RunFolder.open(run))
    require_traced(RunFolder.open(run), spans_of(got))
    require_shown(tmp_path / "runs", "quickstart", tmp_path)

    model = str(run / "checkpoints" / "final" / "hf")
    shape = ["--max-tokens", "12", "--examples", "4", "--rollouts", "4", "--k", "1,4"]
    # A template that asks for the prompt in another way shows in the tokens of the prompt.
    template = "{% for m in messages %}{{ m.content }}{% endfor %}????????"
    (tmp_path / "plain.jinja").write_text(template)
    shape += ["--chat-template", "plain.jinja", "--output", "measured"]
    measured = telescope(
        tmp_path, "eval", "math-reasoning", "--model", model, *DIGITS, *shape, "--json"
    )
    result = read_result(tmp_path / "measured")
    assert json.loads(measured)["num_scored"] == result.num_scored == 16
    assert (tmp_path / "measured" / "chat_template.jinja").read_text() == template
    assert len(result.chat_template) == 12
    for row in EvalFolder(tmp_path / "measured").rows():  # of the tiny model, a letter each
        assert row.num_prompt_tokens == len(f"{row.example_id}=????????")
    assert result.mean_completion_tokens > 0
    assert result.model == model
    assert (tmp_path / "measured" / "server.log").exists()
    assert "quickstart" in telescope(tmp_path, "eval", "--report", "runs/quickstart")
    assert processes_naming(str(tmp_path)) == []
