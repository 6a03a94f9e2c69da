"""Pictures in messages: taken from files and bytes, and written as parts of the chat API."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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
MEDIA_TYPES = (*dict.fromkeys(_BEGINNINGS.values()), "image/webp")
"""Kinds of pictures that chat endpoints take."""


def read_image(path: str | Path) -> Image:
    """Return the picture in a file: PNG, JPEG, GIF or WebP.

    Raises EnvironmentLoadError if it is another kind of file, or larger than 20 MiB.
    """
    place = Path(path).expanduser()
    try:
        data = place.read_bytes()
    except OSError as error:
        raise EnvironmentLoadError(
            f"the picture {place} cannot be read: {error.strerror or error}"
        ) from None
    return image_of(data, name=str(place))


def image_of(data: bytes, *, name: str = "the picture") -> Image:
    """Return the picture whose file has the bytes `data`; `name` is what errors call it."""
    if not data or len(data) > MAX_IMAGE_BYTES:
        raise EnvironmentLoadError(
            f"{name} has {len(data):,} bytes; expected a picture of at most "
            f"{MAX_IMAGE_BYTES >> 20} MiB"
        )
    kind = _kind_of(data)
    if kind is None:
        raise EnvironmentLoadError(
            f"{name} begins with {data[:8]!r}, which is none of {', '.join(MEDIA_TYPES)}; convert "
            "it to PNG"
        )
    return Image(media_type=kind, data=base64.b64encode(data).decode())


def message_of(role: Role, *parts: str | Image) -> Message:
    """Return a message of texts and pictures in the order in which the model gets them."""
    text, images = "", list[Image]()
    for part in parts:
        if isinstance(part, Image):
            images.append(replace(part, at=len(text)))
        else:
            text += part
    return Message(role=role, content=text, images=tuple(images))


def parts_of(message: Message) -> list[dict[str, Any]]:
    """Return the content of `message` as parts of the chat API, pictures as data URLs."""
    parts: list[dict[str, Any]] = []
    begin = 0
    for image in message.images:
        if text := message.content[begin : image.at]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image_url", "image_url": {"url": url_of(image)}})
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
    match part:
        case {"type": "image_url", "image_url": {"url": str(url)} | str(url)}:
            head, comma, data = url.partition(",")
            kind = head.removeprefix("data:").removesuffix(";base64")
            if comma and head == f"data:{kind};base64" and kind in MEDIA_TYPES:
                return Image(media_type=kind, data=data)
        case _:
            pass
    return None


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
                at = cast(Mapping[str, object], one).get("at", 0)
                found.append(Image(media_type=kind, data=data, at=int(cast(int, at))))
            case _:
                raise ValueError(f"an image must have media_type and data, got {one!r:.80}")
    return tuple(found)


def _why_no_picture(image: Image) -> str | None:
    if image.media_type not in MEDIA_TYPES:
        return f"an image is of type {image.media_type!r}; expected one of {', '.join(MEDIA_TYPES)}"
    try:
        head = base64.b64decode(image.data[:64], validate=True)
    except (binascii.Error, ValueError):
        return f"the data of an image is not base64: {image.data[:20]!r}"
    if _kind_of(head) != image.media_type:
        return f"an image of type {image.media_type!r} begins with {head[:8]!r}"
    return None


def _kind_of(data: bytes) -> str | None:
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for begin, kind in _BEGINNINGS.items() if data.startswith(begin)), None)
