"""`ServerStore`: a registry that `telescope hub serve` serves; publishes through its API."""

import os
import time
from collections.abc import Callable
from http import HTTPStatus

import httpx
import msgspec

from telescope_core.errors import RegistryError
from telescope_envs.registry.admission import index_line
from telescope_envs.registry.catalog import CATALOG_PATH, CatalogRow, read_catalog
from telescope_envs.registry.fetch import tls_context
from telescope_envs.registry.parsing import parse_record
from telescope_envs.registry.records import Status
from telescope_envs.registry.store import Publication, is_registry_path

_STATUS_TRIES = 20
_PAUSE_S = 0.02
_TIMEOUT = httpx.Timeout(30.0, read=120.0)


class ServerStore:
    """Reads the registry at `address`, and changes it as the owner of `token` may."""

    def __init__(self, address: str, *, api: str = "api", token: str | None = None) -> None:
        self._address = address.rstrip("/")
        self._api = api
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(
            base_url=f"{self._address}/",
            headers=headers,
            timeout=_TIMEOUT,
            follow_redirects=False,
            verify=tls_context(os.environ.get("SSL_CERT_FILE", "")),
        )

    @property
    def address(self) -> str:
        """Where it is."""
        return self._address

    @property
    def revision(self) -> str:
        """Empty: a server is what it is now."""
        return ""

    def read(self, path: str) -> bytes | None:
        """Return the file at `path`; None when there is none."""
        if not is_registry_path(path):
            return None
        response = self._send(self._client.build_request("GET", path))
        return response.content if response.is_success else self._nothing(response)

    def artifact(self, url: str, *, max_bytes: int) -> bytes | None:
        """Return the artefact at the relative `url`; None when there is none."""
        if not is_registry_path(url):
            return None
        request = self._client.build_request("GET", url)
        try:
            with self._client.stream("GET", request.url) as response:
                if not response.is_success:
                    response.read()
                    return self._nothing(response)
                data = b""
                for chunk in response.iter_bytes():
                    data += chunk
                    if len(data) > max_bytes:
                        raise RegistryError(
                            f"{request.url}: longer than {max_bytes} bytes, the most a wheel may be"
                        )
                return data
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, by id."""
        return read_catalog(self.read(CATALOG_PATH) or b"[]", f"{self._address}/{CATALOG_PATH}")

    def close(self) -> None:
        """Let go of the connection; fine to call twice."""
        self._client.close()

    def publish(self, publication: Publication) -> bool:
        """Send the release with its files in one request; False: these bytes are published."""
        files = {
            "record": ("record.json", index_line(publication.release), "application/json"),
            "wheel": (publication.release.wheel.filename, publication.wheel),
        }
        if publication.attestation:
            files["attestation"] = ("attestation.json", publication.attestation, "application/json")
        address = f"{self._api}/releases"
        response = self._send(self._client.build_request("POST", address, files=files))
        if not response.is_success:
            raise self._refused(response)
        return response.status_code == HTTPStatus.CREATED

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status by `change` of what it is; tries again when others were faster."""
        path = f"status/{environment_id}.json"
        for _ in range(_STATUS_TRIES):
            found = self._send(self._client.build_request("GET", path))
            if not found.is_success and found.status_code != HTTPStatus.NOT_FOUND:
                raise self._refused(found)
            record = found.content if found.is_success else b"{}"
            status = change(parse_record(Status, record, f"{self._address}/{path}"))
            request = self._client.build_request(
                "PUT",
                f"{self._api}/status/{environment_id}",
                content=status.model_dump_json(by_alias=True).encode(),
                headers={"If-Match": found.headers.get("etag", '"none"')},
            )
            response = self._send(request)
            if response.is_success:
                return parse_record(Status, response.content, f"{self._address}/{path}")
            if response.status_code != HTTPStatus.PRECONDITION_FAILED:
                raise self._refused(response)
            time.sleep(_PAUSE_S)
        raise RegistryError(
            f"the status of {environment_id} was changed by others {_STATUS_TRIES} times "
            "meanwhile; try again"
        )

    def _send(self, request: httpx.Request) -> httpx.Response:
        try:
            return self._client.send(request)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def _nothing(self, response: httpx.Response) -> None:
        if response.status_code != HTTPStatus.NOT_FOUND:
            raise self._refused(response)

    def _unreachable(self, error: httpx.HTTPError) -> RegistryError:
        return RegistryError(
            f"registry {self._address} did not answer: {error or type(error).__name__}; check the "
            "address and the network, and try again"
        )

    def _refused(self, response: httpx.Response) -> RegistryError:
        try:
            said = _ERROR.decode(response.content)
        except msgspec.DecodeError:
            said = _Error(
                error=f"it answered {response.status_code} {response.reason_phrase}",
                what_to_do="check the address",
            )
        return RegistryError(f"registry {self._address}: {said.error}; {said.what_to_do}")


class _Error(msgspec.Struct):
    error: str
    what_to_do: str


_ERROR = msgspec.json.Decoder(_Error)
