"""Reads and publishes to a registry in a dataset repository of the Hugging Face Hub.

The branch is resolved to a commit when the store is opened, and everything is read from that
commit. A change is one commit on top of the commit that its checks have read. If somebody else
committed in between, the Hub refuses the change, and the checks run again on the newer commit.
"""

import random
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import CommitOperationAdd, HfApi, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    HTTPError,  # pyright: ignore[reportPrivateImportUsage]
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from telescope_core.base.errors import RegistryError
from telescope_envs.records.catalog import CATALOG_PATH, CatalogRow, catalog_row, read_catalog
from telescope_envs.records.files import MAX_FILE_BYTES, read_file, sha256_of
from telescope_envs.records.reading import (
    Publication,
    artifact_files,
    ids_of,
    is_registry_path,
    is_web_address,
    log_unreadable,
)
from telescope_envs.records.release import Status
from telescope_envs.registry.fetch import new_client
from telescope_envs.registry.http_cache import CachedFile, HttpCache
from telescope_envs.registry.static_view import derived_files
from telescope_envs.registry.stores import Place
from telescope_envs.registry.stores.http import download
from telescope_envs.rules.admission import Read, changed_status, index_line, is_new

_KIND: Literal["dataset"] = "dataset"
_COMMIT_LENGTH = 40
_TOO_LATE = (409, 412)
_MAX_TRIES = 12
_FIRST_PAUSE_S = 0.05
_ANSWER_WITHIN_S = 15.0


class _NoBar(tqdm):
    """A disabled progress bar, because most files are only a few kilobytes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "disable": True})


class HuggingFaceStore:
    """Reads and appends to the repository at `place`.

    `endpoint` is the Hub's URL (None for the default). A change is tried `max_tries` times if other
    writers commit first.
    """

    def __init__(
        self, place: Place, *, endpoint: str | None = None, max_tries: int = _MAX_TRIES
    ) -> None:
        self._max_tries = max_tries
        self._place = place
        self.address = place.address.text
        repository, _, branch = self.address.removeprefix("hf://").partition("@")
        self._repository, self._branch = repository, branch or "main"
        self._api = HfApi(endpoint=endpoint, token=place.token)
        self.revision = self._known_commit() if place.offline else self._newest_commit()

    def read(self, path: str) -> bytes | None:
        """Return the file at `path`; None when there is none."""
        return self._read_at(self.revision, path)

    def artifact(self, url: str, *, max_bytes: int, sha256: str = "") -> bytes | None:
        """Return the artifact at `url`, in the repository or elsewhere; None when there is none."""
        if is_web_address(url):
            return download(self._place, url, max_bytes, sha256)
        if not is_registry_path(url):
            return None
        if not self._place.offline and not isinstance(self._cached(self.revision, url), Path):
            with self._explained():
                there = hf_hub_url(
                    self._repository,
                    url,
                    repo_type=_KIND,
                    revision=self.revision,
                    endpoint=self._api.endpoint,
                )
                try:
                    size = self._api.get_hf_file_metadata(url=there).size
                except EntryNotFoundError:
                    return None
            if (size or 0) > max_bytes:
                raise RegistryError(
                    f"{self.address}/{url}: longer than {max_bytes} bytes, the limit for a wheel"
                )
        found = self._read_at(self.revision, url, max_bytes=max_bytes)
        if found is None or not sha256 or sha256_of(found) == sha256 or self._place.offline:
            return found
        return self._read_at(self.revision, url, max_bytes=max_bytes, anew=True)

    def catalog(self) -> list[CatalogRow]:
        """Return one row per environment, sorted by id."""
        return self._catalog_at(self.revision)

    def close(self) -> None:
        """Do nothing, because nothing is held open."""

    def publish(self, publication: Publication) -> bool:
        """Add the wheel, the index line and the derived files in one commit."""

        def added(read: Read) -> dict[str, bytes]:
            if not is_new(read, publication):
                return {}
            path = f"index/{publication.release.id}.jsonl"
            line = index_line(publication.release)
            return {**artifact_files(publication, self.address), path: (read(path) or b"") + line}

        release = publication.release
        return self._change(release.id, added, f"Publish {release.id} {release.version}")

    def change_status(self, environment_id: str, change: Callable[[Status], Status]) -> Status:
        """Replace the status record of owner/name in one commit."""
        last = Status()

        def changed(read: Read) -> dict[str, bytes]:
            nonlocal last
            last, data = changed_status(read, environment_id, change)
            path = f"status/{environment_id}.json"
            return {} if read(path) == data else {path: data}

        self._change(environment_id, changed, f"Change the status of {environment_id}")
        return last

    def _change(
        self, environment_id: str, make: Callable[[Read], dict[str, bytes]], message: str
    ) -> bool:
        """Commit the files that `make` returns, on the commit it read; False if it returns none."""
        self._require_branch()
        for tried in range(self._max_tries):
            parent = self._newest_commit()
            read = partial(self._read_at, parent)
            files = make(read)
            if not files:
                return False
            rows = self._catalog_at(parent)
            made = derived_files(_over(files, read), rows, environment_id)
            if self._commit_on(parent, {**files, **made}, message):
                return True
            time.sleep(_FIRST_PAUSE_S * min(tried + 1, 8) * random.uniform(0.5, 1.5))
        raise RegistryError(
            f"others changed {self.address} during all {self._max_tries} tries, so nothing was "
            "published; try again"
        )

    def _commit_on(self, parent: str, files: dict[str, bytes], message: str) -> bool:
        """Return whether the commit was made; False if `parent` is no longer the newest commit."""
        with self._explained():
            try:
                self._api.create_commit(
                    self._repository,
                    [CommitOperationAdd(path, data) for path, data in files.items()],
                    commit_message=message,
                    repo_type=_KIND,
                    revision=self._branch,
                    parent_commit=parent,
                )
            except HfHubHTTPError as error:
                if error.response.status_code in _TOO_LATE:
                    return False
                raise
        return True

    def _catalog_at(self, commit: str) -> list[CatalogRow]:
        """Return the catalog, computed from the index files if the repository has none yet."""
        read = partial(self._read_at, commit)
        found = read(CATALOG_PATH)
        if found is not None:
            catalog = read_catalog(found, f"{self.address}/{CATALOG_PATH}")
            log_unreadable(catalog.unreadable)
            return catalog.rows
        self._require_network("the list of its files")
        with self._explained():
            paths = self._api.list_repo_files(self._repository, repo_type=_KIND, revision=commit)
        rows = [
            catalog_row(one, read(f"index/{one}.jsonl") or b"", read(f"status/{one}.json"))
            for one in ids_of(paths)
        ]
        log_unreadable([skipped for row in rows for skipped in row.unreadable])
        return [read_row.row for read_row in rows if read_row.row is not None]

    def _read_at(
        self, commit: str, path: str, *, max_bytes: int = MAX_FILE_BYTES, anew: bool = False
    ) -> bytes | None:
        """Return the file of a commit, from the library's cache unless it is to be sent `anew`."""
        if not is_registry_path(path):
            return None
        known = True if anew else self._cached(commit, path)
        if isinstance(known, Path):
            return self._bytes_of(known, path, max_bytes)
        if known is False:
            return None
        self._require_network(path)
        with self._explained():
            try:
                found = self._api.hf_hub_download(
                    self._repository,
                    path,
                    repo_type=_KIND,
                    revision=commit,
                    force_download=anew,
                    tqdm_class=_NoBar,
                )
            except LocalEntryNotFoundError as error:
                # The library raises this when it cannot reach the Hub; the cause has the reason.
                raise self._unreachable(error.__cause__ or error) from None
            except EntryNotFoundError:
                return None
        return self._bytes_of(Path(found), path, max_bytes)

    def _bytes_of(self, kept: Path, path: str, max_bytes: int) -> bytes:
        """Return the library's cached content of the file at `path`, a link to its bytes."""
        try:
            return read_file(kept, max_bytes=max_bytes, follows_link=True)
        except OSError as error:
            raise RegistryError(f"{self.address}/{path} cannot be read: {error}") from error

    def _cached(self, commit: str, path: str) -> Path | bool:
        """Return the file in the library's cache.

        A result of False means that the file is known not to exist, and True that the cache does
        not know.
        """
        found = try_to_load_from_cache(self._repository, path, revision=commit, repo_type=_KIND)
        if isinstance(found, str):
            return Path(found)
        return found is None

    def _newest_commit(self) -> str:
        with self._explained():
            commit = self._api.repo_info(
                self._repository,
                repo_type=_KIND,
                revision=self._branch,
                timeout=_ANSWER_WITHIN_S,
            ).sha
        if not commit:
            raise RegistryError(f"{self.address}: the Hub did not return the newest commit")
        self._memory().put(self.address, CachedFile(status=200, body=commit.encode()))
        return commit

    def _known_commit(self) -> str:
        known = self._memory().get(self.address, max_bytes=_COMMIT_LENGTH)
        if known is None:
            raise RegistryError(
                f"{self.address} was never read, and --offline reads only what was read before; "
                "run the same command once without --offline"
            )
        self._place.remark_age(known.confirmed_at)
        return known.body.decode()

    def _memory(self) -> HttpCache:
        return HttpCache(self._place.cache / "hub", self.address, self._place.tell)

    def _require_branch(self) -> None:
        is_commit = len(self._branch) == _COMMIT_LENGTH and self._branch.isalnum()
        if self._place.offline or is_commit:
            reason = "offline" if self._place.offline else f"pinned to commit {self._branch[:12]}"
            raise RegistryError(
                f"{self.address} is {reason}, so nothing can be published; "
                f"publish to hf://{self._repository} with network access"
            )

    def _require_network(self, path: str) -> None:
        if self._place.offline:
            raise RegistryError(
                f"{self.address}/{path} was never fetched at {self.revision[:12]}, and --offline "
                "reads only files that were; run the same command once without --offline"
            )

    @contextmanager
    def _explained(self) -> Generator[None]:
        """Turn the library's errors into RegistryErrors, whose messages never contain the token."""
        try:
            yield
        except RevisionNotFoundError:
            raise RegistryError(f"{self.address}: there is no revision {self._branch!r}") from None
        except RepositoryNotFoundError:
            raise RegistryError(
                f"{self.address}: there is no such dataset repository, or it is private and the "
                f"token may not read it; {self._place.login_hint}"
            ) from None
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status in (401, 403):
                raise RegistryError(
                    f"{self.address}: the Hub answered {status}, so the token may not do this; "
                    f"{self._place.login_hint}"
                ) from None
            said = error.server_message or f"answered {status}"
            raise RegistryError(f"{self.address}: error from the Hub: {said}; try again") from None
        # An ImportError or ValueError is about the proxy that an environment variable names.
        except (HTTPError, OSError, RuntimeError, ImportError, ValueError) as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: BaseException) -> RegistryError:
        """Return the error; raises ConfigError where the user's own settings are the reason."""
        new_client(self.address).close()
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        return RegistryError(
            f"{self.address} ({self._api.endpoint}) cannot be reached: {said}; check the network, "
            "then try again"
        )


def open_hub(place: Place) -> HuggingFaceStore:
    """Open a dataset repository on the Hub at `HF_ENDPOINT`, or on the default Hub."""
    return HuggingFaceStore(place)


def _over(files: dict[str, bytes], read: Read) -> Read:
    """Return a `read` function that sees `files` as already written."""
    return lambda path: files[path] if path in files else read(path)
