"""Services over HTTP and WebSocket: environments, a model, rewards."""
