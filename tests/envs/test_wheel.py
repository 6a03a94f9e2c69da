"""What a wheel may not hold, and what becomes of one that was tampered with."""

import io
import zipfile

import pytest

from telescope_core.errors import RegistryError
from telescope_envs.records.reading import check_bytes
from telescope_envs.rules.wheel import check_release, read_wheel

FILENAME = "telescope_env_acme_toy-0.1.0-py3-none-any.whl"
INFO = "telescope_env_acme_toy-0.1.0.dist-info"


@pytest.fixture
def wheel(published) -> bytes:
    (release,) = published.releases("acme/toy")
    return published.wheel_bytes(release)


def test_a_good_wheel_says_what_it_is(wheel):
    contents = read_wheel(wheel, FILENAME)
    assert contents.version == "0.1.0"
    assert contents.distribution == "telescope-env-acme-toy"
    assert contents.module == "telescope_env_acme_toy"
    assert (contents.entry_name, contents.factory) == ("toy", "telescope_env_acme_toy:Toy")


@pytest.mark.parametrize(
    "path",
    [
        "hook.pth",
        "telescope_env_acme_toy/hook.pth",
        "sitecustomize.py",
        "telescope_env_acme_toy/sitecustomize.py",
        "telescope_env_acme_toy/fast.so",
        "other_package/__init__.py",
        "telescope_env_acme_toy-0.1.0.data/scripts/env",
        "../evil.py",
        "/etc/evil.py",
        "telescope_env_acme_toy/../../evil.py",
        "telescope_env_acme_toy\\evil.py",
    ],
)
def test_files_outside_the_environment_are_refused(wheel, rewrite, path):
    with pytest.raises(RegistryError) as refusal:
        read_wheel(rewrite(wheel, {path: b"x = 1\n"}), FILENAME)
    assert repr(path) in str(refusal.value)


@pytest.mark.parametrize(
    "entry_points",
    [
        b"[telescope.environments]\ntoy = telescope_env_acme_toy:Toy\n[console_scripts]\nx = a:b\n",
        b"[console_scripts]\nenv = telescope_env_acme_toy:main\n",
        b"[telescope.environments]\ntoy = os:system\n",
        b"[telescope.environments]\na = telescope_env_acme_toy:A\nb = telescope_env_acme_toy:B\n",
        b"not an ini file",
        None,
    ],
)
def test_scripts_and_foreign_entry_points_are_refused(wheel, rewrite, entry_points):
    data = rewrite(wheel, {f"{INFO}/entry_points.txt": entry_points})
    with pytest.raises(RegistryError, match=r"entry.point"):
        read_wheel(data, FILENAME)


def test_a_file_that_record_does_not_list_is_refused(wheel, rewrite):
    for path in ("telescope_env_acme_toy/more.py", "telescope_env_acme_toy/__init__.py"):
        changed = rewrite(wheel, {path: b"evil = 1"}, record=False)
        with pytest.raises(RegistryError, match="RECORD") as refusal:
            read_wheel(changed, FILENAME)
        assert path in str(refusal.value)


@pytest.mark.parametrize("name", ["WHEEL", "METADATA", "RECORD"])
def test_missing_metadata_is_refused(wheel, rewrite, name):
    data = rewrite(wheel, {f"{INFO}/{name}": None}, record=False)
    with pytest.raises(RegistryError):
        read_wheel(data, FILENAME)


def test_links_and_repeated_names_are_refused(wheel):
    for attributes, names, message in (
        (0o120777 << 16, ["b"], "telescope_env_acme_toy/b "),
        (
            0o100644 << 16,
            ["A.txt", "a.txt"],
            "contains 'telescope_env_acme_toy/A.txt' and 'telescope_env_acme_toy/a.txt', which are "
            "the same name on systems where capitals do not count; rename one",
        ),
    ):
        data = io.BytesIO(wheel)
        with zipfile.ZipFile(data, "a") as archive:
            for name in names:
                info = zipfile.ZipInfo(f"telescope_env_acme_toy/{name}")
                info.external_attr = attributes
                archive.writestr(info, "/etc/passwd")
        with pytest.raises(RegistryError) as refusal:
            read_wheel(data.getvalue(), FILENAME)
        assert message in str(refusal.value)


@pytest.mark.parametrize(
    "filename",
    [
        "telescope_env_acme_toy-0.1.0-cp311-cp311-linux_x86_64.whl",
        "telescope_env_acme_toy-0.1.0.zip",
        "telescope_env_acme_other-0.1.0-py3-none-any.whl",
    ],
)
def test_another_file_name_is_refused(wheel, filename):
    with pytest.raises(RegistryError):
        read_wheel(wheel, filename)


def test_bytes_that_are_no_zip_file_are_refused():
    with pytest.raises(RegistryError, match="zip") as refusal:
        read_wheel(b"hello", FILENAME)
    assert FILENAME in str(refusal.value)


def test_a_requirement_with_an_address_is_refused(wheel, rewrite):
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        metadata = archive.read(f"{INFO}/METADATA").decode()
    changed = metadata.replace(
        "Requires-Dist: telescope-core", "Requires-Dist: evil @ git+https://example.org/evil"
    )
    with pytest.raises(RegistryError, match="names a URL"):
        read_wheel(rewrite(wheel, {f"{INFO}/METADATA": changed.encode()}), FILENAME)


def test_other_bytes_or_another_record_are_refused(published, wheel):
    (release,) = published.releases("acme/toy")
    check_bytes(wheel, release)
    with pytest.raises(RegistryError, match="not the one that was published"):
        check_bytes(wheel[:-1] + b"x", release)
    other = release.changed(requires_dist=("evil",))
    with pytest.raises(RegistryError, match="requires_dist"):
        check_release(read_wheel(wheel, FILENAME), other)
