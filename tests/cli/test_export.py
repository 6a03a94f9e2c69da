"""`telescope export`: what is written is the model that was trained, and mistakes are explained."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.envs.loopback_hub import loopback_hub, own_hub_settings
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from telescope_cli.main import main
from telescope_core.errors import ConfigError
from telescope_core.records.folders import remove_folder
from telescope_train.checkpoints import export
from telescope_train.checkpoints.folders import complete_checkpoints, read_checkpoint
from telescope_train.checkpoints.resume import inputs_of
from telescope_train.config.schema import ModelSection
from telescope_train.models.tiny import make_tiny_model
from telescope_train.plan.checks.model import look_at_model, require_served

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from resume_run import config_of, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of three steps with every checkpoint."""
    folder = tmp_path_factory.mktemp("runs")
    model = make_tiny_model(folder / "tiny", seed=0)
    flags = ("--number_of_steps", "3", "--checkpoint_every", "1", "--warmup_steps", "1")
    asyncio.run(run(config_of(folder, model, *flags)))
    return folder / "run"


@pytest.fixture
def telescope(capsys):
    def call(*arguments) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["export", *map(str, arguments)])
        said = capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err

    return call


def test_the_export_is_the_trained_model(trained, telescope, tmp_path):
    code, said, _ = telescope(trained, "--output", tmp_path / "out", "--json")
    assert code == 0
    (row,) = json.loads(said)
    assert (row["step"], row["num_files"], row["path"]) == (3, 1, str(tmp_path / "out"))
    by_ranks = trained / "checkpoints" / "final" / "hf"
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(by_ranks / "model.safetensors")
    assert found.keys() == expected.keys()
    assert "lm_head.weight" not in found
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    for path in by_ranks.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_text() == path.read_text(), path.name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)


@pytest.mark.parametrize("masked", [0o022, 0o027])
def test_every_file_is_for_whom_the_umask_allows(trained, telescope, tmp_path, masked):
    before = os.umask(masked)
    try:
        assert telescope(trained, "--output", tmp_path / "out")[0] == 0
    finally:
        os.umask(before)
    modes = {one.name: one.stat().st_mode & 0o777 for one in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, 0o666 & ~masked)


def test_several_at_once_sharded_and_narrow(trained, telescope, tmp_path):
    flags = ("--dtype", "bfloat16", "--max-shard-size", "500KB")
    code, said, _ = telescope(trained, "--steps", "2,1", "--output", tmp_path / "out", *flags)
    assert code == 0
    assert [line.partition(": ")[2][:6] for line in said.splitlines()] == ["step 1", "step 2"]
    steps = [tmp_path / "out" / name for name in ("step-000001", "step-000002")]
    models = [AutoModelForCausalLM.from_pretrained(path) for path in steps]
    assert len(list(steps[0].glob("model-*-of-*.safetensors"))) > 1
    index = json.loads((steps[0] / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {p.name for p in steps[0].glob("*.safetensors")}
    assert {value.dtype for value in models[0].state_dict().values()} == {torch.bfloat16}
    one, other = (model.model.norm.weight for model in models)
    assert not torch.equal(one, other)


def test_a_signal_while_one_is_put_in_place_ends_those_after_it(
    trained, telescope, tmp_path, monkeypatch
):
    rename = Path.rename

    def signalled(path, target):
        renamed = rename(path, target)
        os.kill(os.getpid(), signal.SIGTERM)
        return renamed

    monkeypatch.setattr(Path, "rename", signalled)
    code, said, told = telescope(trained, "--all", "--output", tmp_path / "out")
    assert (code, "interrupted by SIGTERM" in told) == (128 + signal.SIGTERM, True)
    assert len(said.splitlines()) == 1
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["step-000001"]
    assert (tmp_path / "out" / "step-000001" / "model.safetensors").is_file()


def test_without_output_it_lies_in_the_checkpoint(trained, telescope):
    step = trained / "checkpoints" / "step-000002"
    assert telescope(step)[0] == 0
    assert (step / "hf" / "config.json").is_file()
    assert telescope(step)[0] == 0, "an export may be made again"
    assert len(complete_checkpoints(trained / "checkpoints")) == 3


def test_a_run_is_known_by_its_name(trained, telescope, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs").symlink_to(trained.parent)
    assert telescope("run", "--output", "out")[0] == 0
    assert Path("out/config.json").is_file()
    code, _, said = telescope("rum")
    assert code == 2
    assert "did you mean 'run'?" in said


def test_one_that_is_not_whole_is_said_and_not_exported(trained, telescope, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    shard = run / "checkpoints" / "final" / "state" / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1])
    code, said, told = telescope(run, "--output", tmp_path / "out", "--json")
    assert (code, json.loads(said)[0]["step"]) == (0, 2)
    assert all(part in told for part in ("final", "__0_0.distcp", "step-000002 is exported"))
    for arguments in ((run, "--steps", "3"), (shard.parents[1],)):
        code, said, told = telescope(*arguments, "--output", tmp_path / "other")
        assert (code, said) == (2, "")
        assert all(part in told for part in ("final", "__0_0.distcp"))
    manifest = run / "checkpoints" / "step-000002" / "checkpoint.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "files": {}}))
    code, _, told = telescope(manifest.parent, "--output", tmp_path / "old")
    assert (code, "without checksums" in told) == (0, True)


@pytest.mark.parametrize("flags", [(), ("--all",), ("--steps", "3"), None])
def test_the_newest_takes_the_place_of_one_that_the_run_removed_meanwhile(
    trained, telescope, tmp_path, monkeypatch, flags
):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    last = run / "checkpoints" / "final"
    then = export.export_checkpoint

    def removing(checkpoint, *arguments, **named):
        if checkpoint.path == last and last.exists():
            remove_folder(last)
        return then(checkpoint, *arguments, **named)

    monkeypatch.setattr(export, "export_checkpoint", removing)
    source, *options = (last,) if flags is None else (run, *flags)
    code, said, errors = telescope(source, *options, "--output", tmp_path / "out")
    if flags is None or "--steps" in flags:
        assert code == 2
        assert "final was removed meanwhile" in errors
        assert "holds step-000001, step-000002; to export that one" in errors
        assert not (tmp_path / "out").exists()
        return
    assert code == 0
    assert "final was removed meanwhile, as its run goes on; step-000002 is exported" in errors
    assert "step 2," in said
    assert not last.exists()


def test_an_export_takes_its_checksums_along(trained, telescope, tmp_path):
    assert telescope(trained, "--output", tmp_path / "out")[0] == 0
    for folder in (tmp_path / "out", trained / "checkpoints" / "final" / "hf"):
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder, check=True)
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    settings = ModelSection(model=str(tmp_path / "copy"))
    path = tmp_path / "copy" / "generation_config.json"
    path.write_text(path.read_text() + "\n")  # people change this
    assert look_at_model(settings, dtype="float32").problems == ()
    weights = tmp_path / "copy" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-5] ^= 1
    weights.write_bytes(content)
    (problem,) = look_at_model(settings, dtype="float32").problems
    assert all(part in problem for part in ("model.safetensors", "SHA256SUMS"))
    with pytest.raises(ConfigError, match="is damaged"):
        require_served(settings.model)
    (tmp_path / "copy" / "SHA256SUMS").write_text("nothing\n")
    (problem,) = look_at_model(settings, dtype="float32").problems
    assert "SHA256SUMS" in problem
    (tmp_path / "copy" / "SHA256SUMS").unlink()
    assert look_at_model(settings, dtype="float32").problems == ()


def test_heads_of_their_own_stay_apart(tmp_path, telescope):
    model = make_tiny_model(tmp_path / "tiny", seed=0)
    config = Qwen3Config.from_pretrained(model)
    config.tie_word_embeddings = False
    Qwen3ForCausalLM(config).save_pretrained(model)
    flags = ("--number_of_steps", "2", "--warmup_steps", "0")
    asyncio.run(run(config_of(tmp_path, model, *flags)))
    assert telescope(tmp_path / "run", "--output", tmp_path / "out")[0] == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(tmp_path / "run" / "checkpoints" / "final" / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_adapters_are_merged_and_lie_beside_the_model(tmp_path, telescope):
    model = make_tiny_model(tmp_path / "tiny", seed=0)
    flags = ("--number_of_steps", "2", "--warmup_steps", "0", "--use_lora", "true")
    asyncio.run(run(config_of(tmp_path, model, *flags)))
    assert telescope(tmp_path / "run", "--output", tmp_path / "out")[0] == 0
    by_ranks = tmp_path / "run" / "checkpoints" / "final" / "hf"
    for name in ("model.safetensors", "adapter/adapter_model.safetensors"):
        found, expected = load_file(tmp_path / "out" / name), load_file(by_ranks / name)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
    base = load_file(model / "model.safetensors")
    changed = [key for key in base if not torch.equal(found_in(tmp_path / "out")[key], base[key])]
    assert changed
    assert all("_proj" in key for key in changed)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A folder with a model and a run that trained adapters of it, by a relative path."""
    folder = tmp_path_factory.mktemp("adapted") / "work"
    folder.mkdir()
    flags = ("--number_of_steps", "1", "--warmup_steps", "0", "--use_lora", "true")
    with contextlib.chdir(folder):
        make_tiny_model(Path("models/tiny"), seed=0)
        asyncio.run(run(config_of(folder, Path("models/tiny"), *flags)))
        inputs = inputs_of("models/tiny", chat_template=None)
    edit_manifest(folder / "run" / "checkpoints" / "final", inputs=inputs)
    return folder


@pytest.mark.parametrize("is_recorded", [True, False])
def test_the_model_of_a_run_is_not_replaced_from_another_folder(
    adapted, telescope, tmp_path, monkeypatch, is_recorded
):
    shutil.copytree(adapted, tmp_path / "work")
    checkpoint = tmp_path / "work" / "run" / "checkpoints" / "final"
    assert read_checkpoint(checkpoint).manifest.model_folder == str(adapted / "models" / "tiny")
    recorded = tmp_path / "work" / "models" / "tiny" if is_recorded else ""
    edit_manifest(checkpoint, model_folder=str(recorded))
    monkeypatch.chdir(tmp_path / "work" / "models")
    before = Path("tiny/model.safetensors").read_bytes()
    code, _, said = telescope(checkpoint, "--output", "tiny")
    assert (code, "the run began with" in said) == (2, True)
    assert Path("tiny/model.safetensors").read_bytes() == before
    # A folder that only has the name which was typed is another one.
    Path("models").mkdir()
    shutil.copytree("tiny", "models/tiny")
    assert telescope(checkpoint, "--output", "models/tiny")[0] == (0 if is_recorded else 2)


def edit_manifest(checkpoint: Path, **fields: object) -> None:
    path = checkpoint / "checkpoint.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_adapters_are_merged_into_the_model_that_they_were_trained_on(
    adapted, telescope, tmp_path, monkeypatch
):
    monkeypatch.chdir("/")
    code, _, said = telescope(adapted / "run", "--output", tmp_path / "out")
    assert (code, said) == (0, "")
    expected = (tmp_path / "out" / "model.safetensors").read_bytes()
    for folder in (adapted / "run" / "checkpoints" / "final" / "hf", tmp_path / "out"):
        adapter = json.loads((folder / "adapter" / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == str(adapted / "models" / "tiny")
    # Moved together, and no longer where it is recorded.
    shutil.copytree(adapted, tmp_path / "moved")
    checkpoint = tmp_path / "moved" / "run" / "checkpoints" / "final"
    edit_manifest(checkpoint, model_folder="/gone/models/tiny")
    model = tmp_path / "moved" / "models" / "tiny"
    (tmp_path / "moved" / "tiny").mkdir()  # an empty folder is no model
    code, _, said = telescope(checkpoint, "--output", tmp_path / "other")
    assert (code, str(model) in said) == (0, True)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == expected
    (model / "tokenizer_config.json").unlink()
    assert telescope(checkpoint, "--output", tmp_path / "other")[0] == 0
    make_tiny_model(tmp_path / "changed", seed=1)
    shutil.copy(tmp_path / "changed" / "model.safetensors", model)
    code, _, said = telescope(checkpoint, "--output", tmp_path / "other")
    assert (code, "model.safetensors: its content is another one" in said) == (2, True)
    model.rename(tmp_path / "away")
    for fields in ({}, {"model_folder": ""}):
        edit_manifest(checkpoint, **fields)
        code, _, said = telescope(checkpoint, "--output", tmp_path / "other")
        assert (code, "adapters alone" in said, "models/tiny" in said) == (2, True, True)
    # Of a model on the Hub, which is looked up before a library tries for half a minute.
    edit_manifest(checkpoint, inputs={"model.model: commit": "abc"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code, _, said = telescope(checkpoint, "--output", tmp_path / "other")
    assert (code, "'models/tiny' is not in the cache" in said) == (2, True)
    assert (tmp_path / "other" / "model.safetensors").read_bytes() == expected


def found_in(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("arguments", "facts"),
    [
        (["RUNS/rum"], ["rum", "did you mean"]),
        (["RUNS"], ["run.json"]),
        (["RUN", "--steps", "9"], ["step 9", "1, 2, 3"]),
        (["RUN", "--steps", "one"], ["--steps", "'one'"]),
        (["RUN", "--steps", "1", "--all"], ["--steps", "--all"]),
        (["RUN/checkpoints/final", "--all"], ["checkpoints/final", "--all"]),
        (["RUN", "--push", "me/mine"], ["HF_TOKEN", "hf auth login"]),
        (["RUN", "--output", "RUN"], ["RUN"]),
        (["RUN", "--output", "RUNS/run/../tiny"], ["tiny", "the run began with"]),
        (["RUN", "--output", "RUN/checkpoints/final/model"], ["final/model", "description"]),
        (["RUN", "--output", "RUN/checkpoints/final/state"], ["final/state", "state of"]),
    ],
)
def test_mistakes_are_explained(trained, telescope, tmp_path, arguments, facts):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    places = {"RUNS": str(trained.parent), "RUN": str(trained)}
    given = [
        places[word]
        if word in places
        else word.replace("RUNS", places["RUNS"], 1)
        if word.startswith("RUNS/")
        else word.replace("RUN/", f"{trained}/")
        for word in arguments
    ]
    with own_hub_settings(tmp_path):
        code, out, said = telescope(*given)
    assert (code, out) == (2, "")
    assert all(fact.replace("RUN", str(trained)) in said for fact in facts)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_run_without_checkpoints_says_when_they_come(trained, telescope, tmp_path):
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "run.json").write_text((trained / "run.json").read_text())
    code, _, said = telescope(tmp_path / "early")
    assert code == 2
    assert "checkpoint_every" in said
    assert sorted(path.name for path in (tmp_path / "early").iterdir()) == ["run.json"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub on loopback, to which this process has the token."""
    with loopback_hub() as server, own_hub_settings(tmp_path / "home"):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setenv("HF_TOKEN", server.token)
        yield server


def test_push_uploads_one_commit(trained, hub, telescope, tmp_path):
    where = ("--push", "me/mine", "--output", tmp_path / "out", "--private")
    code, out, err = telescope(trained, *where)
    assert code == 0, err
    ((oid, files),) = hub.repositories["me/mine"].commits
    assert f"pushed: {hub.address}/models/me/mine/commit/{oid}" in out
    assert hub.token not in out + err
    assert hub.tokens_seen() == {f"Bearer {hub.token}"}
    assert hub.tokens_seen_by_storage() == set()
    created = json.loads(hub.posted[0][1])
    assert (created["name"], created["organization"]) == ("mine", "me")
    assert created["visibility"] == "private"
    assert hub.posted[-1][0] == "/api/models/me/mine/commit/main"
    assert hub.repositories["me/mine"].messages == ["Step 3 of run"]
    assert files == {one.name: one.read_bytes() for one in (tmp_path / "out").iterdir()}
    assert list(hub.stored.values()) == [files["model.safetensors"]]


@pytest.mark.parametrize("is_there", [True, False], ids=["refused", "out of reach"])
def test_a_failed_push_keeps_the_export(trained, hub, telescope, tmp_path, is_there):
    hub.refuses = True
    if not is_there:
        hub.server.shutdown()
        hub.server.server_close()
    code, out, err = telescope(trained, "--push", "me/mine", "--output", tmp_path / "out")
    assert (code, out) == (1, "")
    assert "'me/mine'" in err
    assert f"{tmp_path / 'out'} is complete" in err
    assert hub.token not in out + err
    assert "me/mine" not in hub.repositories or hub.repositories["me/mine"].commits == []
    assert (tmp_path / "out" / "config.json").is_file()
