"""Serve environments, a model or rewards to other processes and machines: sensorium serve env | model | reward."""

from argparse import ArgumentParser

PARTS = {
    "env": "serve_env",
    "model": "serve_model",
    "reward": "serve_reward",
}
"""What can be served, and the module of this package that does."""


def add_host_options(parser: ArgumentParser) -> None:
    """Where a service listens, and the names under which clients reach it."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond this machine a key is needed")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that clients use, such as a proxy's",
    )
