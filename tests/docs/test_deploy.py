"""deploy/: what can be checked of an image, a Slurm script and a KubeRay file without any of them.

The Slurm script is run, with stand-ins for the commands of Slurm and Ray on its PATH.
"""

import json
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from telescope_train.plan.load import load_train_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGES = [ROOT / "docs" / "how-to" / f"{name}.md" for name in ("containers", "slurm", "kubernetes")]
FENCE = re.compile(r"^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LEAST = ["--name", "x", "--number_of_steps", "1", "--model", "m"]
LEAST += ["--environments", '[{"name": "a"}]']
TOOLS = {
    "scontrol": "printf 'one\\ntwo\\nthree\\n'",
    "hostname": "echo '10.0.0.1 fd00::1'",
    "ray": "record ray; [ $1 != start ] || exec sleep 30",
    "telescope": "record telescope",
    "srun": """
record srun
while [[ ${1:-} == --* ]]; do shift; done
exec "$@"
""",
}


def flags_of(command: str) -> list[str]:
    """Return the flags that a command gives to `telescope train`, without files of settings."""
    words = shlex.split(command)
    after = words[len(words) - words[::-1].index("train") :]
    return [word for word in after if not word.endswith(".toml")]


def commands() -> list[str]:
    """Return every command of the three pages that trains, one line each."""
    found = []
    for page in PAGES:
        for block in FENCE.findall(page.read_text(encoding="utf-8")):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line for line in lines if "telescope train" in line]
            found += [
                re.sub(r"^.*slurm\.sh", "telescope train", line)
                for line in lines
                if "slurm.sh" in line
            ]
    return found


def test_the_commands_of_the_pages_are_taken():
    assert len(commands()) == 3
    for command in commands():
        load_train_config([], [*LEAST, *flags_of(command)])


def test_a_setting_that_does_not_exist_is_seen():
    with pytest.raises(Exception, match="ray_adress"):
        load_train_config([], [*LEAST, *flags_of("telescope train run.toml --ray_adress 1:2")])


def test_the_image_is_made_of_files_that_are_there():
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    scripts = re.findall(r"scripts/\S+\.sh", text)
    assert scripts == ["scripts/setup.sh"]
    assert all((ROOT / script).is_file() for script in scripts)
    assert set(re.findall(r"^([A-Z]+) ", text, re.MULTILINE)) == {
        *("ARG", "FROM", "RUN", "WORKDIR", "COPY", "ENV", "CMD")
    }
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert {".venv", ".git", "runs"} <= set(ignored)
    assert not {one for one in ignored if (ROOT / one).is_dir()} & {"packages", "scripts", "docs"}
    page = PAGES[0].read_text(encoding="utf-8")
    assert "--ipc=host" in page
    assert "--shm-size" in page


def test_the_kuberay_file_fits_the_image_and_ray():
    text = (DEPLOY / "kuberay.yaml").read_text(encoding="utf-8")
    cluster = yaml.safe_load(text)
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    spec = cluster["spec"]
    assert spec["rayVersion"] == version("ray")
    assert spec["authOptions"] == {"mode": "token"}
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    images = set()
    for group in groups:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        images.add(container["image"])
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts == {"data": "/data", "shm": "/dev/shm"}
        assert {one["name"] for one in pod["volumes"]} == set(mounts)
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
    assert len(images) == 1
    gpus = [g["template"]["spec"]["containers"][0]["resources"]["limits"] for g in groups]
    assert [("nvidia.com/gpu" in one) for one in gpus] == [False, True]


@pytest.fixture
def slurm(tmp_path: Path):
    """Run the script with stand-ins; gives its exit status and what each command was given."""
    tools, log = tmp_path / ".venv" / "bin", tmp_path / "calls"
    tools.mkdir(parents=True)
    (tools / "recorder.py").write_text(
        "import json, os, sys\n"
        "print(json.dumps([sys.argv[1:], bool(os.environ.get('RAY_AUTH_TOKEN'))]))\n"
    )
    record = f'record() {{ python {tools}/recorder.py "$@" >>{log}; }}'
    for name, body in TOOLS.items():
        body = body.replace(f"record {name}", f'record {name} "$@"')
        (tools / name).write_text(f"#!/bin/bash\n{record}\n{body}\n")
        (tools / name).chmod(0o755)
    (tools / "python").symlink_to(sys.executable)

    def run(*arguments: str) -> tuple[int, list]:
        environment = {
            "PATH": "/usr/bin:/bin",
            "TELESCOPE_HOME": str(tmp_path),
            "SLURM_JOB_NODELIST": "node[1-3]",
            "SLURM_JOB_ID": "41234",
        }
        done = subprocess.run(
            ["bash", str(DEPLOY / "slurm.sh"), *arguments],
            env=environment,
            timeout=60,
            capture_output=True,
            text=True,
        )
        lines = log.read_text().splitlines() if log.exists() else []
        return done.returncode, [json.loads(line) for line in lines]

    return run


def test_the_slurm_script_starts_ray_everywhere_and_trains_on_the_head(slurm):
    status, calls = slurm("run.toml", "--trainer_num_workers", "16")
    assert status == 0
    given = [words for words, _ in calls]
    assert all(has_token for _, has_token in calls)
    cluster = "10.0.0.1:21234"
    head = "ray start --head --block --node-ip-address 10.0.0.1 --port 21234"
    assert head.split() in given
    assert f"ray start --address {cluster} --block".split() in given
    joined = [words for words in given if words[0] == "srun" and "--nodelist=two,three" in words]
    assert [words[1:4] for words in joined] == [["--overlap", "--nodes=2", "--ntasks=2"]]
    trained = [words for words in given if words[0] == "telescope"]
    flags = ["--trainer_num_workers", "16", "--ray_address", cluster]
    assert trained == [["telescope", "train", "run.toml", *flags]]
    load_train_config([], [*LEAST, *flags])


def test_the_slurm_script_says_what_it_needs(slurm):
    assert slurm() == (2, [])
    subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sh")], check=True, timeout=10)


def test_ray_has_the_options_of_the_slurm_script():
    from ray.scripts.scripts import healthcheck, start

    known = {option for one in (start, healthcheck) for p in one.params for option in p.opts}
    text = (DEPLOY / "slurm.sh").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if re.search(r"\bray (start|health-check)", line)]
    used = {o for line in lines for o in re.findall(r"--[\w-]+", line.partition("ray ")[2])}
    assert {"--head", "--block", "--address"} <= used <= known
