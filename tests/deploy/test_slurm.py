"""The Slurm script, rehearsed with stand-ins for the programs of the cluster.

Each stand-in writes its name and arguments into one file; `srun` runs its command here.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "train.sbatch"
DEADLINE_S = 300.0
NOTE = 'echo "$(basename "$0") $*" >>"$CALLS"\n'
STAND_INS = {
    "scontrol": NOTE + '[ "$1" != show ] || eval "$NODES"',
    # The first argument that is no option is the program.
    "srun": NOTE + 'while [ "${1#--}" != "$1" ]; do shift; done\nexec "$@"',
    # What Debian says of its own name, if another question is asked.
    "hostname": '[ "$*" = -I ] && echo "$ADDRESSES" || echo 127.0.1.1',
    "ray": NOTE + '[ "$1" = status ] || exec sleep 600 >/dev/null 2>&1',
    "telescope": NOTE + 'echo "token ${#RAY_AUTH_TOKEN} $RAY_AUTH_MODE" >>"$CALLS"\neval "$RUN"',
}
RAY_OPTIONS = {
    *("--block", "--disable-usage-stats", "--num-cpus", "--num-gpus"),
    *("--head", "--node-ip-address", "--port", "--address"),
}
"""Options of `ray start` that the script uses."""
WAITING = "sleep 600 >/dev/null 2>&1 & trap 'kill $!; exit 143' TERM; echo waits >>\"$CALLS\"; wait"
"""A run that can be interrupted once it has said that it waits."""


@pytest.fixture
def cluster(tmp_path):
    """A checkout and a folder of programs; returns the variables of the job."""
    programs, home = tmp_path / "programs", tmp_path / "home" / ".venv" / "bin"
    for folder in (programs, home):
        folder.mkdir(parents=True)
    for name, text in STAND_INS.items():
        place = (home if name in ("ray", "telescope") else programs) / name
        place.write_text(f"#!/bin/sh\n{text}\n")
        place.chmod(0o755)
    (home / "python").symlink_to(sys.executable)
    return {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "RUN": "exit 0",
        "NODES": 'printf "node1\\nnode2\\nnode3\\n"',
        "ADDRESSES": "127.0.0.2 169.254.3.4 fe80::1 10.0.0.1 172.17.0.1 ",
        "SLURM_SUBMIT_DIR": str(tmp_path),
        "TELESCOPE_HOME": str(home.parents[1]),
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_CPUS_PER_TASK": "64",
        "SLURM_GPUS_ON_NODE": "8",
    }


def submitted(cluster, *arguments, **changed):
    return subprocess.Popen(
        [shutil.which("bash"), str(SCRIPT), *arguments],
        env=cluster | changed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def calls(cluster, name):
    """Return the arguments of each call of a program so far."""
    path = Path(cluster["CALLS"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[1:] for line in lines if line.split()[0] == name]


def until_it_waits(cluster):
    give_up_s = time.monotonic() + DEADLINE_S
    while not calls(cluster, "waits"):
        assert time.monotonic() < give_up_s
        time.sleep(0.05)


def ended(job):
    said, _ = job.communicate(timeout=DEADLINE_S)
    return job.returncode, said


@pytest.mark.slow
def test_ray_starts_on_every_node_and_the_run_on_the_first(cluster):
    all_run = 'until [ "$(grep -c "^ray start" "$CALLS")" = 3 ]; do sleep 0.05; done'
    assert ended(submitted(cluster, "run.toml", "--seed", "3", RUN=all_run)) == (0, "")
    assert calls(cluster, "telescope") == [
        ["train", "run.toml", "--seed", "3", "--ray_address", "10.0.0.1:24567"]
    ]
    starts = [one for one in calls(cluster, "ray") if one[0] == "start"]
    assert sorted("--head" in one for one in starts) == [False, False, True]
    nodes = [one[one.index("start") - 2] for one in calls(cluster, "srun") if "start" in one]
    assert sorted(nodes) == ["--nodelist=node1", "--nodelist=node2", "--nodelist=node3"]
    # 32 bytes as text, for the run and for nobody who lists processes.
    assert calls(cluster, "token") == [["64", "token"]]
    assert {one for call in starts for one in call if one.startswith("--")} == RAY_OPTIONS


@pytest.mark.slow
def test_what_the_script_asks_of_ray_are_options_of_ray():
    from ray.scripts.scripts import start

    assert {option for parameter in start.params for option in parameter.opts} >= RAY_OPTIONS


@pytest.mark.slow
def test_a_job_that_starts_again_goes_on(cluster):
    assert ended(submitted(cluster, "run.toml", SLURM_RESTART_COUNT="1"))[0] == 0
    assert calls(cluster, "telescope")[0][-1] == "--resume-if-saved"


@pytest.mark.slow
def test_the_exit_code_is_that_of_the_run(cluster):
    assert ended(submitted(cluster, "run.toml", RUN="exit 6"))[0] == 6
    assert ["requeue", "1234567"] not in calls(cluster, "scontrol")


@pytest.mark.slow
@pytest.mark.parametrize("is_over_time", [True, False], ids=["time is up", "cancelled"])
def test_a_signal_interrupts_the_run_and_time_puts_it_back(cluster, is_over_time):
    job = submitted(cluster, "run.toml", RUN=WAITING)
    until_it_waits(cluster)
    job.send_signal(signal.SIGUSR1 if is_over_time else signal.SIGTERM)
    assert ended(job)[0] == 143
    assert (["requeue", "1234567"] in calls(cluster, "scontrol")) == is_over_time


@pytest.mark.slow
def test_a_run_that_ends_as_time_is_up_is_not_begun_again(cluster):
    job = submitted(cluster, "run.toml", RUN=WAITING.replace("exit 143", "exit 0"))
    until_it_waits(cluster)
    job.send_signal(signal.SIGUSR1)
    assert ended(job)[0] == 0
    assert ["requeue", "1234567"] not in calls(cluster, "scontrol")


def test_what_is_missing_is_named(cluster):
    code, said = ended(submitted(cluster))
    assert (code, "expected a file of settings" in said) == (2, True)
    code, said = ended(submitted(cluster, "run.toml", TELESCOPE_HOME="/nowhere"))
    assert (code, "run 'make setup-gpu' there" in said) == (2, True)
    assert not calls(cluster, "ray")


@pytest.mark.parametrize(
    ("changed", "code", "message"),
    [
        ({"SLURM_CPUS_PER_TASK": ""}, 2, "sbatch --cpus-per-task 64"),
        ({"NODES": "echo no such command >&2; exit 1"}, 1, "gave none; check that scontrol works"),
        ({"NODES": "true"}, 1, "expected the names of the job's nodes"),
        ({"ADDRESSES": "127.0.1.1 fe80::1"}, 1, "'hostname -I' said there: 127.0.1.1 fe80::1;"),
        ({"ADDRESSES": ""}, 1, "an IPv4 address of node1 that the other nodes can reach"),
    ],
)
def test_what_slurm_does_not_say_ends_the_job_with_a_sentence(cluster, changed, code, message):
    found, said = ended(submitted(cluster, "run.toml", **changed))
    assert (found, message in said) == (code, True), said
    assert not calls(cluster, "ray")
