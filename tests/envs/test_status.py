"""Yanking and deprecating: what is recorded, what users are told, what is refused."""

import json

import pytest
from tests.envs.authors import tree
from tests.envs.projects import toy_publication, write_registry

from telescope_cli.main import main
from telescope_core.errors import RegistryError
from telescope_envs.registry import Registry, resolve


@pytest.fixture
def place(tmp_path):
    store = write_registry(tmp_path / "registry").store
    for version in ("0.1.0", "0.2.0"):
        store.publish(toy_publication(version))
    store.publish(toy_publication(name="better"))
    return tmp_path / "registry"


def run(place, *words):
    with pytest.raises(SystemExit) as ended:
        main(["env", *words, "--registry", str(place)])
    return ended.value.code


def test_a_yanked_version_is_chosen_only_when_it_is_named(place, capsys):
    assert run(place, "yank", "toy@0.2.0", "--reason", "pays for nothing") == 0
    said = capsys.readouterr().out
    assert "toy@0.2.0: yanked: pays for nothing" in said
    assert "Users who name no version now get 0.1.0" in said
    registry = Registry.at(place)
    assert resolve(registry, "toy").version == "0.1.0"
    assert resolve(registry, "toy@0.2.0").version == "0.2.0"
    assert run(place, "yank", "acme/toy@0.1.0", "--reason", "so does this", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["status"]["yanked"] == {"0.1.0": "so does this", "0.2.0": "pays for nothing"}
    assert "No version is chosen any more" in result["effect"]
    with pytest.raises(RegistryError, match="yanked"):
        resolve(Registry.at(place), "toy")


def test_a_pre_release_is_what_users_get_only_when_no_final_release_is_left(place, capsys):
    Registry.at(place).store.publish(toy_publication("0.3.0rc1"))
    for version, left in (("0.2.0", "0.1.0"), ("0.1.0", "0.3.0rc1")):
        assert run(place, "yank", f"toy@{version}", "--reason", "why") == 0
        assert f"Users who name no version now get {left}." in capsys.readouterr().out
        assert resolve(Registry.at(place), "toy").version == left


def test_yanking_is_taken_back(place):
    assert run(place, "yank", "toy@0.2.0", "--reason", "why") == 0
    assert run(place, "yank", "toy@0.2", "--undo") == 0
    assert resolve(Registry.at(place), "toy").version == "0.2.0"
    assert Registry.at(place).status("acme/toy").yanked == {}


def test_a_deprecation_names_the_replacement_and_is_taken_back(place, capsys):
    words = ("deprecate", "toy", "--reason", "too easy", "--replacement", "acme/better")
    assert run(place, *words) == 0
    assert "warned and told to use acme/better instead" in capsys.readouterr().out
    deprecated = Registry.at(place).status("acme/toy").deprecated
    assert deprecated is not None
    assert (deprecated.reason, deprecated.replacement) == ("too easy", "acme/better")
    assert resolve(Registry.at(place), "toy").version == "0.2.0"
    assert run(place, "deprecate", "toy", "--undo") == 0
    assert Registry.at(place).status("acme/toy").deprecated is None


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("yank", "toy@9", "--reason", "x"), 2, "has no version 9; published versions: 0.1.0, 0.2"),
        (("yank", "toy", "--reason", "x"), 2, "name one version exactly, such as acme/toy@0.2.0"),
        (("yank", "toy@>=0.1", "--reason", "x"), 2, "name one version exactly"),
        (("yank", "toi@0.1.0", "--reason", "x"), 2, "did you mean 'toy'"),
        (("yank", "toy@0.1.0"), 2, "give --reason"),
        (("yank", "toy@0.1.0", "--reason", "two\nlines"), 2, "must be one line"),
        (("yank", "toy@0.1.0", "--undo"), 2, "is not yanked; yanked versions: none"),
        (("yank", "toy@0.1.0", "--undo", "--reason", "x"), 2, "--undo takes no --reason"),
        (("deprecate", "toy@0.1.0", "--reason", "x"), 2, "a deprecation covers all versions"),
        (("deprecate", "toy", "--reason", "x", "--replacement", "acme/bettr"), 2, "acme/better"),
        (("deprecate", "toy", "--reason", "x", "--replacement", "toy"), 2, "replace itself"),
        (
            ("deprecate", "toy", "--reason", "x", "--replacement", "corp:better"),
            2,
            "--replacement 'corp:better' names the registry 'corp', but what is deprecated is in",
        ),
        (("deprecate", "toy", "--undo"), 2, "acme/toy is not deprecated"),
        (("deprecate", "toy", "--undo", "--replacement", "acme/better"), 2, "no --replacement"),
    ],
)
def test_what_cannot_be_said_is_refused_and_changes_nothing(place, words, code, message, capsys):
    before = tree(place)
    assert run(place, *words) == code
    assert message in capsys.readouterr().err
    assert tree(place) == before
