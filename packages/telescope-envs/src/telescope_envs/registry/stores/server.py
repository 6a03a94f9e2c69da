"""Publishes to a registry served by `telescope hub serve`.

Such a registry is read like one on a static host; `ServedStore` in `http` combines the two. The
token is sent to the registry's address only, and no redirect is followed.
"""

import os
import time
from collections.abc import Callable
from http import HTTPStatus

import httpx
import msgspec

from telescope_core.errors import RegistryError
from telescope_envs.registry.admission import index_line
from telescope_envs.registry.fetch import tls_context
from telescope_envs.registry.parsing import parse_record
from telescope_envs.registry.place import Place
from telescope_envs.registry.records import Status
from telescope_envs.registry.store import Publication

_STATUS_TRIES = 20
_PAUSE_S = 0.02
_TIMEOUT = httpx.Timeout(30.0, read=120.0)


class HubApi:
    """Changes the registry at `place` through its HTTP API at the relative path `api`."""

    def __init__(self, place: Place, api: str) -> None:
        self._place = place
        self._api = api
        self._client: httpx.Client | None = None

    def close(self) -> None:
        """Close the connection; calling it twice is fine."""
        if self._client is not None:
            self._client.close()
            self._client = None

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
        if not response.is_success:
            raise self._refused(response)
        return response.status_code == HTTPStatus.CREATED

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status by `change` applied to it; retries when others changed it first."""
        path = f"status/{environment_id}.json"
        where = f"{self._place.address.text}/{path}"
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
                content=status.model_dump_json(by_alias=True).encode(),
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
            self._client = httpx.Client(
                base_url=f"{self._place.address.text}/",
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=_TIMEOUT,
                follow_redirects=False,
                verify=tls_context(os.environ.get("SSL_CERT_FILE", "")),
            )
        return self._client

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._opened().send(request)
        except httpx.HTTPError as error:
            raise RegistryError(
                f"registry {self._place.address.text} did not answer: "
                f"{error or type(error).__name__}; check the address and the network, and try "
                "again: it is safe to publish the same release twice"
            ) from error

    def _refused(self, response: httpx.Response) -> RegistryError:
        try:
            said = _ERROR.decode(response.content)
        except msgspec.DecodeError:
            said = _Error(
                error=f"it answered {response.status_code} {response.reason_phrase}",
                what_to_do="check the address",
            )
        is_login = response.status_code == HTTPStatus.UNAUTHORIZED
        advice = self._place.login_hint if is_login else said.what_to_do
        return RegistryError(f"registry {self._place.address.text}: {said.error}; {advice}")


class _Error(msgspec.Struct):
    error: str
    what_to_do: str


_ERROR = msgspec.json.Decoder(_Error)
