"""Receive publications, and check them again, whatever their sender has checked.

A publication is one multipart request with size limits, spooled to disk. Its parts are `record`
(the release as JSON), `wheel`, and optionally `attestation`. The wheel is read but never run. The
right to publish, and whether the version is free, are checked later inside the transaction.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import NamedTuple, cast

import msgspec
from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from telescope_core.base.errors import RegistryError
from telescope_core.base.secret_names import reserved_secrets
from telescope_envs.records.files import sha256_of
from telescope_envs.records.model import RecordType
from telescope_envs.records.reading import MAX_LINE_BYTES, Publication, parse_record
from telescope_envs.records.release import Release, Status
from telescope_envs.rules.admission import misnamed
from telescope_envs.rules.wheel import check_publishable, read_wheel, unlike
from telescope_envs.server.refusals import Refusal

MAX_RECORD_BYTES = MAX_LINE_BYTES
MAX_ATTESTATION_BYTES = 1024 * 1024
_CLOCK_TOLERANCE = timedelta(hours=1)
_Object = dict[str, object]


class Sent(NamedTuple):
    """The parts of an upload, all unchecked."""

    record: bytes
    wheel: bytes
    attestation: bytes
    """Empty if there is none."""


def parse_publication(sent: Sent) -> Publication:
    """Return an upload with its record parsed; the rest is unchecked.

    Raises Refusal if the record cannot be read, or has fields that this server does not know.
    """
    release = _parsed(Release, sent.record, "release")
    given = cast(_Object, msgspec.json.decode(sent.record))
    kept = release.as_table()
    lost = sorted(_lost(given, kept))
    if lost:
        raise Refusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"the release record has fields that this server does not know: {', '.join(lost)}",
            "upgrade telescope-envs on the server",
        )
    return Publication(release=release, wheel=sent.wheel, attestation=sent.attestation)


def check_publication(publication: Publication) -> None:
    """Raise RegistryError unless record, wheel and attestation are valid and match each other."""
    release, found = publication.release, publication.attestation
    _check_record(release)
    wheel, stated = publication.wheel, release.wheel
    if (len(wheel), sha256_of(wheel)) != (stated.size, stated.sha256):
        raise _unprocessable(
            f"the record is of another wheel: expected {stated.size} bytes, sha256 "
            f"{stated.sha256}, got {len(wheel)} bytes, sha256 {sha256_of(wheel)}"
        )
    contents = read_wheel(wheel, stated.filename)
    check_publishable(contents)
    license_ = ("license", release.license, contents.license)
    for name, expected, got in (*unlike(contents, release), license_):
        if expected != got:
            raise _unprocessable(f"the wheel's {name} is {got!r}, but the record has {expected!r}")
    if len(found) > MAX_ATTESTATION_BYTES:
        raise _unprocessable(f"the attestation is longer than {MAX_ATTESTATION_BYTES} bytes")
    digest = sha256_of(found) if found else ""
    if digest != release.attestation_sha256:
        raise _unprocessable(
            f"the record's attestation_sha256 is {release.attestation_sha256!r}, but "
            f"the attestation has {digest!r}"
        )


def parse_status(text: bytes) -> Status:
    """Parse a status record; the versions that it yanks are checked when it is stored."""
    return _parsed(Status, text, "status")


def _parsed(record: type[RecordType], text: bytes, kind: str) -> RecordType:
    where = f"the {kind} record cannot be read"
    try:
        return parse_record(record, text, where)
    except RegistryError as error:
        raise _unprocessable(str(error).removesuffix("; update the registry")) from None


def _check_record(release: Release) -> None:
    for field, wanted, got in misnamed(release):
        raise _unprocessable(f"the release record's {field} must be {wanted!r}, got {got!r}")
    # A URL on another host would tell that host's owner who installs what.
    urls = (f"artifacts/{release.wheel.filename}",)
    if release.wheel.urls != urls:
        raise _unprocessable(
            f"the release record's wheel.urls must be {urls!r}, got {release.wheel.urls!r}"
        )
    reserved = reserved_secrets(release.secrets)
    if reserved:
        raise _unprocessable(f"secrets must not be Telescope's own variables, got {reserved}")
    if release.validation.verdict == "fail":
        raise Refusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"{release.id} {release.version} did not pass its validation",
            "run telescope env validate and correct what it reports",
        )


def check_time(release: Release) -> None:
    """Raise Refusal unless `published_at` is within an hour of now.

    The time must be right because installers can skip releases that are too new.
    """
    published_at = release.published_at
    if abs(datetime.now(UTC) - published_at) > _CLOCK_TOLERANCE:
        raise Refusal(
            HTTPStatus.UNPROCESSABLE_ENTITY,
            f"published_at must be within an hour of now, got {published_at.isoformat()}",
            "publish again, and set this machine's clock if it is wrong",
        )


def _lost(sent: _Object, kept: _Object, where: str = "") -> list[str]:
    """Return the dotted paths of the keys in `sent` that are not in `kept`."""
    lost: list[str] = []
    for key, value in sent.items():
        if key not in kept:
            lost.append(f"{where}{key}")
        elif isinstance(value, dict) and isinstance(kept[key], dict):
            inner, known = cast(_Object, value), cast(_Object, kept[key])
            lost += _lost(inner, known, f"{where}{key}.")
    return lost


def _unprocessable(error: str) -> Refusal:
    return Refusal(
        HTTPStatus.UNPROCESSABLE_ENTITY, error, "build it again with telescope env build and push"
    )


_PARTS = {"record", "wheel", "attestation"}
_OVERHEAD_BYTES = MAX_RECORD_BYTES + MAX_ATTESTATION_BYTES + 16 * 1024
_ARRIVES_WITHIN_S = 300.0
_DRAINED_BYTES = 16 * 1024 * 1024
"""Most bytes of a too long body that are read and discarded, so that its sender reads the
response."""


async def receive_publication(request: Request, *, max_wheel_bytes: int) -> Sent:
    """Return the parts of an upload; raises Refusal if they are not those of a publication."""
    limit = max_wheel_bytes + _OVERHEAD_BYTES
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        await _drain(request)
        raise _too_long(max_wheel_bytes)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise _malformed("the body is not multipart/form-data")
    body = bounded(request, limit, _too_long(max_wheel_bytes))
    parser = MultiPartParser(
        request.headers, body, max_files=3, max_fields=0, max_part_size=MAX_RECORD_BYTES
    )
    try:
        async with asyncio.timeout(_ARRIVES_WITHIN_S):
            form = await parser.parse()
    except MultiPartException as error:
        raise _malformed(error.message) from None
    except (TimeoutError, ClientDisconnect) as error:
        raise Refusal(
            HTTPStatus.REQUEST_TIMEOUT,
            f"the publication did not arrive completely within {_ARRIVES_WITHIN_S:g} s",
            "publish again; nothing was stored",
        ) from error
    try:
        names = [name for name, _ in form.multi_items()]
        if not set(names) <= _PARTS or len(set(names)) < len(names) or "wheel" not in names:
            raise _malformed(
                f"expected the parts record and wheel once each, got {', '.join(names)}"
            )
        parts = {name: await _content(part, name) for name, part in form.multi_items()}
    finally:
        await form.close()
    if len(parts["wheel"]) > max_wheel_bytes:
        raise _too_long(max_wheel_bytes)
    return Sent(parts.get("record", b""), parts["wheel"], parts.get("attestation", b""))


async def bounded(request: Request, limit: int, refusal: Refusal) -> AsyncGenerator[bytes, None]:
    """Yield the body; raises `refusal` if it is longer than `limit`, whatever was announced."""
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise refusal
        yield chunk


async def _drain(request: Request) -> None:
    left = _DRAINED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(10.0):
            async for chunk in request.stream():
                left -= len(chunk)
                if left < 0:
                    return


async def _content(part: UploadFile | str, name: str) -> bytes:
    if isinstance(part, str):
        raise _malformed(f"the part {name!r} has no filename")
    limit = {"record": MAX_RECORD_BYTES, "attestation": MAX_ATTESTATION_BYTES}.get(name)
    if limit is not None and (part.size or 0) > limit:
        raise _malformed(f"the part {name!r} is longer than {limit} bytes")
    return await part.read()


def _too_long(max_wheel_bytes: int) -> Refusal:
    return Refusal(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"the wheel is longer than {max_wheel_bytes} bytes, the limit of this registry",
        "leave data out of the wheel and load it from a dataset",
    )


def _malformed(problem: str) -> Refusal:
    return Refusal(
        HTTPStatus.BAD_REQUEST,
        f"this is not a valid publication: {problem}",
        "publish with telescope env push",
    )
