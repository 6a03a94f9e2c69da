"""Reads a registry from a static host, such as a bucket or GitHub Pages, and publishes to a server.

A static host cannot list files, so the catalog is the `v1/index.json` that `telescope hub render`
wrote. Requests are conditional on the cached copy, so a file is sent again only if it has changed.
A server is read in the same way; its token is sent to its own address only.
"""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from http import HTTPStatus
from urllib.parse import quote

import httpx

from telescope_core.base.errors import ConfigError, RegistryError
from telescope_core.base.terminal import foreign
from telescope_envs.records.catalog import CATALOG_PATH, CatalogRow, read_catalog
from telescope_envs.records.files import MAX_FILE_BYTES, sha256_of
from telescope_envs.records.reading import (
    Publication,
    is_registry_path,
    is_web_address,
    log_unreadable,
    parse_record,
)
from telescope_envs.records.release import RegistryConfig, Status
from telescope_envs.registry.fetch import Explained, Fetcher, Patience, explanation_in, new_client
from telescope_envs.registry.http_cache import CachedFile, HttpCache
from telescope_envs.registry.stores import Place, Store
from telescope_envs.rules.admission import index_line

_STATUS_TRIES = 20
_PAUSE_S = 0.02
_TIMEOUT = httpx.Timeout(30.0, read=120.0)


_OF_A_PROXY = (
    HTTPStatus.BAD_GATEWAY,
    HTTPStatus.SERVICE_UNAVAILABLE,
    HTTPStatus.GATEWAY_TIMEOUT,
)
_LONGEST_REASON = 100
_ARTIFACT_TOTAL_S = 600.0
_WORTH_TELLING_S = 60.0


class HttpStore:
    """Reads the registry at `place`; offline, it reads only files that were fetched before."""

    def __init__(self, place: Place, patience: Patience | None = None) -> None:
        self._place = place
        self.address = place.address.text
        self.revision = ""  # a host has no commits
        self._fetcher = Fetcher(self.address, place.token, place.login_hint)
        self._cache = HttpCache(place.cache / "http", self.address, place.tell)
        self._patience = patience or Patience()
        self._oldest_told_s = 0.0

    def read(self, path: str) -> bytes | None:
        """Return the file at `path`; None when there is none."""
        if not is_registry_path(path):
            return None
        return self._get(self._url(path), MAX_FILE_BYTES, self._patience)

    def artifact(self, url: str, *, max_bytes: int, sha256: str = "") -> bytes | None:
        """Return the artifact at `url`, on this or another host; None when there is none."""
        total_s = max(_ARTIFACT_TOTAL_S, self._patience.total_s)
        patience = replace(self._patience, total_s=total_s)
        if is_registry_path(url):
            return self._get(self._url(url), max_bytes, patience, sha256)
        if not is_web_address(url):
            return None
        if url.startswith("http:") and not self.address.startswith("http:"):
            is_https = "is https, but it " if self.address.startswith("https:") else ""
            raise RegistryError(
                f"{self.address} {is_https}gives a wheel the URL {url}, which anyone on the "
                "network can change; tell the registry's maintainers"
            )
        return self._get(url, max_bytes, patience, sha256)

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id."""
        found = self.read(CATALOG_PATH)
        if found is None:
            raise RegistryError(
                f"{self.address} has no {CATALOG_PATH}, which lists its environments; "
                "run telescope hub render on the registry and serve its output"
            )
        read = read_catalog(found, self._url(CATALOG_PATH))
        log_unreadable(read.unreadable)
        return read.rows

    def close(self) -> None:
        """Close connections; calling it twice is fine."""
        self._fetcher.close()

    def _url(self, path: str) -> str:
        return f"{self.address}/{quote(path)}"

    def _get(self, url: str, max_bytes: int, patience: Patience, sha256: str = "") -> bytes | None:
        known = self._cache.get(url, max_bytes=max_bytes)
        if known is not None and not _may_be_kept(known, sha256):
            known = None
        if self._place.offline:
            return self._offline(url, known)
        answer = self._fetcher.get(
            url, max_bytes=max_bytes, patience=patience, headers=_conditions(known)
        )
        if answer.status == 304 and known is not None:
            self._cache.confirm(url)
            return known.body
        if answer.status == 304:
            raise RegistryError(
                f"{url} answered 304 (not modified) to a request without conditions; check the host"
            )
        if _may_be_kept(answer, sha256):
            self._cache.put(url, answer)
        return answer.body if answer.status == 200 else None

    def _offline(self, url: str, known: CachedFile | None) -> bytes | None:
        if known is None:
            raise RegistryError(
                f"{url} was never fetched, and --offline reads only files that were; "
                "run the same command once without --offline"
            )
        age_s = time.time() - known.confirmed_at
        if age_s > self._oldest_told_s + _WORTH_TELLING_S or not self._oldest_told_s:
            self._oldest_told_s = max(age_s, 1e-9)
            self._place.remark_age(known.confirmed_at)
        return known.body if known.status == 200 else None


class ServedStore(HttpStore):
    """Reads like a static host, and publishes through the API that config.json names."""

    def __init__(self, place: Place, api: str) -> None:
        super().__init__(place)
        if not is_registry_path(api):
            # The token is sent to this path.
            raise RegistryError(
                f"{place.address.text}/config.json: api must be a path below the registry, got "
                f"{api!r}; tell the registry's maintainers"
            )
        self._api = api
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Close connections; calling it twice is fine."""
        super().close()
        if self._client is not None:
            self._client.close()
            self._client = None

    def require_publisher(self, owner: str) -> None:
        """Raise RegistryError if `owner`'s releases would be refused; ConfigError without a token.

        A server of an earlier version says so only when a release is sent.
        """
        if self._place.token is None:
            raise ConfigError(
                f"publishing to {self.address} needs a token, and none is set; "
                f"{self._place.login_hint}"
            )
        request = self._opened().build_request(
            "GET", f"{self._api}/token", params={"publishes": owner}
        )
        response = self._send(request)
        if not response.is_success:
            raise self._refused(response)

    def publish(self, publication: Publication) -> bool:
        """Send the release with its files in one request; False if it was already published."""
        files = {
            "record": ("record.json", index_line(publication.release), "application/json"),
            "wheel": (publication.release.wheel.filename, publication.wheel),
        }
        if publication.attestation:
            files["attestation"] = ("attestation.json", publication.attestation, "application/json")
        request = self._opened().build_request("POST", f"{self._api}/releases", files=files)
        response = self._send(request)
        if response.status_code == HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
            raise self._refused(
                response,
                f"the wheel has {len(publication.wheel)} bytes; this answer is not Telescope's, so "
                "a proxy in front of the registry limits what is sent: ask its operator to raise "
                "that limit, or make the wheel smaller",
            )
        if not response.is_success:
            raise self._refused(response)
        return response.status_code == HTTPStatus.CREATED

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status by `change` applied to it; retries when others changed it first."""
        path = f"status/{environment_id}.json"
        where = f"{self.address}/{path}"
        for _ in range(_STATUS_TRIES):
            found = self._send(self._opened().build_request("GET", path))
            if not found.is_success and found.status_code != HTTPStatus.NOT_FOUND:
                raise self._refused(found)
            status = change(
                parse_record(Status, found.content if found.is_success else b"{}", where)
            )
            request = self._opened().build_request(
                "PUT",
                f"{self._api}/status/{environment_id}",
                content=status.as_json(),
                headers={"If-Match": found.headers.get("etag", '"none"')},
            )
            response = self._send(request)
            if response.is_success:
                return parse_record(Status, response.content, where)
            if response.status_code != HTTPStatus.PRECONDITION_FAILED:
                raise self._refused(response)
            time.sleep(_PAUSE_S)
        raise RegistryError(
            f"others changed the status of {environment_id} during all {_STATUS_TRIES} tries; "
            "try again"
        )

    def _opened(self) -> httpx.Client:
        if self._client is None:
            token = self._place.token
            self._client = new_client(
                self.address,
                base_url=f"{self.address}/",
                headers={
                    # A proxy that compresses an answer changes its tag, which is sent back.
                    "Accept-Encoding": "identity",
                    **({"Authorization": f"Bearer {token}"} if token else {}),
                },
                timeouts=_TIMEOUT,
            )
        return self._client

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._opened().send(request)
        except httpx.HTTPError as error:
            raise RegistryError(
                f"registry {self.address} did not answer: "
                f"{error or type(error).__name__}; check the address and the network, and try "
                "again: it is safe to publish the same release twice"
            ) from error

    def _refused(self, response: httpx.Response, unexplained: str = "") -> RegistryError:
        """Return the error for a refusal; `unexplained` is the advice if it has no explanation."""
        status, sent = response.status_code, response.request.method != "GET"
        if not unexplained and sent and status in _OF_A_PROXY:
            unexplained = (
                "a proxy gave up on the registry, which may have published the release or changed "
                "the status; try again: it is safe to publish the same release twice"
            )
        said = explanation_in(response.content) or Explained(
            error=f"it answered {status} {foreign(response.reason_phrase, _LONGEST_REASON)}",
            what_to_do=unexplained or "check the address",
        )
        is_login = response.status_code == HTTPStatus.UNAUTHORIZED
        advice = self._place.login_hint if is_login else said.what_to_do
        return RegistryError(f"registry {self.address}: {said.error}; {advice}")


def open_http(place: Place) -> Store:
    """Open a static host, or a server if the registry's config.json names an API."""
    static = HttpStore(place)
    where = f"{place.address.text}/config.json"
    try:
        found = static.read("config.json")
        api = parse_record(RegistryConfig, found, where).api if found is not None else ""
    except RegistryError:
        static.close()
        raise
    if not api:
        return static
    static.close()
    return ServedStore(place, api)


def download(place: Place, url: str, max_bytes: int, sha256: str) -> bytes | None:
    """Return the wheel at an absolute address that a registry of another kind gives it.

    The rules and the cache are the same as for registries on web servers.
    """
    with closing(HttpStore(place)) as store:
        return store.artifact(url, max_bytes=max_bytes, sha256=sha256)


def _may_be_kept(found: CachedFile, sha256: str) -> bool:
    """Return whether `found` is not a file with another hash than `sha256`, if that is known.

    A file that was damaged on its way comes with the tag of the whole one, so its host would answer
    "not modified" to every later request.
    """
    return not sha256 or found.status != HTTPStatus.OK or sha256_of(found.body) == sha256


def _conditions(known: CachedFile | None) -> dict[str, str]:
    if known is None or known.status != 200:
        return {}
    if known.etag:
        return {"If-None-Match": known.etag}
    return {"If-Modified-Since": known.last_modified} if known.last_modified else {}
