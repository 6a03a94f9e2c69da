"""The front end that is in the package: built from the sources beside it, small, and only ours."""

import gzip
import hashlib
import json
import re
from pathlib import Path

import telescope_ui

WEB = Path(__file__).resolve().parents[2] / "packages" / "telescope-ui" / "web"
STATIC = Path(telescope_ui.__file__).parent / "static"
MAX_BYTES = 300_000


def test_what_is_built_belongs_to_its_sources():
    names = ["build.mjs", "package.json", "tsconfig.json"]
    names += [
        path.relative_to(WEB).as_posix() for path in (WEB / "src").rglob("*") if path.is_file()
    ]
    digest = hashlib.sha256()
    for name in sorted(names):
        content = (WEB / name).read_bytes()
        digest.update(f"{len(name)} {name} {len(content)} ".encode() + content)
    found = re.match(r"/\* sources: ([0-9a-f]{64})", (STATIC / "app.js").read_text())
    assert found
    assert found[1] == digest.hexdigest(), "the sources were changed: run scripts/build_ui.sh"


def test_the_pages_are_small():
    assert sum(len(gzip.compress(path.read_bytes())) for path in STATIC.iterdir()) < MAX_BYTES


def test_nothing_is_read_as_html_and_nothing_is_asked_of_another_host():
    for path in (WEB / "src").rglob("*.ts*"):
        text = path.read_text()
        for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "new Function"):
            assert name not in text, (path.name, name)
        assert "dangerously" not in text, path.name
        hosts = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, (path.name, hosts)
    page = (STATIC / "index.html").read_text()
    assert not re.search(r"https?://|<style|style=|<script(?![^>]*src=)| on\w+=", page)


def test_sources_are_in_small_parts():
    for path in (WEB / "src").rglob("*.ts*"):
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert max(map(len, lines)) <= 180, path.name


def test_the_lock_names_no_registry():
    locked = json.loads((WEB / "package-lock.json").read_text())
    assert all("resolved" not in package for package in locked["packages"].values())
    wanted = locked["packages"][""]
    exact = {**wanted["dependencies"], **wanted["devDependencies"]}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in exact.values())
