"""Run where one cloud's SDK is installed: its provider against its fake, told as JSON."""

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Any

from fakes import Fake, FakeDaytona, FakeE2B, FakePrime, serving

from telescope_core.errors import TelescopeError
from telescope_core.sandboxes import SandboxSpec, open_provider
from telescope_core.sandboxes.check import check_provider

KEYS = (
    *("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN", "E2B_API_KEY", "PRIME_API_KEY"),
    *("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"),
)
FAKES = {"daytona": FakeDaytona, "e2b": FakeE2B, "prime": FakePrime}


def served(cloud: str) -> AbstractAsyncContextManager[Fake]:
    """Serve the fake of a cloud."""
    if cloud == "modal":
        modal = import_module("fake_modal")
        return modal.serving_modal(modal.FakeModal())
    return serving(FAKES[cloud]())


def opened(cloud: str, fake: Fake) -> Any:
    """Return the provider, with the fake as its service."""
    if cloud == "daytona":
        return open_provider("daytona", api_key="k", api_url=f"{fake.url}/api", target="eu")
    if cloud == "modal":
        os.environ |= {"MODAL_SERVER_URL": fake.url}
        os.environ |= {"MODAL_TOKEN_ID": "ak-1", "MODAL_TOKEN_SECRET": "as-1"}
        return open_provider("modal")
    if cloud == "prime":
        os.environ["PRIME_API_BASE_URL"] = fake.url
        return open_provider("prime", api_key="k")
    os.environ |= {"E2B_API_URL": fake.url, "E2B_SANDBOX_URL": fake.url}
    return open_provider("e2b", api_key="e2b_" + "0" * 40)


async def raised(awaitable: Awaitable[object]) -> str:
    """Return the class and text of what an awaitable raises."""
    try:
        return f"nothing: {await awaitable}"
    except TelescopeError as error:
        return f"{type(error).__name__}: {error}"


async def main(cloud: str) -> dict[str, Any]:
    """Return what came of the checks and of each failure."""
    for name in KEYS:
        os.environ.pop(name, None)
    without = open_provider(cloud)
    no_key = await raised(without.create(SandboxSpec()))
    await without.close()
    async with served(cloud) as fake:
        provider = opened(cloud, fake)
        findings = await check_provider(provider)
        results: dict[str, Any] = {
            "checks": {one.check: dataclasses.asdict(one) for one in findings},
            "left": list(fake.boxes),
            "created": fake.created[0],
            "no key": no_key,
        }
        box = await provider.create(SandboxSpec())
        for status in (500, 400):
            fake.fails_with = status
            results[f"{status} run"] = await raised(box.run(["true"]))
            results[f"{status} create"] = await raised(provider.create(SandboxSpec()))
        fake.fails_with = 0
        await box.close()
        fake.may_start.clear()
        fake.was_asked.clear()
        creating = asyncio.create_task(provider.create(SandboxSpec()))
        async with asyncio.timeout(60):
            await fake.was_asked.wait()
        creating.cancel()
        fake.may_start.set()
        with contextlib.suppress(asyncio.CancelledError):
            await creating
        results["left by a cancelled start"] = list(fake.boxes)
        box = await provider.create(SandboxSpec())
        fake.fails_with = 500
        results["500 close"] = await raised(box.close())
        results["open after 500 close"] = len(fake.boxes)
        fake.fails_with = 0
        fake.refuses_key = True
        results["refused key"] = await raised(provider.create(SandboxSpec()))
        fake.refuses_key = False
        await provider.close()
        results["left at the end"] = list(fake.boxes)
        return results


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
