"""What a container without Python cannot have, and output in the frames of Docker."""

import pytest

from telescope_core.sandboxes.docker import _require_python
from telescope_core.sandboxes.docker_endpoint import _Frames
from telescope_core.sandboxes.protocol import SandboxLimitError
from telescope_core.sandboxes.remote import ShellAnswer


class Bare:
    """A container whose image has a shell alone."""

    def __init__(self) -> None:
        self.is_deleted = False

    async def shell(self, command, timeout_s):
        return ShellAnswer(exit_code=127, output="sh: python3: not found")

    async def delete(self):
        self.is_deleted = True


async def test_an_image_without_python_is_refused_by_name_and_its_container_removed():
    container = Bare()
    with pytest.raises(SandboxLimitError, match=r"network=endpoint with the image 'busybox'"):
        await _require_python(container, "busybox")
    assert container.is_deleted


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_frames_are_read_whatever_pieces_they_come_in(size):
    pieces = [(1, b"out"), (2, b""), (2, b"error"), (1, b"x" * 50)]
    data = b"".join(bytes([kind, 0, 0, 0]) + len(p).to_bytes(4, "big") + p for kind, p in pieces)
    frames, found = _Frames(), []
    for at in range(0, len(data), size):
        found += frames.of(data[at : at + size])
    assert found == pieces
