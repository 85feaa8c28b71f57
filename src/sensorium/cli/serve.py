"""Serve environments, a model or rewards to other processes and machines: sensorium serve env | model | reward."""

from argparse import ArgumentParser

# what can be served, and the module that does
PARTS = {
    "env": "sensorium.cli.serve_env",
    "model": "sensorium.cli.serve_model",
    "reward": "sensorium.systems.caprl.serve_reward",
}


def configure(parser: ArgumentParser) -> None:
    """The arguments of every service: where it listens, and the names under which clients reach it."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; beyond this machine a key is needed")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name that clients use, such as a proxy's",
    )
