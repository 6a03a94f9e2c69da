"""What environment workers log: beside their output, by name and life, without their secrets."""

import json

import pytest
from wire_cases import request

from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.processes.settings import LOG_VARIABLE
from telescope_core.scripted import ScriptedClient

pytestmark = pytest.mark.slow


async def test_workers_log_beside_their_output(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_SECRET", "s3cret-of-the-toy")
    processes = ProcessSettings(
        isolation=Isolation.PROCESS, log_folder=tmp_path, log_name="toy eval"
    )
    for _ in range(2):
        pool = open_environment("worker_toys:Talkative", {}, processes)
        played = await pool.play(request(), ScriptedClient(["0"]).policy("r"))
        await pool.close()
        assert played.error is None
        assert LOG_VARIABLE not in played.tags["variables"]
    rows = [
        json.loads(line)
        for line in (tmp_path / "environment-toy-eval-0.jsonl").read_text().splitlines()
    ]
    assert [row["life"] for row in rows] == [1, 1, 1, 2, 2, 2]
    assert {(row["component"], row["source"]) for row in rows} == {("environment", "toy eval 0")}
    begun, said, warned = rows[3:]
    assert begun["message"].startswith("process ")
    assert said["message"] == "the secret is (left out)"
    assert warned["level"] == "warning"
    assert "UserWarning: this toy is old" in warned["message"]
    # What is in the log is not in the output a second time.
    printed = [
        json.loads(line)
        for line in (tmp_path / "environment_output-toy-eval-0.jsonl").read_text().splitlines()
    ]
    assert [(row["message"], row["life"]) for row in printed] == [("printed", 1), ("printed", 2)]
    assert {(row["component"], row["source"]) for row in printed} == {
        ("environment_output", "toy eval 0")
    }
