"""`ProgramEnvironment`: a sandbox with the limits of the settings, made when it is needed."""

import pytest

from telescope_core import Example, reward
from telescope_core.errors import UnknownNameError
from telescope_core.sandboxes import ProgramConfig, ProgramEnvironment, SandboxSpec, programs
from telescope_core.sandboxes.local.provider import LocalProvider


class Prints(ProgramEnvironment):
    """Print 7."""

    data = (Example(id="1", prompt="Print 7."),)

    @reward
    async def right(self, completion):
        async with self.sandbox() as box:
            done = await box.run(["python3", "-c", completion])
        return float(done.text == "7\n")


@pytest.fixture
def asked(monkeypatch) -> list[SandboxSpec]:
    """The specs of all sandboxes that are made, and the providers that are opened."""
    specs: list[SandboxSpec] = []

    class Noted(LocalProvider):
        async def create(self, spec: SandboxSpec):
            specs.append(spec)
            return await super().create(spec)

    monkeypatch.setattr(programs, "open_provider", lambda name: Noted())
    return specs


@pytest.mark.parametrize(("memory_mb", "limit"), [(128, 128), (0, None)])
async def test_sandboxes_have_the_limits_of_the_settings(asked, memory_mb, limit):
    environment = Prints(ProgramConfig(memory_mb=memory_mb))
    assert asked == []
    async with environment.sandbox() as first, environment.sandbox() as second:
        assert first.id != second.id
        assert (await first.run(["echo", "7"])).text == "7\n"
    assert [spec.memory_mb for spec in asked] == [limit, limit]
    await environment.close()
    assert not first.is_alive


def test_a_misspelt_provider_is_refused_when_the_environment_is_built():
    with pytest.raises(UnknownNameError, match=r"'lokal'.*'local'"):
        Prints.from_settings({"sandbox": "lokal"})
