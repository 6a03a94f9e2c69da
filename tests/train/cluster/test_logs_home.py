"""Logs of another node arrive whole and in order, also when files are full and nodes are lost."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from ray.exceptions import RayActorError

from telescope_train.cluster import logs_home as module
from telescope_train.cluster.logs_home import LogPart, LogReader, LogsHome


class Far:
    """A reader on another node, which may be lost."""

    def __init__(self, folder: Path) -> None:
        self._reader = LogReader(folder)
        self.is_lost = False

    async def more(self) -> Sequence[LogPart]:
        if self.is_lost:
            raise RayActorError
        return self._reader.more()


def folders(tmp_path: Path) -> tuple[Path, Path]:
    far, home = tmp_path / "far", tmp_path / "home"
    home.mkdir()
    return far, home


def append(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)


async def test_what_is_new_is_fetched_and_nothing_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MOST_BYTES", 7)
    far, home = folders(tmp_path)
    logs = LogsHome(home, {"b": Far(far).more})
    await logs.fetch()  # a node that has not begun to log
    name, text = "trainer-rank-0.jsonl", ""
    for line in ("first\n", "second, longer than what is sent at once\n", "third\n"):
        append(far / name, line)
        text += line
        await logs.fetch()
        assert (home / name).read_text() == text


async def test_a_file_that_was_full_keeps_its_place(tmp_path):
    far, home = folders(tmp_path)
    logs = LogsHome(home, {"b": Far(far).more})
    append(far / "inference-0.jsonl", "1\n")
    await logs.fetch()
    append(far / "inference-0.jsonl", "2\n")
    (far / "inference-0.jsonl").rename(far / "inference-0.1.jsonl")
    append(far / "inference-0.jsonl", "3\n")
    await logs.fetch()
    (far / "inference-0.1.jsonl").rename(far / "inference-0.2.jsonl")
    (far / "inference-0.jsonl").rename(far / "inference-0.1.jsonl")
    append(far / "inference-0.jsonl", "4\n")
    await logs.fetch()
    assert {path.name: path.read_text() for path in home.iterdir()} == {
        "inference-0.2.jsonl": "1\n2\n",
        "inference-0.1.jsonl": "3\n",
        "inference-0.jsonl": "4\n",
    }


async def test_a_process_that_goes_on_elsewhere_goes_on_in_its_log(tmp_path):
    far, home = folders(tmp_path)
    other = tmp_path / "other"
    first, second = Far(far), Far(other)
    logs = LogsHome(home, {"b": first.more, "c": second.more})
    append(far / "trainer-rank-0.jsonl", "life 1\n")
    await logs.fetch()
    first.is_lost = True
    append(other / "trainer-rank-0.jsonl", "life 2\n")
    await logs.finish()
    assert (home / "trainer-rank-0.jsonl").read_text() == "life 1\nlife 2\n"
    assert logs.nodes == ["c"]


async def test_what_an_earlier_start_of_the_run_left_is_not_fetched_again(tmp_path):
    far, home = folders(tmp_path)
    append(far / "inference-0.jsonl", "of the run that was killed\n")
    logs = LogsHome(home, {"b": Far(far).more})
    append(far / "inference-0.jsonl", "new\n")
    await logs.fetch()
    assert (home / "inference-0.jsonl").read_text() == "new\n"


async def test_an_answer_under_way_when_fetching_ends_is_written(tmp_path):
    far, home = folders(tmp_path)
    reader = Far(far)
    has_answered, arrives = asyncio.Event(), asyncio.Event()

    async def more() -> Sequence[LogPart]:
        parts = await reader.more()
        has_answered.set()
        await arrives.wait()
        return parts

    logs = LogsHome(home, {"b": more})
    append(far / "inference-0.jsonl", "1\n")
    fetching = asyncio.create_task(logs.fetch())
    await has_answered.wait()
    fetching.cancel()
    await asyncio.wait([fetching])
    append(far / "inference-0.jsonl", "2\n")
    arrives.set()
    await logs.finish()
    assert (home / "inference-0.jsonl").read_text() == "1\n2\n"
