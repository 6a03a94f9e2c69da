"""Names that are files and folders: found, imported with what is beside them, and refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from telescope_core import Sampling, SingleTurnEnvironment
from telescope_core.errors import ConfigError, EnvironmentLoadError, UnknownNameError
from telescope_core.finding.code_names import names_class, names_folder
from telescope_core.finding.locate import load_located, locate_environment
from telescope_core.in_process import InProcessEnvironment
from telescope_core.open import open_environment
from telescope_core.processes.settings import ProcessSettings
from telescope_core.protocols import PlayRequest
from telescope_core.scripted import ScriptedClient
from telescope_core.types import Split

CODE = """
from telescope_core import Example, SingleTurnEnvironment, reward
from {beside} import ANSWER


class Hedge{number}(SingleTurnEnvironment):
    data = [Example(id=str(n), prompt=f"where, {{n}}?", answer=ANSWER) for n in range(4)]

    @reward
    def is_right(self, rollout, example):
        return float(rollout.completion_text == example.answer)


class Helper:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one not in ("", ".")])
    (tmp_path / "mazes").mkdir()
    yield tmp_path
    for name in set(sys.modules) - known:
        if name.partition(".")[0].startswith(("hedge", "maz", "beside", "raises")):
            del sys.modules[name]


def write(folder: Path, number: int, *, beside: str = "beside_the_maze") -> None:
    (folder / f"hedge{number}.py").write_text(CODE.format(number=number, beside=beside))
    (folder / f"{beside.lstrip('.')}.py").write_text("ANSWER = 'there'\n")


async def reward_of(name: str, isolation: str) -> float | None:
    client = open_environment(name, processes=ProcessSettings(isolation=isolation))
    try:
        request = PlayRequest(
            split=Split.TRAIN,
            example_index=0,
            group_id="0",
            index=0,
            sampling=Sampling(max_tokens=4),
            deadline_s=60.0,
        )
        rollout = await client.play(request, ScriptedClient(["there"]).policy("0/0"))
        assert rollout.error is None, rollout.error
        return rollout.reward
    finally:
        await client.close()


@pytest.mark.slow
async def test_a_file_is_imported_with_what_is_beside_it(folder: Path) -> None:
    write(folder / "mazes", 1)
    for name in ("mazes/hedge1.py:Hedge1", "./mazes/hedge1.py:Hedge1"):
        assert locate_environment(name).id == "mazes/hedge1.py:Hedge1"
    reward = await reward_of("./mazes/hedge1.py:Hedge1", "none")
    assert reward == 1.0


@pytest.mark.slow
async def test_a_file_in_a_package_is_imported_as_a_part_of_it(folder: Path) -> None:
    (folder / "mazes" / "__init__.py").write_text("")
    write(folder / "mazes", 2, beside=".beside_the_other")
    location = locate_environment("./mazes/hedge2.py:Hedge2")
    assert location.factory.split(":") == ["mazes.hedge2", "Hedge2"]
    assert await reward_of("./mazes/hedge2.py:Hedge2", "none") == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "from hedge1 import Hedge1 as It",
        "from hedge1 import Hedge1\nIt = Hedge1",
        "from hedge1 import *\nfrom hedge1 import Hedge1\nglobals().update(It=Hedge1)",
        "import hedge1\nif hedge1:\n    class It(hedge1.Hedge1):\n        pass",
        "try:\n    from nowhere import It\nexcept ImportError:\n    class It:\n        pass",
    ],
)
def test_a_class_may_be_bound_in_any_way_at_the_top_of_a_file(folder, code) -> None:
    (folder / "mazes_again.py").write_text(code)
    assert locate_environment("mazes_again.py:It").factory == "mazes_again:It"
    with pytest.raises(EnvironmentLoadError, match="the class is missing"):
        locate_environment("mazes_again.py")


async def test_a_file_is_played_by_a_process_of_its_own_too(folder: Path) -> None:
    write(folder, 3)
    reward = await reward_of("hedge3.py:Hedge3", "process")
    assert reward == 1.0


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("./maze.py:Hedge4", ["there is no file maze.py in", "mazy.py"]),
        ("./mazy.py:Hedge", ["'Hedge'", "mazy.py:Hedge4"]),
        ("./mazy.py", ["file.py:Class", "mazy.py:Hedge4"]),
        ("./mazy.py:Helper", ["'mazy:Helper'"]),
        ("./broken.py:Maze", ["broken.py, line 2: "]),
        ("./a-maze.py:Maze", ["a-maze.py", "name of letters"]),
        ("./raises.py:Maze", ["'raises:Maze'", "raises.py, line 3", "planned"]),
        ("./lacks.py:Maze", ["lacks.py, line 2: ", "'nothere'"]),
        ("mazes.py:Maze", ["expected file.py:Class, but there is no file mazes.py in"]),
        ("./json.py:Maze", ["another json before", "json/__init__.py", "rename it"]),
        ("./time.py:Maze", ["another time before", "a part of Python", "rename it"]),
        ("./asyncio/maze.py:Maze", ["another asyncio before", "asyncio/__init__.py", "rename it"]),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(folder, name, facts) -> None:
    write(folder, 4)
    (folder / "hedge4.py").rename(folder / "mazy.py")
    (folder / "broken.py").write_text("x = 1\nclass Maze(:\n")
    (folder / "a-maze.py").write_text("class Maze: pass\n")
    (folder / "raises.py").write_text("class Maze: pass\n\nraise ValueError('planned')\n")
    (folder / "asyncio").mkdir()
    for own in ("json.py", "time.py", "asyncio/__init__.py", "asyncio/maze.py"):
        (folder / own).write_text("class Maze: pass\n")
    (folder / "lacks.py").write_text("class Maze: pass\nimport nothere\n")
    with pytest.raises(EnvironmentLoadError) as refused:
        load_located(locate_environment(name))
    assert all(fact in str(refused.value) for fact in facts), refused.value


@pytest.mark.parametrize(
    "code",
    [
        "class Maze: pass\n".encode("utf-8-sig"),
        "# coding: latin-1\nclass Maze: '\xe9'\n".encode("latin-1"),
    ],
    ids=["byte order mark", "declared encoding"],
)
def test_a_file_is_read_as_python_reads_it(folder, code) -> None:
    (folder / "maze.py").write_bytes(code)
    assert locate_environment("./maze.py:Maze").factory == "maze:Maze"


def test_which_names_are_code() -> None:
    assert all(map(names_class, ("a:B", "a.b:C", "a.py:B", "./a.py:B", "a.py")))
    assert not any(map(names_class, ("corp:toy", "acme/toy", "toy@1", "toy")))
    assert all(map(names_folder, (".", "./toy", "../toy", "/a/toy", "~/toy")))
    assert not any(map(names_folder, ("toy", "acme/toy", "./toy.py:Toy")))


def test_names_without_anything_that_looks_them_up(monkeypatch):
    monkeypatch.setattr("telescope_core.finding.locate.entry_points", lambda group: [])
    with pytest.raises(UnknownNameError, match="telescope-envs"):
        locate_environment("countdown")


def test_a_class_is_no_name_and_no_environment() -> None:
    class Hedge(SingleTurnEnvironment):
        data = ("where?",)

    for given in (Hedge, Hedge()):
        with pytest.raises(ConfigError, match=r"write InProcessEnvironment\(Hedge\(\), name="):
            open_environment(given)
    with pytest.raises(ConfigError, match=r"write Hedge\(\)"):
        InProcessEnvironment(Hedge, name="it")
