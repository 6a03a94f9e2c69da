"""What `telescope eval` sends to an endpoint, and what it says when the endpoint refuses."""

import asyncio
import signal
import threading
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from aiohttp import web
from tests.core.pictures import png

from telescope_cli.eval import command, play
from telescope_cli.eval.play import host_seen_by, telling
from telescope_cli.main import main
from telescope_core.base.interrupts import Interrupted
from telescope_core.chat.client import ChatClient
from telescope_core.errors import (
    EndpointAccessError,
    EndpointLostError,
    NoRoomError,
    ProcessDiedError,
)
from telescope_core.evals import EvalFolder, read_result

ENVIRONMENT = '''
from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Echo(SingleTurnEnvironment):
    """Say it again."""

    def examples(self, split):
        return ListSource([Example(id=f"{split}-{i}", prompt=str(i)) for i in range(64)])

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text == example.prompt)
'''


class Endpoint:
    """Answers with 200, or first with each of `statuses`; asks for `key` if there is one."""

    def __init__(self):
        self.requests = []
        self.num_listed = 0
        self.statuses = []
        self.key = ""

    async def chat(self, request):
        self.requests.append(await request.json())
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "who are you?"}, status=401)
        if self.statuses:
            return web.json_response({"error": "slow down"}, status=self.statuses.pop(0))
        asked = self.requests[-1]["messages"][-1]["content"]
        said = {"role": "assistant", "content": asked if isinstance(asked, str) else "left"}
        return web.json_response({"choices": [{"message": said, "finish_reason": "stop"}]})

    async def models(self, request):
        self.num_listed += 1
        return web.json_response({"data": [{"id": "tiny"}]})


@pytest.fixture
def endpoint(tmp_path, monkeypatch):
    (tmp_path / "said_env.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    loop = asyncio.new_event_loop()
    served = Endpoint()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", served.chat)
    app.router.add_get("/v1/models", served.models)
    runner = web.AppRunner(app, shutdown_timeout=1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", 0).start())
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield served
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)
    loop.close()


def evaluate(endpoint, *arguments) -> int:
    small = ("--examples", 2, "--rollouts", 1, "--output", "out")
    given = ("eval", "said_env:Echo", "--base-url", endpoint.url, *small, *arguments)
    with pytest.raises(SystemExit) as ended:
        main([*map(str, given)])
    return ended.value.code or 0


@pytest.mark.slow
def test_only_settings_that_were_given_are_sent(endpoint, capsys):
    assert evaluate(endpoint) == 0
    assert {*endpoint.requests[0]} == {"model", "messages", "max_tokens"}
    assert "temperature left to the endpoint" in capsys.readouterr().out
    sampling = EvalFolder(Path("out")).result().settings.sampling
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (None, None, None)
    assert sampling.repetition_penalty is None


@pytest.mark.slow
def test_settings_that_were_given_reach_the_endpoint_and_the_record(endpoint):
    code = evaluate(
        endpoint,
        *("--temperature", 0.5, "--top-p", 1, "--stop", "a", "--stop", "b"),
        *("--reasoning-effort", "low", "--extra-body", '{"top_k": 20}'),
    )
    assert code == 0
    sent = {k: v for k, v in endpoint.requests[0].items() if k not in ("model", "messages")}
    assert sent == {
        "max_tokens": 512,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["a", "b"],
        "reasoning_effort": "low",
        "top_k": 20,
    }
    sampling = EvalFolder(Path("out")).manifest()["sampling"]
    assert (sampling["stop"], sampling["extra"]["top_k"]) == (["a", "b"], 20)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--extra-body", "top_k=20"), "must be a JSON object"),
        (("--extra-body", "[1]"), "must be a JSON object"),
        (("--extra-body", '{"x": NaN}'), "NaN is not a finite number"),
        (("--extra-body", '{"x": 1e400}'), "1e400 is not a finite number"),
        (("--extra-body", '{"x": 1, "x": 2}'), "has the key 'x' twice"),
        (("--extra-body", '{"temperature": 1}'), "has an option of its own, --temperature"),
        (("--extra-body", '{"n": 4}'), "--rollouts asks several times"),
        (("--extra-body", '{"top_p": 1}', "--top-p", "0.5"), "both set top_p; give it once"),
        (("--api-key-env", "NO_SUCH_KEY"), "--api-key-env NO_SUCH_KEY: this environment variable"),
    ],
)
def test_what_cannot_be_sent_is_said_before_any_request(endpoint, capsys, given, said):
    assert evaluate(endpoint, *given) == 2
    assert said in capsys.readouterr().err
    assert (endpoint.num_listed, endpoint.requests) == (0, [])


@pytest.mark.slow
def test_a_key_that_is_refused_ends_at_once_and_names_its_variable(endpoint, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", "wrong")
    endpoint.key = "right"
    assert evaluate(endpoint, "--api-key-env", "MY_KEY", "--concurrency", 1) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "answered 401" in said
    assert "the API key in MY_KEY was not accepted" in said
    assert "--resume" not in said  # nothing is there to continue
    assert len(endpoint.requests) == 1


@pytest.mark.parametrize("error", [EndpointLostError, EndpointAccessError, ProcessDiedError])
def test_an_eval_that_loses_its_endpoint_says_how_to_go_on_if_anything_is_kept(tmp_path, error):
    folder = EvalFolder(tmp_path)
    with pytest.raises(error, match=r"^gone$"), telling("kept", [folder]):
        raise error("gone")
    (tmp_path / "rollouts.jsonl").touch()
    with pytest.raises(error, match=r"^gone\. kept$"), telling("kept", [folder]):
        raise error("gone")


@pytest.mark.parametrize("error", [partial(Interrupted, signal.SIGTERM), NoRoomError])
def test_what_is_kept_is_said_only_of_an_eval_that_has_a_rollout(tmp_path, error):
    folder = EvalFolder(tmp_path)
    for is_there, said in [(False, r"^gone\. nothing$"), (True, r"^gone\. kept$")]:
        if is_there:
            (tmp_path / "rollouts.jsonl").touch()
        with (
            pytest.raises((Interrupted, NoRoomError), match=said),
            telling("kept", [folder], otherwise="nothing"),
        ):
            raise error("gone")


@pytest.mark.slow
def test_a_signal_before_a_rollout_has_finished_says_so(endpoint, capsys, monkeypatch):
    stopped = Mock(side_effect=Interrupted(signal.SIGTERM))
    with monkeypatch.context() as early:
        early.setattr(command, "record_environment", stopped)
        assert evaluate(endpoint) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "telescope: interrupted by SIGTERM. No rollout was played; repeat the command"
    assert not Path("out").exists()
    with monkeypatch.context() as later:
        later.setattr(play, "run", stopped)
        assert evaluate(endpoint) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        "telescope: interrupted by SIGTERM. No finished rollout is recorded; repeat the command "
        "with --output out --resume"
    )
    assert evaluate(endpoint, "--resume") == 0


@pytest.mark.slow
@pytest.mark.parametrize(("statuses", "code"), [([400, 400], 5), ([], 0)])
def test_a_key_that_was_revoked_before_all_deadlines_came(
    endpoint, capsys, monkeypatch, statuses, code
):
    refused = Mock(side_effect=EndpointAccessError("it was revoked"))
    monkeypatch.setattr(ChatClient, "require_access", refused)
    endpoint.statuses = [*statuses, *statuses]
    assert evaluate(endpoint, "--concurrency", 1) == code
    said = " ".join(capsys.readouterr().err.split())
    assert ("it was revoked. Finished rollouts are in out" in said) == (code == 5)


@pytest.mark.slow
def test_no_key_where_one_is_wanted_names_the_usual_variable(endpoint, capsys, monkeypatch):
    monkeypatch.delenv("TELESCOPE_API_KEY", raising=False)
    endpoint.key = "right"
    assert evaluate(endpoint, "--concurrency", 1) == 5
    said = " ".join(capsys.readouterr().err.split())
    assert "no API key was sent, because TELESCOPE_API_KEY is not set" in said


@pytest.mark.slow
def test_trouble_is_shown_while_it_lasts_and_counted(endpoint, capsys):
    endpoint.statuses = [429]
    assert evaluate(endpoint, "--concurrency", 1) == 0
    captured = capsys.readouterr()
    assert f"{endpoint.url}/chat/completions answered 429" in captured.err
    assert "trying again in" in captured.err
    assert " 1 request sent again" in " ".join(captured.out.split())
    assert read_result(Path("out")).num_http_retries == 1
    assert len(endpoint.requests) == 3


def test_programs_elsewhere_are_given_an_address_that_they_can_reach():
    assert host_seen_by(()) == host_seen_by(("127.0.0.1:7000",)) == "127.0.0.1"
    assert host_seen_by(("[::1]:7000",)) == "::1"


@pytest.mark.slow
def test_the_environment_of_the_page_on_pictures(endpoint, tmp_path, capsys):
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "pictures.md").read_text()
    (tmp_path / "signs.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    eval_it = ["eval", "./signs.py:Signs", "--model", "tiny", "--base-url", endpoint.url]
    with pytest.raises(SystemExit) as ended:
        main(eval_it)
    assert ended.value.code == 3
    assert "the picture left.png cannot be read: No such file" in capsys.readouterr().err
    for name, red in (("left.png", 255), ("right.png", 0)):
        (tmp_path / name).write_bytes(png(red))
    with pytest.raises(SystemExit) as ended:
        main(eval_it)
    assert ended.value.code == 0
    kinds = [part["type"] for part in endpoint.requests[0]["messages"][0]["content"]]
    assert kinds == ["text", "image_url", "text", "image_url", "text"]
    (folder,) = (tmp_path / "runs" / "evals").iterdir()
    assert read_result(folder).reward.mean == 1.0
    assert (folder / "report.html").read_text().count('<img class="picture"') == 2 * 4
