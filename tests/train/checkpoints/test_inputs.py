"""A run goes on with the files that it read, or says which of them are others now."""

import json
import shutil
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from tests.train.checkpoints.test_resume import checkpoint_at

from telescope_core.errors import ConfigError
from telescope_core.records import RunFolder
from telescope_train.checkpoints.folders import read_checkpoint
from telescope_train.checkpoints.resume import (
    input_changes,
    inputs_of,
    open_run_folder,
    resume_point,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from resume_run import config_of, records_of

ENVIRONMENT = """
from telescope_core.environments import SingleTurnEnvironment, reward

class Toy(SingleTurnEnvironment):
    def examples(self, split):
        return Path(__file__).with_name("rows.jsonl")

    @reward
    def right(self, rollout, example):
        return 1.0
"""


@pytest.fixture
def begun(tiny, tmp_path, monkeypatch):
    """Return a function that looks where a run of files in this folder goes on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    shutil.copytree(tiny, "model")
    Path("template.jinja").write_text("{{ messages }}")
    Path("filters.py").write_text("import shared\ndef keep(group):\n    return True\n")
    Path("shared.py").write_text("")
    Path("env.py").write_text(ENVIRONMENT)
    Path("rows.jsonl").write_text("{}")
    flags = (
        *("--chat_template", "template.jinja", "--should_accept_fn", "filters:keep"),
        *("--environments", '[{"name": "env.py:Toy"}]', "--resume_from_checkpoint", "saved/a"),
    )

    def now(*more: str):
        config = config_of(tmp_path, Path("model"), *flags, *more)
        section = config.model
        inputs = inputs_of(
            section.model,
            chat_template=section.chat_template,
            accept_fn=config.rollout.should_accept_fn,
        )
        return config, records_of(config), inputs

    config, records, inputs = now()
    checkpoint_at(Path("saved"), 5, name="a")
    path = Path("saved/a/checkpoint.json")
    manifest = json.loads(path.read_text()) | {"config": config.model_dump(mode="json")}
    manifest["inputs"] = inputs
    manifest["environment_records"] = {"env.py:Toy": asdict(records["env.py:Toy"])}
    path.write_text(json.dumps(manifest))
    return now


def test_with_the_same_files_nothing_has_changed_and_all_are_recorded(begun):
    config, records, inputs = begun()
    point = resume_point(config, records, inputs)
    assert point.changed == ()
    info = RunFolder.open(open_run_folder(config, point, records, inputs).path).info()
    names = {f"model.model: {name}" for name in ("config.json", "model.safetensors")}
    names |= {"model.chat_template: template.jinja", "rollout.should_accept_fn: shared.py"}
    assert names <= set(info.inputs)
    assert set(info.environments["env.py:Toy"].files) == {"env.py", "rows.jsonl"}


@pytest.mark.parametrize("name", ["model/model.safetensors", "model/config.json", "template.jinja"])
def test_another_model_or_template_under_the_same_path_is_refused(begun, name):
    Path(name).write_bytes(Path(name).read_bytes() + b" ")
    with pytest.raises(ConfigError, match="are not what they were") as refused:
        resume_point(*begun())
    assert Path(name).name in str(refused.value)


@pytest.mark.parametrize("name", ["env.py", "rows.jsonl"])
def test_another_environment_under_the_same_name_is_refused_unless_allowed(begun, name):
    Path(name).write_text(Path(name).read_text().replace("1.0", "0.5") + " ")
    with pytest.raises(ConfigError, match="--allow-changed-environments") as refused:
        resume_point(*begun())
    assert f"file {name}: its content is another one" in str(refused.value)
    (changed,) = [
        line
        for line in resume_point(*begun("--allow-changed-environments")).changed
        if line.startswith("environment")
    ]
    assert f"file {name}" in changed


def test_another_function_that_accepts_groups_is_told(begun):
    Path("shared.py").write_text("# other")
    line = "file rollout.should_accept_fn: shared.py: its content is another one"
    assert resume_point(*begun()).changed == (line,)


@pytest.mark.parametrize("dataset", ["rows", "rows/a.jsonl"])
def test_other_rows_under_the_same_path_are_refused(tmp_path, monkeypatch, dataset):
    monkeypatch.chdir(tmp_path)
    Path("rows/parts").mkdir(parents=True)
    for name in ("rows/a.jsonl", "rows/parts/b.jsonl", "rows/.lock"):
        Path(name).write_text("{}")

    def inputs() -> dict[str, str]:
        return inputs_of("nobody/nothing", chat_template=None, dataset=dataset)

    checkpoint_at(Path("saved"), 5, name="a")
    checkpoint = read_checkpoint(Path("saved/a"))
    manifest = checkpoint.manifest.model_copy(update={"inputs": inputs()})
    checkpoint = replace(checkpoint, manifest=manifest)
    Path("rows/.lock").write_text("another")
    assert input_changes(checkpoint, inputs()) == []
    Path("rows/a.jsonl").write_text("[]")
    Path("rows/c.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"rows/a\.jsonl: its content is another one") as refused:
        input_changes(checkpoint, inputs())
    assert ("rows/c.jsonl: it is new" in str(refused.value)) == (dataset == "rows")


def test_a_folder_of_rows_that_an_earlier_version_did_not_read_is_no_change(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    checkpoint_at(tmp_path / "saved", 5, name="a")
    checkpoint = read_checkpoint(tmp_path / "saved" / "a")
    manifest = checkpoint.manifest.model_copy(update={"inputs": {"model.model: commit": "abc"}})
    now = {**manifest.inputs, f"dataset: {tmp_path}/a.jsonl": "digest"}
    assert input_changes(replace(checkpoint, manifest=manifest), now) == []


def test_of_a_model_that_is_no_folder_the_commit_is_known_once_it_is_here(tmp_path, monkeypatch):
    assert inputs_of("nobody/nothing", chat_template="{{ messages }}") == {}
    monkeypatch.setattr(
        "telescope_train.checkpoints.resume.try_to_load_from_cache",
        lambda name, file: str(tmp_path / "snapshots" / "abc" / file),
    )
    found = inputs_of("somebody/model", chat_template=None)
    assert found == {"model.model: commit": "abc"}
