"""Serve a checkpoint to any OpenAI-compatible client: sensorium serve model CHECKPOINT."""

import os
import signal
import sys
import threading
from argparse import ArgumentParser, Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from sensorium.cluster.python_process import temporary_folder
from sensorium.vocabulary.errors import RecipeError

USAGE = "sensorium serve model CHECKPOINT [--name N] [--host H] [--port P] [--capacity N] [--media-root FOLDER …] …"


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", help="a folder, a run (its best checkpoint), a hub id, package:NAME or tiny:FAMILY")
    add("--name", default="", help="what clients call it; default: the checkpoint's name")
    add("--port", type=int, default=8000, help="0: any free one")
    add("--capacity", type=int, default=256, help="answers that may be under way at once; others get a 503")
    add("--rows", type=int, default=64, help="answers that are written at once, in one batch")
    add("--max-context", type=int, default=8192, help="tokens of a prompt and its answer")
    add("--media-root", action="append", default=[], help="folder from which file:// media may be read")
    add("--max-body-mib", type=float, default=64.0, help="size of a request")
    add("--device", default="auto")
    add("--dtype", default="float32", choices=["float32", "bfloat16"])
    add("--unused-weights", action="append", default=[], metavar="PREFIX", help="weights that the model has no place for")
    add("--threads", type=int, default=0, help="CPU threads of torch; 0: as torch has it")
    add("--drain-s", type=float, default=60.0, help="how long answers under way may take after a stop")
    add(
        "--until-input-ends", action="store_true", help="stop when standard input ends, as it does when who started it dies"
    )


def run(arguments: Namespace) -> int:
    try:
        from sensorium.services.application import MIB, listen, serve_until_stopped
    except ImportError as error:
        raise RecipeError(f"serve needs FastAPI and uvicorn: pip install 'sensorium[serve]' ({error}).") from error
    from sensorium.envs.protocol import within

    within("serve model", "--capacity", arguments.capacity, 1, 10**6)
    within("serve model", "--rows", arguments.rows, 1, 10**5)
    within("serve model", "--max-context", arguments.max_context, 16, 2**24)
    within("serve model", "--max-body-mib", arguments.max_body_mib, 0.001, 4096)
    within("serve model", "--drain-s", arguments.drain_s, 0, 86_400)
    listening, key = listen(arguments.host, arguments.port)
    hosts = [arguments.host, *arguments.allowed_host]

    import torch  # after the port is ours: these imports take seconds

    from sensorium.data.media_files import MediaLimits
    from sensorium.data.media_store import MediaStore
    from sensorium.models.load import load_policy
    from sensorium.runs.checkpoint_layout import checkpoint_of_run
    from sensorium.services.model_service import ModelHost, ModelService, make_model_app

    if arguments.until_input_ends:
        threading.Thread(target=_stop_when_input_ends, daemon=True).start()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    place = Path(arguments.checkpoint)
    of_run = place.is_dir() and not (place / "config.json").exists()
    path = str(checkpoint_of_run(place)) if of_run else arguments.checkpoint
    with TemporaryDirectory(prefix="media-", dir=temporary_folder()) as folder:
        limits = MediaLimits(file_mib=arguments.max_body_mib, clip_s=1200, clip_mib=1024)
        store = MediaStore(Path(folder), limits=limits)
        policy = load_policy(
            path,
            store=store,
            device=arguments.device,
            dtype=arguments.dtype,
            unused_weights=tuple(arguments.unused_weights),
        )
        name = arguments.name or arguments.checkpoint.rstrip("/")
        roots = tuple(Path(root).expanduser().resolve() for root in arguments.media_root)
        host = ModelHost(policy, arguments.max_context, arguments.rows)
        service = ModelService(host, store, name, arguments.capacity, roots)
        app = make_model_app(service, key, round(arguments.max_body_mib * MIB), hosts)
        serve_until_stopped(app, listening, f"model '{name}'", key, arguments.drain_s)
    return 0


def _stop_when_input_ends() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
