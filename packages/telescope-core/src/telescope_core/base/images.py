"""Pictures in messages: taken from files and bytes, and written as parts of the chat API."""

import base64
import string
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from telescope_core.base.code_places import called_at
from telescope_core.base.errors import EnvironmentLoadError
from telescope_core.base.types import Image, Message, Role

MAX_IMAGE_BYTES = 20 << 20
"""Size of the largest picture; hosted models take no larger ones."""
_BEGINNINGS = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_BASE64 = (string.ascii_letters + string.digits + "+/").encode()
MEDIA_TYPES = (*dict.fromkeys(_BEGINNINGS.values()), "image/webp")
"""Kinds of pictures that chat endpoints take."""
_IN_URLS = {f"data:{kind}": kind for kind in MEDIA_TYPES} | {"data:image/jpg": "image/jpeg"}


def read_image(path: str | Path) -> Image:
    """Return the picture in a file: PNG, JPEG, GIF or WebP.

    Raises EnvironmentLoadError if it is another kind of file, or larger than 20 MiB.
    """
    place = Path(path).expanduser()
    try:
        data = place.read_bytes()
    except OSError as error:
        raise EnvironmentLoadError(
            f"{called_at()}: the picture {place} cannot be read: {error.strerror or error}"
        ) from None
    return image_of(data, name=str(place))


def image_of(data: bytes, *, name: str = "the picture") -> Image:
    """Return the picture whose file has the bytes `data`; `name` is what errors call it."""
    given = cast(object, data)
    if not isinstance(given, bytes | bytearray):
        raise EnvironmentLoadError(
            f"{called_at()}: image_of takes the bytes of a file, got {_shown(given)}; "
            f"{_FROM_OTHERS}"
        )
    if not data:
        raise EnvironmentLoadError(f"{called_at()}: {name} is empty, it has 0 bytes")
    if len(data) > MAX_IMAGE_BYTES:
        raise EnvironmentLoadError(
            f"{called_at()}: {name} has {len(data):,} bytes; expected a picture of at most "
            f"{MAX_IMAGE_BYTES >> 20} MiB"
        )
    kind = _kind_of(data)
    if kind is None:
        raise EnvironmentLoadError(
            f"{called_at()}: {name} begins with {bytes(data[:8])!r}, which is none of "
            f"{', '.join(MEDIA_TYPES)}; convert it to PNG"
        )
    return Image(media_type=kind, data=base64.b64encode(data).decode())


_FROM_OTHERS = (
    "read_image(path) reads a file, and what another library has drawn is saved as PNG to an "
    "io.BytesIO first: image_of(file.getvalue())"
)


def message_of(role: Role, *parts: str | Image) -> Message:
    """Return a message of texts and pictures in the order in which the model gets them."""
    text, images = "", list[Image]()
    for part in parts:
        if isinstance(part, Image):
            images.append(replace(part, at=len(text)))
        elif isinstance(cast(object, part), str):
            text += part
        else:
            raise EnvironmentLoadError(
                f"{called_at()}: message_of takes texts and pictures, got {_shown(part)}; "
                f"{_FROM_OTHERS}"
            )
    return Message(role=role, content=text, images=tuple(images))


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the content of `message` as parts of the chat API, pictures as data URLs."""
    parts: list[dict[str, Any]] = []
    begin = 0
    for image in message.images:
        if text := message.content[begin : image.at]:
            parts.append({"type": "text", "text": text})
        detail = {"detail": image.detail} if image.detail else {}
        parts.append({"type": "image_url", "image_url": {"url": url_of(image), **detail}})
        begin = image.at
    if text := message.content[begin:]:
        parts.append({"type": "text", "text": text})
    return parts


def url_of(image: Image) -> str:
    """Return the picture as a data URL."""
    return f"data:{image.media_type};base64,{image.data}"


def image_in(part: object) -> Image | None:
    """Return the picture in a part of the chat API; None if it is another part, or an address.

    An image at a remote address is not fetched, because it could not be recorded.
    """
    url, detail = _url_in(part)
    head, comma, data = url.partition(",")
    # Names of types, and of what follows them, are written in any case.
    kind, *options = head.lower().split(";")
    if not comma or options[-1:] != ["base64"] or kind not in _IN_URLS:
        return None
    return Image(media_type=_IN_URLS[kind], data=data, detail=detail)


def why_no_image(part: object) -> str:
    """Return why a part of the chat API has no picture; empty if it is no picture at all."""
    url, _ = _url_in(part)
    if url[:5].lower() == "data:":
        kinds = ", ".join(MEDIA_TYPES)
        return f"a data URL must begin with 'data:TYPE;base64,', with one of {kinds}"
    return "pictures at an address are not fetched" if url else ""


def _url_in(part: object) -> tuple[str, str]:
    """Return the address in a part of the chat API, and how closely to look; else empty texts."""
    match part:
        case {"type": "image_url", "image_url": {"url": str(url), "detail": str(detail)}}:
            return url, detail
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            return url, ""
        case _:
            return "", ""


def with_marks(message: Message) -> str:
    """Return the content with a mark such as [image/png, 12 KB] where each picture stands."""
    text, begin = "", 0
    for image in message.images:
        size = len(image.data) * 3 // 4
        mark = f"[{image.media_type}, {max(1, size // 1000)} KB]"
        text += f"{message.content[begin : image.at]}{mark}"
        begin = image.at
    return text + message.content[begin:]


def why_unusable(message: Message) -> str:
    """Return the problems of the pictures of `message`; empty if they can be sent."""
    images = cast(object, message.images)
    if not isinstance(images, tuple):
        return f"images must be a tuple of Image, got {images!r:.80}"
    if images and message.role not in ("user", "tool"):
        return "only messages of the roles user and tool can have images"
    before = 0
    for image in cast(tuple[object, ...], images):
        if not isinstance(image, Image):
            return (
                f"images must be Image objects, got {image!r:.80}; write: "
                "images=(read_image('a.png'),), with read_image of telescope_core.images"
            )
        if not before <= image.at <= len(message.content):
            return (
                f"an image stands at {image.at}, which must be from {before} to the content's "
                f"length, {len(message.content)}, in order"
            )
        before = image.at
        if (wrong := _why_no_picture(image)) is not None:
            return wrong
    return ""


def images_from_json(plain: object) -> tuple[Image, ...]:
    """Return the images in a record; raises ValueError if `value` is no list of images."""
    if not isinstance(plain, Sequence) or isinstance(plain, str):
        raise ValueError(f"images must be a list, got {plain!r:.80}")
    found: list[Image] = []
    for one in cast(Sequence[object], plain):
        match one:
            case {"media_type": str(kind), "data": str(data)} if isinstance(one, Mapping):
                fields = cast(Mapping[str, object], one)
                at, detail = int(cast(int, fields.get("at", 0))), str(fields.get("detail", ""))
                found.append(Image(media_type=kind, data=data, at=at, detail=detail))
            case _:
                raise ValueError(f"an image must have media_type and data, got {one!r:.80}")
    return tuple(found)


def _why_no_picture(image: Image) -> str | None:
    if image.media_type not in MEDIA_TYPES:
        return f"an image is of type {image.media_type!r}; expected one of {', '.join(MEDIA_TYPES)}"
    data = cast(object, image.data)
    if not isinstance(cast(object, image.detail), str):
        return f"the detail of an image must be text, such as 'low', got {_shown(image.detail)}"
    if not isinstance(data, str):
        return f"the data of an image must be base64 text, got {_shown(data)}; {_FROM_OTHERS}"
    # Decoding all of it takes three times as long, and messages are checked in every turn.
    rest = data.encode(errors="replace").translate(None, _BASE64).decode()
    if rest not in ("", "=", "==") or not data.endswith(rest) or len(data) % 4:
        what = f"with {rest[:20]!r} among its characters" if rest.strip("=") else "which ends wrong"
        return f"the data of an image is not base64: {data[:20]!r} and so on, {what}"
    head = base64.b64decode(image.data[:64])
    if _kind_of(head) != image.media_type:
        return f"an image of type {image.media_type!r} begins with {head[:8]!r}"
    return None


def _shown(value: object) -> str:
    return f"{value!r:.80} ({type(value).__name__})"


def _kind_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for begin, kind in _BEGINNINGS.items() if data.startswith(begin)), None)
