"""A small MCP server for tests, with the official package: over stdio, or with a port over streamable HTTP."""

import base64
import io
import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.types import ImageContent, TextContent, ToolAnnotations
from PIL import Image

server = MCPServer("tests")


@server.tool(description="Adds two numbers.")
def add(a: int, b: int) -> int:
    return a + b


@server.tool(description="Draws a square.")
def draw(side: int) -> list[TextContent | ImageContent]:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), "red").save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return [TextContent(type="text", text="a square"), ImageContent(type="image", data=data, mime_type="image/png")]


@server.tool(description="Fails.")
def fail() -> str:
    raise ValueError("on purpose")


@server.tool(description="Takes its time.")
def wait(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


@server.tool(description="Ends the server.", annotations=ToolAnnotations(readOnlyHint=False, destructiveHint=True))
def die() -> str:
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
