"""Serve environments, a model or rewards to other processes and machines: sensorium serve env | model | reward."""

PARTS = {
    "env": "serve_env",
    "model": "serve_model",
    "reward": "serve_reward",
}
"""What can be served, and the module of this package that does."""
