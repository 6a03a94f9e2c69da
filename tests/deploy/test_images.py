"""The Dockerfile and the KubeRay example name what exists and agree with the rest."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from telescope_train.plan.load import load_train_config

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


@pytest.fixture(scope="module")
def objects():
    """The objects of the KubeRay example, by kind."""
    return {one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kuberay/train.yaml").open())}


def test_the_image_is_made_by_the_script_that_everybody_uses():
    text = (DEPLOY / "docker/Dockerfile").read_text()
    used = set(re.findall(r"\b((?:scripts|packages|constraints)/[\w./-]+)", text))
    assert used == {"scripts/setup.sh"}
    assert all((ROOT / name).exists() for name in used)
    (python,) = re.findall(r"BASE=python:3\.(\d+)-", text)
    assert 11 <= int(python) <= 13
    environments = {one.name for one in (ROOT / "packages/telescope-envs/environments").iterdir()}
    (installed,) = re.findall(r"env install --shared --no-lock (.*)", text)
    assert set(installed.split()) <= environments
    # What is not copied is what a build or a test on this machine would leave.
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().split()
    names = {one.removeprefix("**/") for one in ignored}
    assert {one.strip("/") for one in (ROOT / ".gitignore").read_text().split()} <= names
    assert ".git" in names


def test_the_settings_are_a_run(objects, tmp_path):
    data = objects["ConfigMap"]["data"]
    (tmp_path / "run.toml").write_text(data["run.toml"])
    config = load_train_config([tmp_path / "run.toml"], [])
    assert config.ray.ray_address == "auto"
    spec = objects["RayJob"]["spec"]
    # A second try goes on with the run of the first, or begins if that saved nothing.
    telescope, verb, file, *flags = spec["entrypoint"].split()
    assert (telescope, verb, Path(file).name) == ("telescope", "train", "run.toml")
    assert load_train_config([tmp_path / "run.toml"], flags).checkpoint.resume_if_saved
    assert config.checkpoint.checkpoint_every
    (group,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    gpus = group["replicas"] * int(worker["resources"]["limits"]["nvidia.com/gpu"])
    assert config.trainer.trainer_num_workers + config.inference.inference_num_workers == gpus


def test_a_job_that_is_stopped_has_time_to_end_in_order(objects):
    (head,) = objects["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"][
        "containers"
    ]
    ((name, value),) = [(one["name"], one["value"]) for one in head["env"]]
    assert int(value) >= 30
    package = Path(find_spec("ray").origin).parent
    assert f'"{name}"' in (package / "dashboard/modules/job/job_supervisor.py").read_text()


def test_pods_have_what_they_mount_and_a_token(objects):
    cluster = objects["RayJob"]["spec"]["rayClusterSpec"]
    pins = (ROOT / "constraints/gpu.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pins
    assert cluster["authOptions"] == {"mode": "token"}
    claims = {objects[kind]["metadata"]["name"] for kind in ("ConfigMap", "PersistentVolumeClaim")}
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {one["name"]: one for one in pod["volumes"]}
        (container,) = pod["containers"]
        mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounts.keys() == volumes.keys()
        assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
        assert mounts["shared-memory"] == "/dev/shm"
        named = {
            volumes["runs"]["persistentVolumeClaim"]["claimName"],
            volumes["settings"]["configMap"]["name"],
        }
        assert named == claims
        resources = container["resources"]
        assert resources["limits"] == resources["requests"]
    assert f" {mounts['settings']}/run.toml " in objects["RayJob"]["spec"]["entrypoint"]
