"""The process that asks: conversations over HTTP, all at once. Light, because it starts often."""

import asyncio
import json
import statistics
import sys
import time

import aiohttp

TURNS = 4
MAX_TOKENS = 32


async def converse(
    session: aiohttp.ClientSession, place: dict[str, str], number: int
) -> list[float]:
    """Hold one conversation of `TURNS` turns; return the seconds of each."""
    messages = [{"role": "user", "content": f"{number}+{number}="}]
    seconds = []
    for _ in range(TURNS):
        body = {
            "model": "policy",
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 1.0,
            **json.loads(place["more"]),
        }
        started_s = time.perf_counter()
        async with session.post(
            f"{place['url']}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {place['key']}"},
        ) as reply:
            answer = await reply.json()
        assert reply.status == 200, answer
        seconds.append(time.perf_counter() - started_s)
        said = answer["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    return seconds


async def load(places: list[dict[str, str]]) -> dict[str, float]:
    """Hold one conversation at each place, all at once."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        started_s = time.perf_counter()
        seconds = await asyncio.gather(
            *(converse(session, place, number) for number, place in enumerate(places))
        )
        whole_s = time.perf_counter() - started_s
    flat = [one for part in seconds for one in part]
    return {"requests_per_s": len(flat) / whole_s, "p50_ms": 1e3 * statistics.median(flat)}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(json.load(sys.stdin)))))
