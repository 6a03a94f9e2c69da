"""The web pages: a searchable list and one page per environment, readable without scripts.

This module turns records into the texts that the templates show. Templates escape every text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from telescope_envs.records.catalog import CatalogRow, newest_version
from telescope_envs.records.reading import attestation_path, is_web_address
from telescope_envs.records.release import Dataset, Release, Status

PER_PAGE = 25
_HERE = Path(__file__).parent
_VERDICTS = {
    "pass": "passed",
    "warn": "passed with warnings",
    "fail": "failed",
    "none": "not validated",
}
_NETWORK = {"none": "none", "load": "while loading data", "always": "during rollouts"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What every page shows about the registry."""

    name: str
    address: str
    """The address as a user gives it to `--registry`."""
    is_private: bool


class Fact(NamedTuple):
    """One labeled fact of a release; `href` makes its lines links."""

    label: str
    lines: Sequence[str]
    href: str = ""
    is_code: bool = False


class Entry(NamedTuple):
    """One published version."""

    version: str
    published: str
    python: str
    size: str
    verdict: str
    yanked: str | None
    wheel: str
    """Its URL relative to the registry; empty if it is on another host."""
    sha256: str


class Pages:
    """Renders pages from records."""

    def __init__(self) -> None:
        loader = FileSystemLoader(_HERE / "templates")
        self._templates = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        self.static = {file.name: file.read_bytes() for file in (_HERE / "static").iterdir()}
        """File name -> bytes of the style sheet and icon that the pages load."""

    def front(
        self, site: Site, rows: Sequence[CatalogRow], *, q: str, tags: Sequence[str], page: int
    ) -> bytes:
        """Return page number `page` of the list of `rows`, which are all the search results."""
        start = (page - 1) * PER_PAGE
        shown = rows[start : start + PER_PAGE]

        def at(number: int) -> str:
            return "?" + urlencode([("q", q), *(("tag", tag) for tag in tags), ("page", number)])

        return self._render(
            "front.html",
            site=site,
            root="./",
            rows=shown,
            total=len(rows),
            q=q,
            tags=tags,
            earlier=at(page - 1) if page > 1 else "",
            later=at(page + 1) if start + PER_PAGE < len(rows) else "",
            verdicts=_VERDICTS,
        )

    def environment(self, site: Site, releases: Sequence[Release], status: Status) -> bytes:
        """Return the page of one environment; `releases` are sorted, oldest version first."""
        versions = [release.version for release in releases]
        newest = releases[newest_version(versions, status.yanked)]
        return self._render(
            "environment.html",
            site=site,
            root="../../",
            release=newest,
            status=status,
            facts=_facts(newest),
            entries=[_entry(release, status) for release in reversed(releases)],
        )

    def problem(self, site: Site, title: str, what_to_do: str, *, depth: int) -> bytes:
        """Return an error page; `depth` is the number of folders below the front page."""
        root = "../" * depth or "./"
        return self._render(
            "problem.html", site=site, root=root, title=title, what_to_do=what_to_do
        )

    def _render(self, template: str, **values: object) -> bytes:
        return self._templates.get_template(template).render(**values).encode()


def _facts(release: Release) -> list[Fact]:
    reward, validation, source = release.reward, release.validation, release.source.repository
    wheel = _inside(release)
    facts = [
        Fact(
            "Reward",
            [
                f"{reward.minimum:g} to {reward.maximum:g}; solved at {reward.success:g} or more",
            ],
        ),
        Fact("Splits", [_split(name, size, release) for name, size in release.splits.items()]),
        Fact("Network", [_NETWORK[release.network]]),
        Fact("Secrets", list(release.secrets) or ["none"], is_code=bool(release.secrets)),
        Fact("Datasets", [_dataset(dataset) for dataset in release.datasets] or ["none"]),
        Fact(
            "Validation",
            [
                _VERDICTS[validation.verdict]
                + (f", on {validation.checked_on}" if validation.checked_on else "")
                + (f" (policy {validation.policy})" if validation.policy else ""),
            ],
        ),
        Fact("Report SHA-256", [validation.report_sha256], is_code=True),
        Fact("Requires", list(release.requires_dist) or ["nothing"], is_code=True),
        Fact("Python", [release.requires_python], is_code=True),
        Fact("Protocol", [_protocol(release)]),
        Fact("License", [release.license or "not stated"]),
        Fact("Publisher", [release.publisher]),
        Fact("Published", [f"{release.published_at:%Y-%m-%d %H:%M} UTC"]),
        Fact("Source", [source], source if is_web_address(source) else ""),  # or it may run scripts
        Fact("Commit", [release.source.commit], is_code=True),
        Fact("Wheel", [release.wheel.filename], wheel, is_code=True),
        Fact("Wheel SHA-256", [release.wheel.sha256], is_code=True),
        Fact(
            "Attestation",
            ["Sigstore bundle" if release.attestation_sha256 else "none"],
            attestation_path(wheel) if wheel and release.attestation_sha256 else "",
        ),
    ]
    return [fact for fact in facts if any(fact.lines)]


def _entry(release: Release, status: Status) -> Entry:
    return Entry(
        version=release.version,
        published=f"{release.published_at:%Y-%m-%d}",
        python=release.requires_python,
        size=_size(release.wheel.size),
        verdict=_VERDICTS[release.validation.verdict],
        yanked=status.yanked.get(release.version),
        wheel=_inside(release),
        sha256=release.wheel.sha256,
    )


def _inside(release: Release) -> str:
    return next((url for url in release.wheel.urls if "://" not in url), "")


def _split(name: str, size: int | None, release: Release) -> str:
    if size is None:
        return f"{name}: {'not counted' if release.validation.checked_on else 'endless'}"
    return f"{name}: {size:,} {'example' if size == 1 else 'examples'}"


def _dataset(dataset: Dataset) -> str:
    when = f", with {dataset.when}" if dataset.when else ""
    return f"{dataset.repo} at {dataset.revision[:12]}{when}"


def _protocol(release: Release) -> str:
    minimum, maximum = release.protocol.minimum, release.protocol.maximum
    return minimum if minimum == maximum else f"{minimum} to {maximum}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1024:,.0f} KiB" if num_bytes >= 1024 else f"{num_bytes} bytes"
