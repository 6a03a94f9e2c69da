"""A small MCP server for the tests: `python mcp_server.py` on stdio, or with a port on HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer

server = MCPServer("small", log_level="WARNING")
notes: list[str] = []


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def note(text: str) -> str:
    """Keep a note; returns all notes."""
    notes.append(text)
    return " ".join(notes)


@server.tool()
def who() -> dict[str, str]:
    """Say which process this is, and what it sees of the environment."""
    return {"pid": str(os.getpid()), "secret": os.environ.get("SECRET", ""), "given": given()}


@server.tool()
def authorization(context: Context) -> str:
    """Return the header of the request."""
    return (context.headers or {}).get("authorization", "")


@server.tool()
async def hang() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


def given() -> str:
    return os.environ.get("GIVEN", "")


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
