"""The folder of an eval: what is recorded, what can be read again, who may write."""

import json
import threading
from dataclasses import asdict, replace
from functools import partial

import pytest
from tests.core.evals.test_eval_runner import Echo, Ranked, odd_fails, opened, settings

from telescope_core import ConfigError
from telescope_core.errors import EndpointError, TelescopeError
from telescope_core.evals import EvalFolder, read_result, run_eval
from telescope_core.evals.result import duration_note, result_of
from telescope_core.images import image_of, message_of
from telescope_core.records.identity import RunState
from telescope_core.records.rows import readable_row
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Message


async def test_a_resumed_eval_plays_only_what_is_missing(tmp_path):
    manifest = {"environment": "echo", **asdict(settings())}
    folder = EvalFolder.create(tmp_path / "eval", manifest=manifest)
    first = []
    await run_eval(opened(), ScriptedClient(odd_fails), settings(), on_rollout=first.append)
    for row in first[:7]:
        folder.append(row)
    with (folder.path / "rollouts.jsonl").open("a") as stream:
        stream.write('{"torn": ')
    folder.fail("stopped")
    again = EvalFolder.resume(folder.path, manifest=manifest)
    assert again.read().problems == []
    client = ScriptedClient(odd_fails)
    result = await run_eval(
        opened(), client, settings(), on_rollout=again.append, done=again.rows()
    )
    again.finish(result)
    assert len(client.requests) == 12 - 7
    assert result.num_earlier == 7
    assert duration_note(result) == " since it was resumed with 7 rollouts"
    assert (result.num_scored, result.reward.mean) == (12, 0.5)
    assert len(again.rows()) == 12
    lines = (folder.path / "rollouts.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 12, "what the kill cut short is gone"
    assert read_result(folder.path) == result


async def test_what_was_said_is_not_held_for_the_result(monkeypatch):
    """Pictures and long conversations of all rollouts would fill the memory."""
    held, said = [], []
    monkeypatch.setattr(
        "telescope_core.evals.runner.result_of",
        lambda rows, *rest, **more: held.extend(rows) or result_of(rows, *rest, **more),
    )
    result = await run_eval(opened(), ScriptedClient(odd_fails), settings(), on_rollout=said.append)
    assert result.num_scored == len(held) == len(said)
    assert all(row.messages for row in said)
    assert not any(row.messages or row.conversations for row in held)


async def test_rollouts_are_read_without_pictures_but_for_those_that_are_asked_for(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    rows = []
    await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    picture = image_of(b"\x89PNG\r\n\x1a\n")
    seen = [
        replace(row, messages=(message_of("user", "What?", picture), *row.messages))
        for row in rows[:2]
    ]
    for row in seen:
        folder.append(row)
    assert folder.rows() == seen
    first = seen[0]
    shown = folder.rows(pictures_of={(first.group_id, first.index)})
    assert shown[0] == first
    assert [one.content for one in shown[1].messages] == [one.content for one in seen[1].messages]
    assert not any(one.images for one in shown[1].messages)


async def test_groups_are_whole_and_of_rollouts_played_twice_they_have_the_later(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    assert not list(folder.groups())
    rows = []
    await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    picture = image_of(b"\x89PNG\r\n\x1a\n")
    again = replace(rows[0], messages=(message_of("user", "Again?", picture),))
    for row in (*rows, again):
        folder.append(row)
    grouped = {}
    for row in (again, *rows[1:]):
        grouped.setdefault(row.group_id, []).append(row)
    assert list(folder.groups()) == list(grouped.values())


async def test_a_folder_that_is_moved_is_not_made_anew_and_goes_on_where_it_is(tmp_path):
    manifest = {"environment": "echo", **asdict(settings())}
    folder = EvalFolder.create(tmp_path / "eval", manifest=manifest)
    rows = []
    result = await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    folder.append(rows[0])
    folder.path.rename(tmp_path / "moved")
    for write in (
        partial(folder.append, rows[1]),
        partial(folder.append_attempt, rows[1]),
        partial(folder.finish, result),
    ):
        with pytest.raises(TelescopeError, match=r"eval is gone: .*--resume"):
            write()
    folder.fail("it is gone")
    folder.end_unless_ended(RunState.FAILED, "it is gone")
    assert not folder.path.exists()
    EvalFolder(tmp_path / "moved").fail("it was moved")
    assert EvalFolder.resume(tmp_path / "moved", manifest=manifest).rows() == rows[:1]


def test_what_to_do_about_a_folder_that_is_gone_is_that_of_its_command(tmp_path):
    folder = EvalFolder(tmp_path / "gone")
    folder.if_gone = "repeat the command"
    with pytest.raises(TelescopeError, match=r"gone is gone: .* went on; repeat the command$"):
        folder.append_attempt(None)


def test_a_folder_that_is_not_there_holds_nothing_to_continue(tmp_path):
    with pytest.raises(ConfigError, match=r"no such folder.*without --resume"):
        EvalFolder.resume(tmp_path / "eval", manifest={})


async def test_an_eval_may_grow_and_keeps_what_it_has():
    done = []
    await run_eval(opened(), ScriptedClient(odd_fails), settings(), on_rollout=done.append)
    client = ScriptedClient(odd_fails)
    larger = settings(num_examples=5, rollouts=4, ks=(1, 4), concurrency=1)
    rows = []
    result = await run_eval(opened(), client, larger, on_rollout=rows.append, done=done)
    assert len(client.requests) == 4 * 1 + 4
    assert {row.index for row in rows if row.group_id == "eval-000000"} == {3}
    assert (result.num_tasks, result.num_rollouts, result.num_scored) == (5, 20, 20)


async def test_with_group_rewards_an_example_that_grows_is_played_again():
    done = []
    await run_eval(opened(Ranked), ScriptedClient(["0"]), settings(), on_rollout=done.append)
    client = ScriptedClient(["0"])
    grown = settings(rollouts=4)
    result = await run_eval(opened(Ranked), client, grown, done=done)
    assert len(client.requests) == 16
    assert result.num_scored == 16
    same = ScriptedClient(["0"])
    await run_eval(opened(Ranked), same, settings(), done=done)
    assert same.requests == []


@pytest.mark.parametrize("end", ["finish", "fail", "kill"])
async def test_what_a_resumed_eval_plays_again_is_among_the_attempts_at_its_end(tmp_path, end):
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    asked = settings(num_examples=2, rollouts=1, ks=(1,), max_retries=0)
    down = ScriptedClient([EndpointError("down")])
    await run_eval(opened(), down, asked, on_rollout=folder.append)
    with (folder.path / "rollouts.jsonl").open("a") as stream:
        stream.write("damaged\n")
    folder.fail("stopped")
    again = EvalFolder.resume(folder.path, manifest={})
    result = await run_eval(
        opened(), ScriptedClient(["0"]), asked, on_rollout=again.append, done=again.rows()
    )
    replaced = again.path.joinpath("rollouts.jsonl").read_text().splitlines(keepends=True)[:2]
    if end == "kill":
        # Between the two files: one of the lines is in both.
        (again.path / "attempts.jsonl").write_text(replaced[0])
        folder.fail("killed")
        EvalFolder.resume(folder.path, manifest={})
    elif end == "finish":
        again.finish(result)
    else:
        again.fail("stopped")
    assert (again.path / "attempts.jsonl").read_text() == "".join(replaced)
    lines = (again.path / "rollouts.jsonl").read_text().splitlines()
    assert (len(lines), lines[0]) == (3, "damaged")
    assert {row.status for row in folder.rows()} == {"kept"}
    assert {row.status for row in folder.attempts()} == {"failed"}
    assert not list(again.path.glob(".*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": 1, "rollouts": 5, "num_examples": 9, "ks": (1, 5)}, None),
        ({"base_url": "http://127.0.0.1:2/v1"}, None),
        ({"positions": (3, 2, 1, 0, 5), "num_examples": 5}, None),
        ({"model": "b"}, "model: 'a' then, 'b' now"),
        (
            {"sampling": {**asdict(settings().sampling), "seed": 9}},
            r"settings \(sampling.seed: None then, 9 now\);",
        ),
        ({"deadline_s": 1.0}, "deadline_s: 300.0 then, 1.0 now"),
        ({"rollouts": 2}, "rollouts: 3 then, 2 now; it may only grow"),
        ({"num_examples": 2}, "num_examples: 4 then, 2 now; it may only grow"),
        ({"positions": (9, 8, 7, 6, 5), "num_examples": 5}, "other examples"),
    ],
)
def test_what_may_change_at_resume(tmp_path, changes, message):
    manifest = {"model": "a", "base_url": "http://127.0.0.1:1/v1", **asdict(settings())}
    folder = EvalFolder.create(tmp_path / "eval", manifest=manifest)
    folder.fail("stopped")
    changed = {**manifest, **changes}
    if message is None:
        resumed = EvalFolder.resume(folder.path, manifest=changed)
        assert resumed.manifest() == json.loads(json.dumps(changed))
        return
    with pytest.raises(ConfigError, match=message):
        EvalFolder.resume(folder.path, manifest=changed)
    assert folder.manifest() == json.loads(json.dumps(manifest))


def test_settings_that_an_earlier_version_lacked_are_no_change_at_their_default(tmp_path):
    manifest = {"model": "a", **asdict(settings())}
    sampling = {**manifest["sampling"]}
    del sampling["include_stop_str_in_output"], sampling["min_p"]
    earlier = {**manifest, "sampling": sampling}
    del earlier["positions"], earlier["deadline_s"]
    folder = EvalFolder.create(tmp_path / "eval", manifest=earlier)
    folder.fail("stopped")
    EvalFolder.resume(folder.path, manifest=manifest).fail("stopped")
    EvalFolder.create(tmp_path / "other", manifest=earlier).fail("stopped")
    keeps = {"sampling": {**manifest["sampling"], "include_stop_str_in_output": True}}
    with pytest.raises(ConfigError, match="include_stop_str_in_output: False then, True now"):
        EvalFolder.resume(tmp_path / "other", manifest={**manifest, **keeps})


@pytest.mark.parametrize("sampling", [None, "greedy", [0.7]])
def test_recorded_sampling_that_is_damaged_is_a_difference_and_no_crash(tmp_path, sampling):
    manifest = {"model": "a", **asdict(settings())}
    folder = EvalFolder.create(tmp_path / "eval", manifest={**manifest, "sampling": sampling})
    folder.fail("stopped")
    with pytest.raises(ConfigError, match=r"different settings .*sampling"):
        EvalFolder.resume(folder.path, manifest=manifest)


def test_a_folder_that_is_in_use_or_holds_something_is_refused(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={"model": "a"})
    for start in (EvalFolder.create, EvalFolder.resume):
        with pytest.raises(ConfigError, match=r"still running \(process \d+ on .+, since 20"):
            start(folder.path, manifest={"model": "a"})
    folder.fail("stopped")
    with pytest.raises(ConfigError, match="--resume"):
        EvalFolder.create(folder.path, manifest={})
    with pytest.raises(ConfigError, match=r"no eval\.json"):
        EvalFolder.resume(tmp_path, manifest={})
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        EvalFolder.create(tmp_path / "file", manifest={})


def test_of_many_that_resume_at_once_one_goes_on(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={"model": "a"})
    folder.fail("stopped")
    outcomes = []
    ready = threading.Barrier(8)

    def resume():
        ready.wait(10)
        try:
            outcomes.append(EvalFolder.resume(folder.path, manifest={"model": "a"}))
        except ConfigError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=resume) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sum(isinstance(one, EvalFolder) for one in outcomes) == 1
    assert sum("still running" in one for one in outcomes if isinstance(one, str)) == 7


def test_evals_with_the_same_name_get_folders_of_their_own(tmp_path):
    folders = [EvalFolder.create_beside(tmp_path / "runs" / "a", manifest={}) for _ in range(3)]
    assert [folder.path.name for folder in folders] == ["a", "a-2", "a-3"]
    assert {folder.info().observed_state for folder in folders} == {RunState.RUNNING}


async def test_a_row_that_cannot_be_read_does_not_hide_the_others(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    rows = []
    await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    folder.append(rows[0])
    with (folder.path / "rollouts.jsonl").open("a") as stream:
        stream.write('{"status": "kept", "messages": ["hi"]}\n[]\nnot JSON\n')
    folder.append(rows[1])
    found = folder.read()
    assert found.rows == rows[:2] == folder.rows()
    assert [row for group in folder.groups() for row in group] == rows[:2]
    assert [problem.partition(":")[0] for problem in found.problems] == [
        f"rollouts.jsonl, line {number}" for number in (2, 3, 4)
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"example_id": 5},
        {"messages": (Message(role="user", content=b"bytes"),)},
        {"messages": ("text",)},
        {"tags": {"a": object()}},
        {"metrics": {"a": None}},
    ],
)
async def test_what_no_file_can_hold_is_a_failed_rollout_that_says_so(tmp_path, changes):
    rows = []
    await run_eval(opened(), ScriptedClient(["0"]), settings(), on_rollout=rows.append)
    assert readable_row(rows[0]) is rows[0]
    row = readable_row(replace(rows[0], **changes))
    assert (row.status, row.status_reason, row.reward) == ("failed", "UnreadableRollout", None)
    assert "cannot be recorded" in row.error
    folder = EvalFolder.create(tmp_path / "eval", manifest={})
    folder.append(row)
    assert folder.rows() == [row]


async def test_an_eval_counts_what_cannot_be_recorded_as_failed():
    class Odd(type(opened())):
        async def play(self, request, policy):
            rollout = await super().play(request, policy)
            return replace(rollout, golden_answers={"a": b"1"}) if request.index else rollout

    environment = Odd(Echo(), name="echo", version="1.2")
    rows = []
    result = await run_eval(
        environment, ScriptedClient(["0"]), settings(ks=(1,)), on_rollout=rows.append
    )
    assert (result.num_scored, result.failures) == (4, {"UnreadableRollout": 8})
    assert len(rows) == 12


@pytest.mark.parametrize("key", ["environment_files", "model_files"])
def test_other_files_under_the_same_settings_end_a_resume_and_are_named(tmp_path, key):
    began = {key: {"a": "1", "b": "1"}}
    folder = EvalFolder.create(tmp_path / "eval", manifest=began)
    folder.fail("stopped")
    with pytest.raises(ConfigError, match="file b: its content is another one") as refused:
        EvalFolder.resume(folder.path, manifest={key: {"a": "1", "b": "2"}})
    assert "file a" not in str(refused.value)


def test_an_eval_that_an_earlier_version_began_has_no_files_to_compare(tmp_path):
    folder = EvalFolder.create(tmp_path / "eval", manifest={"model": "m"})
    folder.fail("stopped")
    again = EvalFolder.resume(folder.path, manifest={"model": "m", "model_files": {"a": "1"}})
    assert again.manifest()["model_files"] == {"a": "1"}
