"""Receives a publication as one multipart request, with size limits, spooled to disk.

Its parts are `record` (the release as JSON), `wheel`, and optionally `attestation`.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from telescope_envs.registry.store import Publication
from telescope_envs.server.checks import MAX_ATTESTATION_BYTES, MAX_RECORD_BYTES, parse_release
from telescope_envs.server.refusal import Refusal

_PARTS = {"record", "wheel", "attestation"}
_OVERHEAD_BYTES = MAX_RECORD_BYTES + MAX_ATTESTATION_BYTES + 16 * 1024
_ARRIVES_WITHIN_S = 300.0
_DRAINED_BYTES = 16 * 1024 * 1024
"""How much of a too long body is read and discarded, so that its sender reads the response."""


async def receive_publication(request: Request, *, max_wheel_bytes: int) -> Publication:
    """Return the publication that was sent; raises Refusal if malformed. Contents are unchecked."""
    limit = max_wheel_bytes + _OVERHEAD_BYTES
    if _announced(request) > limit:
        await _drain(request)
        raise _too_long(max_wheel_bytes)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise _malformed("the body is not multipart/form-data")
    bounded = _bounded(request, limit, lambda: _too_long(max_wheel_bytes))
    parser = MultiPartParser(
        request.headers, bounded, max_files=3, max_fields=0, max_part_size=MAX_RECORD_BYTES
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
    return Publication(
        release=parse_release(parts.get("record", b"")),
        wheel=parts["wheel"],
        attestation=parts.get("attestation", b""),
    )


async def _bounded(
    request: Request, limit: int, refusal: Callable[[], Refusal]
) -> AsyncGenerator[bytes, None]:
    """Yield the body; raises once it is longer than `limit`, whatever its announced length."""
    received = 0
    async for chunk in request.stream():
        received += len(chunk)
        if received > limit:
            raise refusal()
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


def _announced(request: Request) -> int:
    text = request.headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0


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
