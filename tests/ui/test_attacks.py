"""What a page of another site, a name that points here, and what stands in a folder cannot do."""

import json
import os
import socket
from contextlib import suppress
from urllib.parse import quote

import pytest
from tests.ui.recorded import BEGAN_S, MARKUP, row, write_steps
from tests.ui.served import TOKEN, answered, served

from telescope_core.records import RunFolder
from telescope_core.records.blocks import BlockLog
from telescope_core.records.timeline import ModelCall
from telescope_ui.web.serve import exposure

BEARER = {"authorization": f"Bearer {TOKEN}", "accept": "application/json"}


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"])
def test_only_get_exists(ui, method):
    answer = ui.ask("/", method=method, **BEARER)
    assert (answer.status, answer.headers["allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "", "a@127.0.0.1",
     "127.0.0.1@evil.example", "192.168.0.7", "[::ffff:1.2.3.4]", "127.0.0.1/x", "["],
)  # fmt: skip
def test_a_name_that_is_not_ours_gets_nothing(ui, host):
    answer = ui.ask("/", host=host, **BEARER)
    assert answer.status in (400, 403)
    assert b"first" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:9999", "[::1]:80", "LOCALHOST:1"])
def test_our_own_names_are_answered_at_any_port_of_a_tunnel(ui, host):
    assert ui.ask("/", host=host, **BEARER).status == 200


@pytest.mark.slow
def test_where_others_reach_it_names_that_somebody_can_point_here_still_get_nothing(
    recorded_folder, tmp_path
):
    with served([recorded_folder], tmp_path / "cache", host="0.0.0.0") as ui:
        for host in ("192.168.0.7:80", "[fe80::1]", socket.gethostname(), "localhost"):
            assert ui.ask("/", host=host, **BEARER).status == 200
        for host in ("evil.example", "192.168.0.7.evil.example", "a@192.168.0.7"):
            assert ui.ask("/", host=host, **BEARER).status == 403
        for origin, status in (("http://192.168.0.7", 200), ("http://192.168.0.8", 403)):
            assert ui.ask("/", host="192.168.0.7", origin=origin, **BEARER).status == status
        assert ui.ask("/", host="192.168.0.7").status == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "cluster"])
def test_who_lets_others_reach_it_is_told_what_that_means(host):
    said = exposure(host)
    assert f"other machines reach {host}" in said
    assert "without encryption" in said
    assert [exposure(one) for one in ("127.0.0.1", "localhost", "::1", "127.0.0.9")] == [""] * 4


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
    ],
)
def test_another_site_gets_nothing(ui, headers):
    answer = ui.ask("/?format=json", **BEARER, **headers)
    assert answer.status == 403
    assert b"first" not in answer.body


def test_our_own_page_and_the_person_are_answered(ui):
    own = f"http://127.0.0.1:{ui.port}"
    assert ui.ask("/", **BEARER, origin=own, sec_fetch_site="same-origin").status == 200
    assert ui.ask("/", **BEARER, sec_fetch_site="none").status == 200


@pytest.mark.parametrize("address", ["/", "/runs/first", "/live", "/static/app.js", "/x"])
def test_without_the_token_there_is_nothing(ui, address):
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Basic {TOKEN}"},
        {"authorization": f"Bearer {TOKEN}x"},
        {"cookie": f"token={TOKEN}"},
        {"cookie": "=;;=x; telescope-ui-=; a"},
    ):
        answer = ui.ask(address, accept="application/json", **headers)
        assert answer.status == 401, headers
        assert "expected the token" in answer.json["error"]["message"]
    assert ui.ask("/?token=wrong").status == 401
    assert ui.ask("/?token=%FF%00").status == 401


def test_a_browser_without_the_token_is_told_which_command_prints_the_address(ui):
    answer = ui.ask("/runs/first", accept="text/html,application/xhtml+xml")
    assert (answer.status, answer.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert b"<pre>telescope ui</pre>" in answer.body
    assert b"first" not in answer.body
    assert "default-src 'none'" in answer.headers["content-security-policy"]


@pytest.mark.slow
def test_a_proxy_passes_requests_on_by_its_own_name_only(recorded_folder, tmp_path):
    with served([recorded_folder], tmp_path / "cache", allowed_hosts=["ui.example"]) as ui:
        for origin in ("https://ui.example", "http://ui.example"):
            assert ui.ask("/", host="ui.example", origin=origin, **BEARER).status == 200
        assert ui.ask("/", host="UI.example:443", **BEARER).status == 200
        assert ui.ask("/", host="ui.example").status == 401
        for host in ("evil.example", "ui.example.evil.example", "x.ui.example"):
            assert ui.ask("/", host=host, **BEARER).status == 403
        for origin in ("https://evil.example", "https://127.0.0.1", "https://ui.example:1"):
            assert ui.ask("/", host="ui.example", origin=origin, **BEARER).status == 403
        # Only names that were allowed may come over https.
        assert ui.ask("/", host="localhost", origin="https://localhost", **BEARER).status == 403


def test_the_token_in_an_address_becomes_a_cookie_and_is_gone(ui):
    answer = ui.ask(f"/runs/first?token={quote(TOKEN)}&metric=a%2Fb")
    assert answer.status == 303
    assert answer.headers["location"] == "/runs/first?metric=a%2Fb"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    name = cookie.partition(";")[0]
    assert ui.ask("/?format=json", cookie=name).status == 200
    away = ui.ask(f"//evil.example/?token={quote(TOKEN)}")
    assert away.headers["location"] == "/evil.example/"


def test_every_answer_forbids_foreign_code_and_frames(ui):
    for address, status in (("/", 200), ("/runs/first", 200), ("/runs/x", 404), ("/x", 401)):
        headers = {} if status == 401 else BEARER
        answer = ui.ask(address, **headers)
        assert answer.status == status
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        *("/static/..%2f..%2fapp.py", "/static/%2e%2e/app.py", "/static/../app.py"),
        *("/runs/..", "/runs/%2e%2e", "/runs/..%2f..%2fetc", "/runs/%2fetc%2fpasswd"),
        *("/runs/first/evals/..", "/runs/first/evals/..%2f..", "/runs/first/evals/%2Fetc"),
        "/runs/first/evals/..%2fmath-after/rollouts/eval-0/0",
        *("/runs/first/rollouts/..%2f..%2f2.0/1/1", "/runs/first%00/rollouts"),
        *("/static/%00", "/runs/first/groups/%00", "/runs/%C3%28", "/runs/first/../../x"),
    ],
)
def test_no_address_leads_out_of_the_folders(ui, path):
    answer = ui.ask(path, **BEARER)
    assert answer.status == 404
    assert b"def create_app" not in answer.body
    assert b"root:" not in answer.body


def test_links_out_of_a_run_are_not_followed(tmp_path):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "config.json").write_text(json.dumps({"password": "hunter2"}))
    (secret / "a.log").write_text("password hunter2\n")
    other = RunFolder.create(secret / "run", config={})
    write_steps(other, range(1, 3), groups=1)
    folder = tmp_path / "runs"
    run = RunFolder.create(folder / "linked", config={"a": 1})
    (run.path / "config.json").unlink()
    (run.path / "config.json").symlink_to(secret / "config.json")
    (run.logs_path / "a.log").symlink_to(secret / "a.log")
    (run.path / "self_tests.json").symlink_to(secret / "config.json")
    (run.path / "metrics.jsonl").symlink_to(other.path / "metrics.jsonl")
    run.rollouts_path.rmdir()
    run.rollouts_path.symlink_to(other.rollouts_path)
    (run.path / "eval_points.jsonl").symlink_to(secret / "config.json")
    (folder / "outside").symlink_to(other.path)
    (folder / "up").symlink_to(tmp_path)
    with answered([folder], tmp_path / "cache") as ui:
        assert [one["key"] for one in ui.get("/")["runs"]] == ["linked"]
        assert ui.get("/")["runs"][0]["step"] == 0
        assert ui.get("/runs/linked/config")["settings"] == []
        assert ui.get("/runs/linked/logs")["lines"]["columns"]["message"] == []
        assert ui.get("/runs/linked/rollouts")["total"] == 0
        overview = ui.get("/runs/linked")
        assert overview["self_tests"] == []
        assert overview["metric_names"] == []
        assert overview["eval_points"] == []


@pytest.mark.slow
def test_names_of_runs_are_safe_in_addresses_and_stay_apart(tmp_path):
    for name in ("a b", "a?b", "x<script>", ".hidden", "a'b;--", "[z]*"):
        write_steps(RunFolder.create(tmp_path / "runs" / name, config={}), range(1, 2), groups=1)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        keys = sorted(one["key"] for one in ui.get("/")["runs"])
        assert keys == ["-z--", "a-b", "a-b---", "a-b-2", "x-script-"]
        for key in keys:
            assert ui.get(f"/runs/{key}/rollouts")["total"] == 4


def test_what_a_rollout_says_is_data(ui):
    answer = ui.ask("/runs/first/rollouts/1.0/0/1", **BEARER)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["messages"][1]["content"] == f"Step 1 says {MARKUP}"
    error = ui.ask(f"/runs/{quote('<script>')}", **BEARER)
    assert error.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "query",
    [
        *(
            "sort=step;DROP%20TABLE%20x",
            'sort="',
            "where=step%3E1);--",
            "where=1=1",
            "where=step=x",
        ),
        *('distribution="', "distribution=row", "tag='%20OR%201=1", "cursor=1.1;--&q=x"),
        *("limit=0", "offset=-1", "step_from=99999999999999999999", "group=both", "format=1"),
        "reward_from=x",
    ],
)
def test_queries_that_cannot_be_are_refused(ui, query):
    answer = ui.ask(f"/runs/first/rollouts?{query}", **BEARER)
    assert (answer.status, set(answer.json)) == (400, {"error"})


def test_quotes_in_values_are_values(ui):
    for name in ("environment", "group_id", "example_id", "server", "q"):
        assert ui.get(f"/runs/first/rollouts?{name}=%27%20OR%20%27%27=%27")["total"] in (0, None)
    # One that reads no further may have closed the connection before all was sent.
    with suppress(ConnectionError):
        assert ui.ask("/" + 300_000 * "a", **BEARER).status in (400, 431)
    assert ui.get("/runs/first")["run"]["name"] == "first"


@pytest.mark.slow
def test_a_folder_of_a_newer_format_says_so_and_the_others_go_on(tmp_path):
    for name in ("good", "newer", "broken", "empty"):
        write_steps(RunFolder.create(tmp_path / "runs" / name, config={}), range(1, 2), groups=1)
    newer = tmp_path / "runs" / "newer" / "run.json"
    newer.write_text(json.dumps({**json.loads(newer.read_text()), "format_version": 99}))
    (tmp_path / "runs" / "broken" / "run.json").write_text('{"name": ')
    (tmp_path / "runs" / "empty" / "run.json").write_text('{"name": 3}')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        found = {one["key"]: one for one in ui.get("/")["runs"]}
        assert found["good"]["error"] is None
        assert "is a run folder of format 99" in found["newer"]["error"]
        assert found["broken"]["state"] == found["empty"]["state"] == "unreadable"
        assert "format 99" in ui.get("/runs/newer", status=409)["error"]["message"]
        assert ui.get("/runs/good")["run"]["state"] == "running"


@pytest.mark.slow
def test_files_that_are_no_rollouts_are_named_and_the_others_are_read(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 6), groups=1)
    (run.rollouts_path / "step-000002.parquet").write_bytes(b"PAR1 and no more")
    (run.rollouts_path / "step-000004.parquet").write_bytes(b"")
    (run.rollouts_path / "step-x.parquet").write_bytes(b"")
    (run.path / "calls").mkdir()
    (run.path / "calls" / "000001.parquet").write_bytes(b"")
    (run.path / "calls" / "000002.jsonl").write_bytes(b'\xff\xfe{"time_s": []}\n{"ti')
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        page = ui.get("/runs/r/rollouts")
        assert page["total"] == 12
        assert [problem[:28] for problem in page["index"]["problems"]] == [
            *("rollouts/step-000004.parquet", "rollouts/step-000002.parquet")
        ]
        assert ui.get("/runs/r/timeline")["rows"] == []


def test_a_damaged_block_is_left_out_or_told(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 3), groups=1)
    with BlockLog(run.path / "calls", ModelCall, block_rows=50) as log:
        for at in range(100):
            log.add(
                ModelCall(
                    **{"time_s": BEGAN_S + at, "duration_s": 1.0, "server": "http://127.0.0.1:1"},
                    **{"group_id": "1.0", "index": at, "step": 1},
                )
            )
    first, second = sorted((run.path / "calls").glob("*.parquet"))
    content = first.read_bytes()
    first.write_bytes(content[:4] + b"no footer" + content[-4:])
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/runs/r/rollouts")["choices"]["server"] == ["http://127.0.0.1:1"]
        (shown,) = ui.get("/runs/r/timeline")["rows"]
        assert shown["label"] == "http://127.0.0.1:1"
        # A footer that promises what is not there is seen when it is read.
        whole = second.read_bytes()
        footer = 8 + int.from_bytes(whole[-8:-4], "little")
        second.write_bytes(b"PAR1" + b"\xff" * (len(whole) - footer - 4) + whole[-footer:])
        page = ui.get("/runs/r/timeline")
        assert page["rows"] == []
        assert [one[:22] for one in page["problems"]] == [
            *("calls/000001.parquet i", "calls/000002.parquet i")
        ]
        assert ui.get("/runs/r")["identity"]["step"] == 2


@pytest.mark.slow
def test_files_of_ten_gigabytes_are_read_in_part(tmp_path):
    """They are sparse: zeros without an end of a line."""
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    write_steps(run, range(1, 3), groups=1)
    for name in ("metrics.jsonl", "logs/a.log", "summary.json", "calls/000001.jsonl"):
        path = run.path / name
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as stream:
            stream.truncate(10 * 2**30)
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        assert ui.get("/")["runs"][0]["step"] == 2
        assert len(ui.get("/runs/r/logs")["lines"]["columns"]["message"]) <= 500
        assert ui.get("/runs/r/timeline")["page"] == "timeline"
        problems = ui.get("/runs/r")["problems"]
        assert any("summary.json has 10,240 MiB" in one for one in problems)
        assert any("metrics.jsonl" in one for one in problems)


@pytest.mark.slow
def test_members_of_objects_that_nobody_expects_do_no_harm(tmp_path):
    run = RunFolder.create(tmp_path / "runs" / "r", config={})
    names = {f"m{at}": 1.0 for at in range(300)} | {'quo"te': 2.0, "a/b~c": 3.0, "A": 1.0, "a": 2.0}
    one = row(1, 0, 0)
    fields = {name: getattr(one, name) for name in one.__dataclass_fields__}
    run.write_rollouts(1, [type(one)(**{**fields, "metrics": names})])
    with answered([tmp_path / "runs"], tmp_path / "cache") as ui:
        columns = ui.get("/runs/r/rollouts")["columns"]
        found = [name for name in columns if name.startswith("metrics/")]
        assert len(found) == 200
        assert columns["metrics/A"] == [1.0]
        assert columns["metrics/a/b~c"] == [3.0]
        rollout = ui.get("/runs/r/rollouts/1.0/0/1")
        assert rollout["row"]["metrics"] == names


def test_nothing_is_written_into_a_run(recorded_folder, ui):
    def state():
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_size)
            for path in recorded_folder.rglob("*")
        }

    before = state()
    for address in ("", "/rollouts", "/timeline", "/infra", "/evals", "/logs", "/config"):
        ui.get(f"/runs/first{address}")
    assert state() == before
    assert not any(name.endswith(".duckdb") for name in os.listdir(recorded_folder / "first"))


def test_cookies_of_other_programs_of_the_machine_do_not_hide_ours(ui):
    """A browser sends those of all ports, whatever is in them."""
    answer = ui.ask(f"/?token={quote(TOKEN)}")
    own = answer.headers["set-cookie"].partition(";")[0]
    for other in ('settings={"theme": "dark"}', "a=b c", "x@y[]=1", 'q="', "\xff=\xff"):
        for cookie in (f"{other}; {own}", f"{own}; {other}"):
            assert ui.ask("/?format=json", cookie=cookie).status == 200, cookie
