"""Services over HTTP and WebSocket: the environment service."""
