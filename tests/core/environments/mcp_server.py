"""A small MCP server for the tests: `python mcp_server.py` on stdio, or with a port on HTTP."""

import asyncio
import os
import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import (
    BlobResourceContents,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    TextContent,
)

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


@server.tool(structured_output=False)
def scan() -> list[ContentBlock]:
    """Return what a text model cannot see."""
    paper = BlobResourceContents(uri="scan:a", mime_type="application/pdf", blob="")
    odd = BlobResourceContents(uri="scan:b", blob="")
    picture = ImageContent(type="image", data="", mime_type="image/png")
    return [EmbeddedResource(resource=paper), EmbeddedResource(resource=odd), picture]


@server.tool(structured_output=False)
def look(picture: str) -> list[ContentBlock]:
    """Return a picture between texts, and one that is none."""
    images = [ImageContent(type="image", data=one, mime_type="image/png") for one in (picture, "")]
    texts = [TextContent(type="text", text=one) for one in ("before", "after")]
    return [texts[0], images[0], texts[1], images[1]]


@server.tool()
async def hang() -> str:
    """Never return."""
    await asyncio.Event().wait()
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    print("last words", file=sys.stderr, flush=True)
    os._exit(3)


def given() -> str:
    return os.environ.get("GIVEN", "")


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run("stdio")
