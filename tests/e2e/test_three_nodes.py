"""A run over three machines with addresses of their own, two of which are cut off in mid-run."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from telescope_core.records import RunFolder
from telescope_core.records.servers import ServerState

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import TELESCOPE
from three_nodes import Nodes, running_nodes, what_is_missing

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

RUN = """
[run]
name = "cluster"
number_of_steps = 1000
[model]
model = {model}
[[environments]]
name = "math-reasoning"
env = {{ level = "digit", operations = "+", instruction = "" }}
[[environments]]
name = {over_http}
[rollout]
group_size = 4
prompts_batch_size_for_trainer = 4
max_tokens = 8
env_workers = 2
discard_group_zero_advantage = false
[trainer]
trainer_num_workers = 2
learning_rate = 1e-3
seq_len = 128
[inference]
inference_num_workers = 2
max_model_len = 64
[checkpoint]
checkpoint_every = 1
checkpoint_keep_last = 2
checkpoint_dir = {checkpoints}
[ray]
ray_address = {address}
ray_trainer_placement_strategy = "STRICT_PACK"
ray_inference_placement_strategy = "STRICT_SPREAD"
ray_environment_placement = "SPREAD"
ray_environment_cpus_per_worker = 1
ray_inference_cpus_per_worker = 1.5
ray_trainer_cpus_per_worker = 1.5
ray_placement_timeout_s = 15.0
"""
WITHIN_S = 200.0
OVER_HTTP = """
import asyncio
import json
import urllib.request

from telescope_core import Environment, Example, ListSource, StopReason, reward


class OverHttp(Environment):
    def examples(self, split):
        return ListSource([Example(id=f"{split}-{number}", prompt="1+1=") for number in range(8)])

    def ask(self, endpoint, prompt):
        asked = {"model": endpoint.model, "messages": [{"role": "user", "content": prompt}]}
        request = urllib.request.Request(
            f"{endpoint.base_url}/chat/completions",
            data=json.dumps(asked).encode(),
            headers={
                "authorization": f"Bearer {endpoint.api_key}",
                "content-type": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            json.load(reply)

    async def play(self, episode):
        await asyncio.to_thread(self.ask, episode.endpoint, episode.example.prompt)
        return StopReason.COMPLETED

    @reward
    def digits(self, rollout, example):
        return float(any(map(str.isdigit, rollout.completion_text)))
"""
"""Its rollouts reach the model through an endpoint of the driver, from whichever node they are."""


def until(told: Callable[[], bool], run: "subprocess.Popen[str]", what: str) -> None:
    """Wait until `told` returns true; fails if the run ends before."""
    give_up_s = time.monotonic() + WITHIN_S
    while not told():
        assert run.poll() is None, f"the run ended with {run.returncode} before {what}"
        assert time.monotonic() < give_up_s, f"no sign of {what}"
        time.sleep(0.2)


def node_of_ranks(folder: Path) -> int:
    """Return the number of the node that the newest trainer ranks are on."""
    found = re.findall(r"trainer rank 0 on \S+ \(10\.77\.0\.(\d)\)", driver_log(folder))
    return int(found[-1])


def driver_log(folder: Path) -> str:
    lines = (folder / "logs" / "driver.jsonl").read_text().splitlines()
    return "\n".join(json.loads(line)["message"] for line in lines if line)


def start(nodes: Nodes, place: Path, model: Path) -> "subprocess.Popen[str]":
    text = RUN.format(
        model=json.dumps(str(model)),
        checkpoints=json.dumps(str(place / "checkpoints")),
        address=json.dumps(nodes.address),
        over_http=json.dumps(f"{place / 'over_http.py'}:OverHttp"),
    )
    (place / "run.toml").write_text(text)
    (place / "over_http.py").write_text(OVER_HTTP)
    return subprocess.Popen(
        nodes.command(1, [*TELESCOPE, "train", "run.toml"]),
        cwd=place,
        env=nodes.variables(1),
        stdout=(place / "printed.txt").open("w"),
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_a_run_over_three_nodes_outlives_one_of_them_and_names_the_next(
    tmp_path: Path, tiny_model: Path
) -> None:
    if missing := what_is_missing():
        pytest.skip(f"needs {missing}")
    (tmp_path / "runs").mkdir()
    folder = tmp_path / "runs" / "cluster"
    # Ranks (3 CPUs) and servers (1.5) fit on the second and the third node alone, so that each of
    # these has a server, whichever the ranks come to. There is room beside them for environments.
    with running_nodes([1, 7, 7], own=[tmp_path / "runs"]) as nodes:
        run = start(nodes, tmp_path, tiny_model)
        try:
            check_run(nodes, folder, run)
        except BaseException:
            sys.stderr.write((tmp_path / "printed.txt").read_text()[-4000:])
            raise
        finally:
            if run.poll() is None:
                run.send_signal(signal.SIGKILL)
            run.wait(timeout=30)
    printed = (tmp_path / "printed.txt").read_text()
    assert run.returncode == 6, printed[-3000:]


def check_places(folder: Path) -> None:
    """Check that a server is on each node that will be cut off, and environments are on two."""
    urls = {row.server for row in RunFolder.open(folder).server_events()}
    hosts = sorted(url.rpartition(":")[0] for url in urls)
    assert hosts == ["http://10.77.0.2", "http://10.77.0.3"], "STRICT_SPREAD"
    told = driver_log(folder)
    workers = set(re.findall(r"environment process \d of \S+ runs on (.*)", told))
    assert len(workers) >= 2, told[-2000:]
    assert re.search(r"OverHttp runs on .*10\.77\.0\.[23]", told), told[-2000:]
    rows = RunFolder.open(folder).rollouts([1])
    over_http = [row for row in rows if "OverHttp" in row.environment]
    assert over_http, {row.environment for row in rows}
    assert all(row.status != "failed" for row in over_http), over_http[0].error


def check_logs(folder: Path) -> None:
    """Check that logs of nodes that do not share the run folder are in it."""
    for name in ("trainer-rank-0", "trainer-rank-1", "inference-0", "inference-1"):
        lines = (folder / "logs" / f"{name}.jsonl").read_text().splitlines()
        assert lines, name
        assert all(json.loads(line)["message"] is not None for line in lines if line), name
    begun = (folder / "logs" / "trainer-rank-0.jsonl").read_text().count(" begins")
    assert begun == 2, "the log of a rank goes on with its second life"


def check_run(nodes: Nodes, folder: Path, run: "subprocess.Popen[str]") -> None:
    until((folder / "metrics.jsonl").is_file, run, "the first step")
    records = RunFolder.open(folder)
    until(lambda: records.last_step() >= 3, run, "three steps")
    check_places(folder)
    first = node_of_ranks(folder)
    nodes.cut(first)
    until(lambda: len(records.restarts()) == 1, run, "new ranks")
    (restart,) = records.restarts()
    assert f"10.77.0.{first}" in restart.reason, restart
    assert restart.step >= 1, "from a checkpoint"
    until(lambda: records.last_step() > restart.reached, run, "a step of the new ranks")
    second = node_of_ranks(folder)
    assert {first, second} == {2, 3}
    lost = [one for one in records.server_events() if one.state is ServerState.LOST]
    # What ran beside the ranks is lost with them, and nothing else is.
    assert {one.server.split(":")[1] for one in lost} == {f"//10.77.0.{first}"}
    check_logs(folder)
    nodes.cut(second)
    run.wait(timeout=WITHIN_S)
    state = json.loads((folder / "run.json").read_text())
    assert f"10.77.0.{second}" in json.dumps(state), state
