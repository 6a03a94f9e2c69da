"""Pictures in messages: taken from files and bytes, and written as parts of the chat API."""

from telescope_core.base.images import (
    MAX_IMAGE_BYTES,
    MEDIA_TYPES,
    image_of,
    message_of,
    parts_of,
    read_image,
    url_of,
    with_marks,
)

__all__ = [
    "MAX_IMAGE_BYTES",
    "MEDIA_TYPES",
    "image_of",
    "message_of",
    "parts_of",
    "read_image",
    "url_of",
    "with_marks",
]
