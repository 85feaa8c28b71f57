"""Serve environments to other processes and machines: sensorium serve env [NAME | NAME=module:Class | NAME=FILE.yaml …]."""

from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sensorium.cluster.python_process import temporary_folder
from sensorium.vocabulary.errors import RecipeError

DRAIN_MARGIN_S = 5.0
USAGE = "sensorium serve env [NAME | NAME=module:Class | NAME=FILE.yaml …] [--rows NAME=FILE] …"


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "environments",
        nargs="*",
        help="environments to offer: a registered name, NAME=module:Class, or NAME=FILE.yaml that holds {environment: …, "
        "options: {…}}; by default all that play from seeds and run no foreign code",
    )
    parser.add_argument(
        "--rows",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="offer the rows of a source, which FILE describes in YAML as a recipe does: {source: parquet, options: {…}}",
    )
    parser.add_argument("--port", type=int, default=8300)
    parser.add_argument("--capacity", type=int, default=1024, help="sessions that may be open at once")
    parser.add_argument("--lease-s", type=float, default=3600.0, help="a session that nobody asks for so long is closed")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="what an environment may take for a call")
    parser.add_argument("--isolate", action="store_true", help="run each environment in a process of its own, with limits")
    parser.add_argument(
        "--pool",
        type=int,
        default=0,
        help="keep so many instances, each in a process of its own, for later sessions; no more are open at once",
    )
    parser.add_argument("--memory-mib", type=int, default=4096, help="address space of an isolated environment")


def run(arguments: Namespace) -> int:
    try:
        from sensorium.services.application import listen, serve_until_stopped
        from sensorium.services.environment_service import make_app
    except ImportError as error:
        raise RecipeError(f"serve needs FastAPI and uvicorn: pip install 'sensorium[serve]' ({error}).") from error
    from sensorium.data.media_store import MediaStore
    from sensorium.envs.protocol import within
    from sensorium.envs.remote.instances import InstancePool
    from sensorium.envs.remote.wire import MOST_BYTES
    from sensorium.services.sessions import Offers, SessionTable, environment_offer, rows_offer, usual_offers

    named = dict(environment_offer(given) for given in arguments.environments)
    rows = dict(rows_offer(given) for given in arguments.rows)
    offers = Offers({**named, **rows} or usual_offers())
    within("serve", "--capacity", arguments.capacity, 1, 10**6)
    within("serve", "--lease-s", arguments.lease_s, 1.0, 10**8)
    within("serve", "--deadline-s", arguments.deadline_s, 0.001, 86_400)
    within("serve", "--memory-mib", arguments.memory_mib, 256, 2**20)
    within("serve", "--pool", arguments.pool, 0, 4096)
    if arguments.pool and arguments.isolate:
        raise RecipeError("serve: --pool has a process for each instance, so leave --isolate out.")
    listening, key = listen(arguments.host, arguments.port)
    hosts = [arguments.host, *arguments.allowed_host]
    folder = TemporaryDirectory(prefix="media-", dir=temporary_folder())
    store = MediaStore(Path(folder.name))

    def isolated(name: str, options: dict[str, Any]) -> Any:
        return offers.isolated(name, options, store, arguments.memory_mib, arguments.deadline_s)

    made = isolated if arguments.isolate else None
    pool = InstancePool(arguments.pool, arguments.deadline_s) if arguments.pool else None
    capacity = min(arguments.capacity, arguments.pool or arguments.capacity)
    deadline_s = arguments.deadline_s + 5 * arguments.isolate
    table = SessionTable(offers, store, capacity, arguments.lease_s, deadline_s, made, pool)
    with folder:
        names = ", ".join(sorted(offers.offers))
        drain_s = table.deadline_s + DRAIN_MARGIN_S  # or a client that sends half a body would keep it from ever ending
        serve_until_stopped(make_app(table, key, hosts), listening, names, key, drain_s, ws_max_size=MOST_BYTES)
    return 0
