"""Serve environments or a model to other processes and machines: sensorium serve env | model."""

PARTS = {
    "env": "serve_env",
    "model": "serve_model",
}
"""What can be served, and the module of this package that does."""
