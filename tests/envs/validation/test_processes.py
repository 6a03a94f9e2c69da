"""What only processes show: imports, files, hash seeds, deaths; and whole validations."""

import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.envs.projects import write_project

from telescope_core.errors import ConfigError
from telescope_envs.install.loading import link
from telescope_envs.validation import (
    Level,
    Outcome,
    ValidationOptions,
    Verdict,
    levels,
    validate_installed,
    validate_project,
    validate_wheel,
)
from telescope_envs.validation.findings import Findings
from telescope_envs.validation.levels import (
    Trial,
    check_load,
    check_reward,
    run_probes,
)
from telescope_envs.validation.processes import ProbePlace
from telescope_envs.validation.render import as_text

pytestmark = pytest.mark.slow

CLEAN = '''"""Sums."""

import os
import sys
import time
from pathlib import Path

from telescope_core import Example, ListSource, SingleTurnEnvironment, reward


class Sums(SingleTurnEnvironment):
    """Adds two numbers."""

    def examples(self, split):
        first = 100 if split == "train" else 500
        pairs = [(first + 7 * i, 13 * i + 11) for i in range(12)]
        return ListSource(
            [Example(id=f"{a}+{b}", prompt=f"{a} + {b} = ?", answer=str(a + b)) for a, b in pairs]
        )

    def gold_answer(self, example):
        return example.answer

    @reward
    def correct(self, rollout, example):
        return float(rollout.completion_text[-50:].strip() == example.answer)
'''
README = (
    "# Sums\n\nTwo numbers are to be added. The reward is 1 for the right sum, and 0 otherwise.\n"
    * 2
)


@pytest.fixture
def trial(tmp_path):
    """Return a function that writes a module and says where it can be imported."""

    def write(code: str) -> Trial:
        (tmp_path / "scratch").mkdir()
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "planted.py").write_text(code)
        place = ProbePlace(
            interpreter=sys.executable,
            search_path=(str(tmp_path / "modules"),),
            scratch=tmp_path / "scratch",
        )
        return Trial(place=place, factory="planted:Sums", num_examples=3)

    return write


def found_by(level, trial):
    """Return the checks that found something, by their id."""
    findings = Findings()
    level(trial, findings)
    return {check.id: check for check in findings.results("") if check.evidence}


def once(kind):
    """Return a level of one process, where nothing is compared with what a second one says."""

    def level(trial, findings):
        (told,) = run_probes(trial, (kind, 1))
        told.tell(findings)

    return level


def evidence_of_only(check, found) -> str:
    """Return the evidence of `check`, the one that found something and failed for it."""
    assert list(found) == [check]
    assert found[check].outcome is Outcome.FAIL
    return found[check].evidence[0].text


def test_a_clean_module_has_no_findings_and_the_way_of_blocking_is_told(trial):
    """It may write a cache, and remove a temporary folder again.

    The standard library removes its files by name, relative to an open folder.
    """
    code = CLEAN.replace(
        'first = 100 if split == "train" else 500',
        """first = 100 if split == "train" else 500
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "inner").mkdir()
            (Path(folder) / "inner" / "file.txt").write_text("x")""",
    )
    cache = "Path(os.environ['XDG_CACHE_HOME'])"
    findings = Findings()
    check_load(trial(f"{code}\n({cache} / 'x').write_text('x')\n"), findings)
    assert [check.id for check in findings.results("") if check.evidence] == []
    assert findings.facts["network_cut_by"] in ("network namespace", "audit hook")
    assert not findings.has_failed(Level.LOAD)


def test_a_probe_leaves_no_file_open(trial):
    clean = trial(CLEAN)
    open_before = psutil.Process().num_fds()
    check_load(clean, Findings())
    assert psutil.Process().num_fds() == open_before


def test_network_use_at_import_is_found_and_refused(trial):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        code = f"import socket\ntry:\n    socket.create_connection(('127.0.0.1', {port}))\n"
        found = found_by(once("load"), trial(f"{CLEAN}\n{code}except OSError:\n    pass\n"))
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()
    place = evidence_of_only("load.network", found)
    assert "planted.py" in place


WRITES = (
    "(Path.home() / 'marker.txt').write_text('x')",
    "Path('marker.txt').write_text('x')",
    "(Path.home() / 'folder').mkdir()",
)


def test_writing_outside_the_caches_at_import_is_found(trial):
    tries = "".join(f"try:\n    {line}\nexcept OSError:\n    pass\n" for line in WRITES)
    found = found_by(once("load"), trial(f"{CLEAN}\n{tries}"))
    evidence_of_only("load.writes", found)
    places = [one.text for one in found["load.writes"].evidence]
    assert len(places) == len(WRITES)
    assert all("planted.py" in place for place in places)


COMPUTES = """
until_s = time.process_time() + 0.3
while time.process_time() < until_s:
    pass
"""
"""Costs processor time, the same on a busy machine."""


def test_a_slow_import_is_found(trial, monkeypatch):
    monkeypatch.setattr(levels, "MAX_IMPORT_S", 0.05)
    found = found_by(check_load, trial(f"{CLEAN}\n{COMPUTES}\n"))
    evidence_of_only("load.import_time", found)


WAITS = """
now_s = time.perf_counter
time.perf_counter = lambda: now_s() + 1000.0
"""
"""Ends as if it had waited; no clock of the machine decides what is found."""


def test_an_import_that_waits_is_not_conclusive_and_no_failure(trial, monkeypatch):
    monkeypatch.setattr(levels, "MAX_IMPORT_S", 200.0)
    findings = Findings()
    check_load(trial(f"{CLEAN}\n{WAITS}\n"), findings)
    (found,) = [one for one in findings.results("") if one.id == "load.import_time"]
    assert found.outcome is Outcome.INCONCLUSIVE
    assert "it waits for something, or the machine was busy" in found.reason
    assert not findings.has_failed(Level.LOAD)


SLOW_MACHINE = """
import sys
sys.modules["telescope_core.probes.meter"]._REFERENCE_S = 1e-6
"""


def test_a_slow_machine_has_more_time_to_import(trial, monkeypatch):
    monkeypatch.setattr(levels, "MAX_IMPORT_S", 0.2)
    assert found_by(check_load, trial(f"{CLEAN}{SLOW_MACHINE}{COMPUTES}\n")) == {}


def test_but_not_without_end(trial, monkeypatch):
    monkeypatch.setattr(levels, "MAX_IMPORT_S", 0.1)
    found = found_by(check_load, trial(f"{CLEAN}{SLOW_MACHINE}{COMPUTES}\n{COMPUTES}\n"))
    evidence = evidence_of_only("load.import_time", found)
    assert "at most 0.5" in evidence, "five times the limit, not forty thousand"


def test_ids_that_change_between_processes_are_found(trial):
    code = CLEAN.replace('id=f"{a}+{b}"', 'id=f"{hash(str(a) + split)}"')
    evidence_of_only("load.ids", found_by(check_load, trial(code)))


def test_rewards_that_change_between_processes_are_found(trial):
    junk = "1e-3 * (hash(rollout.completion_text) % 7)"
    code = CLEAN.replace(" == example.answer)", f" == example.answer) or {junk}")
    evidence_of_only("reward.deterministic", found_by(check_reward, trial(code)))


def test_a_module_that_cannot_be_imported_says_why(trial):
    findings = Findings()
    check_load(trial("import no_such_package_here\n"), findings)
    results = {check.id: check for check in findings.results("")}
    assert "no_such_package_here" in results["load.import"].evidence[0].text
    assert results["load.examples"].outcome is Outcome.NOT_RUN
    assert results["load.examples"].reason == "it cannot be imported"


def test_a_process_that_dies_is_found_by_the_check_it_died_of(trial):
    code = CLEAN.replace(
        "    def gold_answer",
        "    def format_prompt(self, example):\n        os._exit(7)\n\n    def gold_answer",
    )
    findings = Findings()
    once("reward")(trial(code), findings)
    results = {check.id: check for check in findings.results("the process ended")}
    assert "ended with 7" in results["reward.plays"].evidence[0].text
    assert results["reward.gold"].outcome is Outcome.NOT_RUN


def test_a_network_that_is_needed_must_be_declared(trial):
    reach = "try:\n            __import__('socket').create_connection(('192.0.2.1', 9), 1)"
    passed_over = "except OSError:\n            pass"
    code = CLEAN.replace(
        "    def examples(self, split):",
        f"    def examples(self, split):\n        {reach}\n        {passed_over}",
    )
    evidence_of_only("load.network", found_by(once("load"), trial(code)))


@pytest.mark.parametrize("network", ["none", "load"])
def test_declared_secrets_are_passed_on_and_no_others(trial, monkeypatch, network):
    monkeypatch.setenv("SUMS_KEY", "abc")
    monkeypatch.setenv("OTHER_KEY", "abc")
    code = CLEAN.replace(
        "    def examples(",
        f"    secrets = ('SUMS_KEY',)\n    network = '{network}'\n\n"
        "    def __init__(self, config=None):\n        super().__init__(config)\n"
        "        assert self.secret('SUMS_KEY') == 'abc' and 'OTHER_KEY' not in os.environ\n\n"
        "    def examples(",
    )
    findings, told = Findings(), []
    tried = check_load(replace(trial(code), tell=told.append), findings)
    assert [check.id for check in findings.results("") if check.evidence] == []
    assert tried.secrets == ("SUMS_KEY",)
    assert tried.network == network
    assert all(line.endswith(": SUMS_KEY (set)") for line in told)
    assert told


def test_a_release_gets_no_secret_that_it_was_published_without(trial, monkeypatch):
    monkeypatch.setenv("SUMS_KEY", "abc")
    own = "    secrets = ('SUMS_KEY',) * ('SUMS_KEY' not in os.environ)\n\n    def examples("
    tried = replace(trial(CLEAN.replace("    def examples(", own)), recorded=("OTHER_KEY",))
    found = found_by(check_load, tried)
    assert "SUMS_KEY" in evidence_of_only("load.declarations", found)


def test_a_reward_that_reaches_for_the_network_must_declare_it(trial):
    code = CLEAN.replace(
        "        return float(",
        "        try:\n            __import__('socket').create_connection(('192.0.2.1', 9), 1)\n"
        "        except OSError:\n            pass\n        return float(",
    )
    evidence_of_only("reward.network", found_by(once("reward"), trial(code)))


@pytest.fixture
def project(tmp_path) -> Path:
    folder = write_project(
        tmp_path / "project",
        code=CLEAN.replace("Sums(", "Toy("),
        needs=("telescope-core>=0.1,<0.2",),
    )
    (folder / "README.md").write_text(README)
    about = folder / "pyproject.toml"
    text = about.read_text().replace(
        "[project]\n", '[project]\nreadme = "README.md"\nkeywords = ["sums"]\n'
    )
    about.write_text(text)
    return folder


def test_a_level_after_a_failed_one_is_not_run_and_never_passes(project):
    module = project / "telescope_env_acme_toy" / "__init__.py"
    module.write_text(module.read_text().replace('id=f"{a}+{b}"', 'id="same"'))
    report = validate_project(project, ValidationOptions(num_examples=4))
    assert report.verdict is Verdict.FAIL
    later = [c for c in report.checks if c.level in (Level.REWARD, Level.LEAKAGE)]
    assert {check.outcome for check in later} == {Outcome.NOT_RUN}
    assert {check.reason for check in later} == {"the load level failed"}


def test_every_level_gets_the_given_settings_and_the_report_tells_of_them(project):
    module = project / "telescope_env_acme_toy" / "__init__.py"
    code = module.read_text().replace("import Example,", "import EnvironmentConfig, Example,")
    needed = """
    class Config(EnvironmentConfig):
        address: str = ""
        api_key: str = ""

    def __init__(self, config=None):
        super().__init__(config)
        assert self.config.address, "no address"
"""
    module.write_text(code.replace('numbers."""\n', f'numbers."""\n{needed}'))
    settings = {"address": "http://me:s3cret@judge", "api_key": "sk-s3cret"}
    report = validate_project(project, ValidationOptions(num_examples=4, settings=settings))
    assert [check for check in report.checks if check.evidence] == []
    assert report.verdict is Verdict.PASS
    text = as_text(report)
    assert "http://judge" in text
    assert "s3cret" not in text + report.canonical_json.decode()


def test_levels_that_nobody_asked_for_are_not_run(toy_wheel):
    name = "telescope_env_acme_toy-0.1.0-py3-none-any.whl"
    options = ValidationOptions(level=Level.STATIC)
    report = validate_wheel(toy_wheel, name, options)
    assert not report.is_complete
    reasons = {c.reason for c in report.found(Outcome.NOT_RUN)}
    assert reasons == {"not asked for"}


def test_a_name_that_is_not_installed_is_answered_with_the_nearest(project, tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    link(project)
    with pytest.raises(ConfigError, match=r"'toi'.*'toy'"):
        validate_installed("toi")


def test_the_commands_of_the_how_to(project, monkeypatch):
    monkeypatch.chdir(project.parent)
    project.rename("my-env")
    code = "from telescope_cli.main import main; main()"
    command = [sys.executable, "-c", code, "env", "validate", "my-env", "--report", "report.md"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "acme/toy 0.1.0: pass" in done.stdout
    assert "not run" not in done.stdout
    steps = [re.sub(r".*: ", "", line) for line in done.stderr.splitlines()]
    assert steps == [f"{level} checks" for level in Level]
    assert "| `reward.gold` | pass |" in Path("report.md").read_text()


def test_a_linked_project_is_validated_by_its_name(project, tmp_path, monkeypatch):
    monkeypatch.setenv("TELESCOPE_HOME", str(tmp_path / "home"))
    link(project)
    report = validate_installed("toy", ValidationOptions(level=Level.STATIC))
    assert report.environment == "acme/toy"
    assert report.wheel_sha256


def test_probes_end_when_the_validation_is_killed(project, tmp_path):
    module = project / "telescope_env_acme_toy" / "__init__.py"
    module.write_text(f"{module.read_text()}\ntime.sleep(600)\n")
    code = "from telescope_cli.main import main; main()"
    command = [sys.executable, "-c", code, "env", "validate", str(project), "--level", "load"]
    # What is killed cannot delete its temporary folder.
    place = {**os.environ, "TMPDIR": str(tmp_path)}
    validating = subprocess.Popen(command, env=place, stderr=subprocess.PIPE, text=True)
    assert validating.stderr is not None
    while "load checks" not in validating.stderr.readline():
        assert validating.poll() is None
    deadline_s = time.monotonic() + 120
    # Two probes, and the supervisor of each.
    while len(probes := psutil.Process(validating.pid).children(recursive=True)) < 4:
        assert time.monotonic() < deadline_s
    validating.kill()
    validating.communicate(timeout=60)
    assert psutil.wait_procs(probes, timeout=60)[1] == []


FIRST_PARTY = Path(__file__).parents[3] / "packages" / "telescope-envs" / "environments"


ONE_OF_A_KIND = ["wiki-search", "wordle"]
"""Search and several turns; one of a single turn is validated when it is published, by
test_new_registry, and one with tools from its template, by test_scaffold."""
REST = [
    *("alphabet-sort", "countdown", "deepdive", "math-reasoning", "reverse-text"),
    *("text-games", "tool-calculator", "tool-calls"),
]
"""The record of each says that it passed."""


@pytest.mark.parametrize(
    "name", [*ONE_OF_A_KIND, *(pytest.param(name, marks=pytest.mark.nightly) for name in REST)]
)
def test_first_party_environments_pass(name):
    report = validate_project(FIRST_PARTY / name, ValidationOptions(num_examples=4))
    assert [check for check in report.checks if check.evidence] == []
    assert report.verdict is Verdict.PASS


@pytest.mark.nightly
def test_reasoning_gym_passes_where_its_library_is_installed():
    pytest.importorskip("reasoning_gym")
    options = ValidationOptions(level=Level.REWARD, num_examples=2)
    report = validate_project(FIRST_PARTY / "reasoning-gym", options)
    assert [check for check in report.checks if check.evidence] == []
