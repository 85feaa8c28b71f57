"""A worker of a run that plays environments: the environment service on a free port, for the run's driver alone.

``python -m sensorium.services.environment_worker FD``; ``cluster/placed_workers.py`` has the rest.
"""

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import own_address
from sensorium.cluster.placed_workers import Answer, serve
from sensorium.data.media_store import MediaStore
from sensorium.envs.remote.wire import MOST_BYTES
from sensorium.recipe.registry import wrong_options
from sensorium.services.environment_service import make_app
from sensorium.services.sessions import Offers, SessionTable
from sensorium.vocabulary.errors import RecipeError

CAPACITY = 65536
LEASE_S = 86_400.0
LOOPBACK = "127.0.0.1"


class OwnOffers(Offers):
    """Whatever the run's recipe names, with any options: the driver is trusted, and has the key."""

    def __init__(self) -> None:
        self.offers = {}

    def chosen(self, name: Any, options: Any) -> tuple[str, dict[str, Any]]:
        """The environment and its options."""
        _, problem = wrong_options("environment", name, options)
        if problem:
            raise RecipeError(problem)
        return name, dict(options)


def open_work(settings: Mapping[str, Any], folder: Path) -> tuple[str, Answer]:
    """Serve; returns the address. ``toward`` is an address of the driver; empty: it is on this machine."""
    import uvicorn

    host = own_address(settings["toward"]) if settings["toward"] else LOOPBACK
    listening = socket.create_server((host, 0), backlog=1024)
    table = SessionTable(OwnOffers(), MediaStore(folder), CAPACITY, LEASE_S, settings["deadline_s"])
    config = uvicorn.Config(make_app(table, settings["key"]), log_level="warning", ws_max_size=MOST_BYTES)
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, args=([listening],), name="service", daemon=True).start()
    return f"http://{host}:{listening.getsockname()[1]}", lambda question: table.counts()


if __name__ == "__main__":
    serve(open_work)
