"""The static view: pages for pip and uv, the same bytes each time, nothing broken handed on."""

import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tests.envs.projects import toy_publication

from telescope_core.errors import ConfigError, RegistryError
from telescope_envs.records.catalog import read_catalog
from telescope_envs.records.release import (
    Status,
    WheelFile,
)
from telescope_envs.registry import Registry
from telescope_envs.registry.static_view import (
    project_of,
    project_page,
    projects_page,
    render,
    rendered_files,
    simple_files,
)
from telescope_envs.registry.stores.folder import LocalStore

NASTY = "<script>alert('&\"')</script>"


class Links(HTMLParser):
    """Collects the links of a page, and every tag."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[dict[str, str]] = []
        self.tags: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag == "a":
            self.links.append(dict(attrs))


@pytest.fixture
def place(registry) -> Path:
    """A registry with two releases of acme/toy, one of them yanked."""
    registry.store.publish(toy_publication("0.9.0"))
    registry.store.publish(toy_publication("0.10.0"))
    registry.store.change_status("acme/toy", lambda _: Status(yanked={"0.9.0": NASTY}))
    return Path(registry.address)


def test_the_view_holds_the_registry_the_catalogue_and_the_index(place, tmp_path):
    count = render(place, tmp_path / "out")
    files = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert len(files) == count
    for path in ("config.json", "index/acme/toy.jsonl", "namespaces/acme.toml"):
        assert (tmp_path / "out" / path).read_bytes() == (place / path).read_bytes()
    rows = read_catalog((tmp_path / "out/v1/index.json").read_bytes(), "").rows
    assert rows == Registry.at(place).catalog()
    assert not any(part.startswith(".") for path in files for part in path.parts)
    assert Registry.at(tmp_path / "out").releases("acme/toy")[1].version == "0.10.0"


def test_the_page_has_hashes_python_versions_metadata_and_reasons(place, tmp_path):
    render(place, tmp_path / "out")
    folder = tmp_path / "out/simple/telescope-env-acme-toy"
    page = Links((folder / "index.html").read_text())
    assert "script" not in page.tags
    old, new = page.links
    release = toy_publication("0.10.0").release
    address, _, fragment = new["href"].partition("#")
    assert (folder / address).read_bytes() == toy_publication("0.10.0").wheel
    assert fragment == f"sha256={release.wheel.sha256}"
    assert new["data-requires-python"] == ">=3.11"
    assert "data-yanked" not in new
    assert old["data-yanked"] == NASTY
    metadata = (folder / f"{address}.metadata").read_bytes()
    assert new["data-core-metadata"] == f"sha256={hashlib.sha256(metadata).hexdigest()}"
    assert b"Name: telescope-env-acme-toy" in metadata


def test_the_json_twin_says_the_same(place, tmp_path):
    render(place, tmp_path / "out")
    simple = tmp_path / "out/simple"
    listed = json.loads((simple / "index.json").read_text())
    assert listed["projects"] == [{"name": "telescope-env-acme-toy"}]
    page = json.loads((simple / "telescope-env-acme-toy/index.json").read_text())
    assert page["versions"] == ["0.9.0", "0.10.0"]
    old, new = page["files"]
    wheel = toy_publication("0.10.0").release.wheel
    assert (new["filename"], new["size"], new["hashes"]) == (
        wheel.filename,
        wheel.size,
        {"sha256": wheel.sha256},
    )
    assert new["upload-time"] == "2026-11-21T12:00:00.000000Z"
    assert new["core-metadata"] == {"sha256": wheel.metadata_sha256}
    assert (new["yanked"], old["yanked"]) == (False, NASTY)


def test_equal_registries_give_equal_views_in_place_of_older_ones(place, tmp_path):
    def content(folder: Path) -> dict[str, bytes]:
        files = [p for p in folder.rglob("*") if p.is_file()]
        return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}

    render(place, tmp_path / "one")
    render(place, tmp_path / "other")
    assert content(tmp_path / "one") == content(tmp_path / "other")
    Registry.at(place).store.publish(toy_publication("0.11.0"))
    render(place, tmp_path / "one")
    assert b"0.11.0" in content(tmp_path / "one")["v1/index.json"]
    assert content(tmp_path / "one") == dict(rendered_files(LocalStore(place)))
    render(tmp_path / "one", tmp_path / "of-a-view")
    assert content(tmp_path / "of-a-view") == content(tmp_path / "one")
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_folder_of_somebody_else_is_left_alone(place, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("years")
    for target in (tmp_path / "mine", place / "out"):
        with pytest.raises(ConfigError) as refusal:
            render(place, target)
        assert str(target) in str(refusal.value)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]
    assert (tmp_path / "mine/thesis.tex").read_text() == "years"
    assert not (place / "out").exists()


def test_a_wheel_that_is_not_its_record_is_not_handed_on(place, tmp_path):
    render(place, tmp_path / "out")
    before = (tmp_path / "out/v1/index.json").stat().st_ino
    wheel = next((place / "artifacts").glob("*0.10.0*"))
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    with pytest.raises(RegistryError, match="not the one that was published"):
        render(place, tmp_path / "out")
    assert (tmp_path / "out/v1/index.json").stat().st_ino == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def with_urls(*urls: str) -> list:
    release = toy_publication().release
    wheel = WheelFile(**{**release.wheel.as_table(), "urls": urls})
    return simple_files([release.changed(wheel=wheel)], Status(), to_root="../", has_metadata=True)


@pytest.mark.parametrize("url", ["javascript:alert(1)", "data:text/html,x", "../x.whl", "//x/y"])
def test_an_address_that_a_page_may_not_show_is_left_out(url):
    assert with_urls(url) == []
    (file,) = with_urls(url, "https://example.org/x.whl")
    assert file.url == "https://example.org/x.whl"
    assert file.metadata_sha256 == "", "we do not know whether that host has it"


def test_a_quote_in_an_address_stays_in_its_attribute():
    (file,) = with_urls('https://example.org/"><script>x</script>')
    page = Links(project_page("x", [file], is_json=False))
    assert "script" not in page.tags
    assert json.loads(project_page("x", [file], is_json=True))["files"][0]["url"] == file.url


def test_a_reason_of_no_words_still_yanks():
    release = toy_publication().release
    files = simple_files([release], Status(yanked={"0.1.0": ""}), to_root="", has_metadata=False)
    assert Links(project_page("x", files, is_json=False)).links[0]["data-yanked"] == ""
    assert json.loads(project_page("x", files, is_json=True))["files"][0]["yanked"] is True
    assert project_of(release.id) == "telescope-env-acme-toy"
    assert Links(projects_page(["b", "a"], is_json=False)).links == [{"href": "a/"}, {"href": "b/"}]
