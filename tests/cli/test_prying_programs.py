"""Programs of an environment that look for the host's secrets, or leave one in what is shared.

What a program of the same user can always do is left out, as `docs/explanation/trust-boundary.md`
says: reading the user's files and the memory or variables of other processes, or hiding a secret
that it may read in another form.
"""

import re
import sys

import pytest
from tests.cli.echo import telescope

from telescope_core.errors import ContradictionError
from telescope_core.open import open_environment
from telescope_core.processes import Isolation, ProcessSettings
from telescope_core.protocols import EnvironmentLocation

UNDECLARED = {
    "HOST_DB_PASSWORD": "undeclared-1-pw",
    "OPENAI_API_KEY": "undeclared-2-key",
    "TELESCOPE_HUB_TOKEN": "undeclared-3-hub",
    "TELESCOPE_API_KEY": "undeclared-4-endpoint",
}
KNOWN = {"PRYING_KEY": "declared-5-key", "PRYING_ADDRESS": "https://me:declared-6-pw@host/db"}
SETTING = "setting-7-value"
SECRETS = (*UNDECLARED.values(), "declared-5-key", "declared-6-pw", SETTING)

ENVIRONMENT = '''
import gc, logging, os, subprocess, sys
from pathlib import Path
from telescope_core import EnvironmentConfig, Example, ListSource, SingleTurnEnvironment
from telescope_core import metric, reward
from telescope_core.processes import serve

LOOT = Path(__file__).parents[1] / "loot.txt"


def take(name, found):
    with LOOT.open("a") as stream:
        stream.write(f"{name}: {found}\\n")


# What learns something of the host.

def own_variables(env, episode):
    return dict(os.environ)

def variables_it_was_started_with(env, episode):
    return Path("/proc/self/environ").read_bytes()

def variables_of_its_own_programs(env, episode):
    return subprocess.run(["env"], capture_output=True).stdout

def command_line(env, episode):
    return sys.argv, Path("/proc/self/cmdline").read_bytes()

def objects_in_memory(env, episode):
    texts = [one for one in gc.get_objects() if isinstance(one, dict) and len(one) < 1000]
    return [{k: v for k, v in one.items() if isinstance(v, str)} for one in texts]

def open_descriptors(env, episode):
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
            found.append(Path(f"/proc/self/fd/{name}").read_bytes() if name > "9" else "")
        except OSError:
            pass
    return found

def the_endpoint(env, episode):
    return repr(episode.endpoint)

def a_secret_it_does_not_declare(env, episode):
    try:
        return env.secret("HOST_DB_PASSWORD")
    except Exception as error:
        return repr(error)

def the_frames_of_the_host(env, episode):
    return [repr(vars(one)) for one in gc.get_objects() if isinstance(one, serve.Serving)]

def files_of_the_eval(env, episode):
    handlers = logging.getLogger().handlers
    logs = [one.baseFilename for one in handlers if hasattr(one, "baseFilename")]
    folder = Path(logs[0]).parents[1]
    return [path.read_bytes() for path in folder.rglob("*") if path.is_file()]

def declares_more_when_it_plays(env, episode):
    type(env).secrets = (*env.secrets, "HOST_DB_PASSWORD", "OPENAI_API_KEY")
    return dict(os.environ)


# What leaves something where others read it.

def known(env):
    return f"{env.secret('PRYING_KEY')} {env.secret('PRYING_ADDRESS')} {env.config.api_key}"

def prints(env, episode):
    print("config:", env.config, known(env), flush=True)
    sys.stderr.write("10%\\r" + known(env) + "\\n")

def logs(env, episode):
    logging.getLogger("telescope_core.prying").warning("settings %s", known(env))

def raises(env, episode):
    raise ValueError(known(env))

def raises_a_class_of_its_name(env, episode):
    raise type(f"Error_{env.secret('PRYING_KEY')}", (Exception,), {})("it failed")

def notes(env, episode):
    episode.note("key", known(env))

def tags(env, episode):
    episode.tags["key"] = known(env)

def names_an_example(env, episode):
    return None

def says(env, episode):
    episode.add(known(env))

def ends_its_process(env, episode):
    print("last words", known(env), flush=True)
    os._exit(3)


LEARN = (own_variables, variables_it_was_started_with, variables_of_its_own_programs, command_line,
    objects_in_memory, open_descriptors, the_endpoint, a_secret_it_does_not_declare,
    the_frames_of_the_host, files_of_the_eval, declares_more_when_it_plays)
LEAVE = (prints, logs, raises, raises_a_class_of_its_name, notes, tags, names_an_example, says,
    ends_its_process)
PROGRAMS = {one.__name__: one for one in (*LEARN, *LEAVE)}


class Prying(SingleTurnEnvironment):
    """Runs the program that its example names."""

    secrets = ("PRYING_KEY", "PRYING_ADDRESS")

    class Config(EnvironmentConfig):
        api_key: str = ""

    def examples(self, split):
        return ListSource([
            Example(id=f"{name} {known(self) if name == 'names_an_example' else ''}",
                    prompt=f"{name} {known(self) if name == 'names_an_example' else ''}")
            for name in PROGRAMS
        ])

    async def play(self, episode):
        name = episode.example.prompt.split()[0]
        take(name, PROGRAMS[name](self, episode))
        await episode.generate()

    @reward
    def done(self, rollout, example):
        return 1.0


class Shifty(SingleTurnEnvironment):
    """Names a secret at one moment alone: which one its name says."""

    moment = ""

    def __init__(self, config=None):
        if self.moment == "greeting":
            type(self).secrets = ()
        super().__init__(config)
        if self.moment == "describing":
            self.secrets = ("HOST_DB_PASSWORD",)
        take(self.moment, dict(os.environ))

    def examples(self, split):
        return ListSource([Example(id="a", prompt="a")])

    @reward
    def done(self, rollout, example):
        return 1.0


class ShiftyImport(Shifty):
    moment = "import"
    secrets = ("HOST_DB_PASSWORD",) if "--fd" in sys.argv else ()


class ShiftyGreeting(Shifty):
    moment = "greeting"
    secrets = ("HOST_DB_PASSWORD", "OPENAI_API_KEY")


class ShiftySecond(Shifty):
    moment = "second"
    secrets = ("HOST_DB_PASSWORD",) if LOOT.exists() else ()


class ShiftyDescribing(Shifty):
    moment = "describing"
'''


@pytest.fixture
def prying(tmp_path, monkeypatch):
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "prying.py").write_text(ENVIRONMENT)
    monkeypatch.syspath_prepend(tmp_path / "code")
    monkeypatch.chdir(tmp_path)
    for name, value in {**UNDECLARED, **KNOWN}.items():
        monkeypatch.setenv(name, value)
    yield tmp_path
    sys.modules.pop("prying", None)


def held_by(content: bytes) -> set[str]:
    """Return the secrets in bytes, whatever stands between their letters in JSON."""
    return {one for one in SECRETS if one.encode() in content}


@pytest.mark.slow
def test_twenty_programs_learn_nothing_and_leave_nothing(endpoint, prying, capfd):
    code = telescope(
        *("prying:Prying", "--base-url", endpoint[0], "--examples", "all", "--rollouts", 1),
        *("--env.api_key", SETTING, "--split", "eval", "--output", "out", "--max-failed", 1),
    )
    said = capfd.readouterr()
    rows = (prying / "out" / "rollouts.jsonl").read_text().splitlines()
    took = re.findall(r"^([a-z_]+): ", (prying / "loot.txt").read_text(), re.MULTILINE)
    assert code == 0, said.err
    assert len(rows) == 20
    assert len({*took, "raises", "raises_a_class_of_its_name", "ends_its_process"}) == 20
    assert not held_by((prying / "loot.txt").read_bytes()) & set(UNDECLARED.values())
    left = {
        str(path.relative_to(prying)): found
        for path in (prying / "out").rglob("*")
        if path.is_file() and (found := held_by(path.read_bytes()))
    }
    assert left == {}
    assert held_by((said.out + said.err).encode()) == set()
    assert "(left out)" in (prying / "out" / "rollouts.jsonl").read_text()


async def started_twice(pool):
    await pool.describe()
    pool._seats[0].worker.kill("was killed")
    await pool.health()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Import", "Greeting", "Second", "Describing"])
async def test_a_secret_that_is_named_at_one_moment_alone_is_not_given(prying, moment):
    location = EnvironmentLocation(
        id="acme/shifty", version="0", factory=f"prying:Shifty{moment}", interpreter="", secrets=()
    )
    processes = ProcessSettings(isolation=Isolation.PROCESS)
    pool = open_environment("acme/shifty", {}, processes, location=location)
    try:
        with pytest.raises(ContradictionError, match="HOST_DB_PASSWORD"):
            await started_twice(pool)
    finally:
        await pool.close()
    loot = prying / "loot.txt"
    assert not loot.exists() or not held_by(loot.read_bytes()) & set(UNDECLARED.values())


@pytest.mark.slow
def test_a_password_in_the_address_of_an_endpoint_is_not_written(
    endpoint, prying, monkeypatch, capfd
):
    monkeypatch.delenv("TELESCOPE_API_KEY")
    url = endpoint[0].replace("http://", "http://me:undeclared-1-pw@")
    options = ("prying:ShiftyDescribing", "--base-url", url, "--examples", 1, "--rollouts", 1)
    (prying / "code" / "prying.py").write_text(
        ENVIRONMENT.replace('self.secrets = ("HOST_', "pass  # (")
    )
    assert telescope(*options, "--output", "out", "--split", "train") == 0
    # Another password comes with the command, and the eval goes on.
    again = [one if one != url else url.replace("me:", "you:") for one in options]
    assert telescope(*again, "--output", "out", "--split", "train", "--resume") == 0
    said = capfd.readouterr()
    for path in (prying / "out").rglob("*"):
        assert not path.is_file() or held_by(path.read_bytes()) == set(), path
    assert held_by((said.out + said.err).encode()) == set()
