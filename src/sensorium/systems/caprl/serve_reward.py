"""Serve rewards for captions: sensorium serve reward CHECKPOINT, or sensorium serve reward --reader URL --model NAME."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar

from sensorium.cluster.python_process import temporary_folder
from sensorium.vocabulary.errors import RecipeError

if TYPE_CHECKING:
    from sensorium.services.model_workers import ModelWorkers

USAGE = "sensorium serve reward [CHECKPOINT] [--workers N] [--reader URL …] [--mode qa|vl_judge] [--host H] [--port P] …"
Value = TypeVar("Value", int, float, str)
WORKER_GAP = 10
MODES, TASKS = ("qa", "vl_judge"), ("video", "image")
# Variables of CapRL's scripts that are ignored: the value that holds here anyway, and the reason.
UNUSED = {
    "FORMAT_MIN_BRACKETS": ("", "timestamps are rewarded as in CapRL's README, which requires no number of them"),
    "FORMAT_MAX_MINUTE": ("599", "a timestamp may have any minute up to 599"),
    "VERL_ROOT": ("", "verl does not run here"),
    "CONDA_ENV": ("", "activate the environment of sensorium yourself"),
    "REWARD_SHUFFLE_QA": ("1", "options are shuffled in every draw"),
    "REWARD_TP": ("1", "a worker has one device; serve a larger model by another server and name it with --reader"),
    "JUDGE_MAX_MODEL_LEN": ("", "a model's context is what its config says"),
    "ZERO_REWARD_LOG_PATH": ("", "questions and answers come with the results, as transcripts"),
}


def configure(parser: ArgumentParser) -> None:
    """Add the arguments. Variables that CapRL's scripts set are their defaults."""
    model = os.environ.get("REWARD_MODEL", "")
    parser.add_argument("checkpoint", nargs="?", default=model, help="the model of the workers; default: REWARD_MODEL")
    parser.add_argument(
        "--reader",
        action="append",
        default=[],
        help="URL of an OpenAI-compatible server (with its /v1), in place of workers",
    )
    parser.add_argument("--model", default="", help="the model's name at the readers")
    parser.add_argument("--reader-key-env", default="", help="environment variable that holds the readers' key")
    parser.add_argument(
        "--workers", type=int, default=_set("REWARD_NUM_WORKERS", 1, int), help="processes with a model each"
    )
    parser.add_argument(
        "--devices", default="", help="GPUs of the workers, as in 0,1,2,3; default: CUDA_VISIBLE_DEVICES, or all there are"
    )
    parser.add_argument("--worker-option", action="append", default=[], help="further arguments of sensorium serve model")
    parser.add_argument("--mode", default=_set("REWARD_SCORE_MODE", "qa", str), choices=MODES)
    parser.add_argument("--task", default=_set("REWARD_TASK", "video", str), choices=TASKS)
    parser.add_argument(
        "--qa-num", type=int, default=_set("REWARD_QA_NUM", 8, int), help="questions drawn for a caption; 0: each once"
    )
    parser.add_argument("--all-qa", action="store_true", help="ask each question once")
    parser.add_argument(
        "--format-weight", type=float, default=_set("FORMAT_REWARD_WEIGHT", 0.2, float), help="of timestamps, for videos"
    )
    parser.add_argument("--prompt", default="plain", choices=["plain", "short"], help="how readers are asked")
    parser.add_argument("--temperature", type=float, default=0.6, help="of the readers")
    parser.add_argument("--seed", type=int, default=0, help="of draws and readers")
    parser.add_argument(
        "--longest", type=int, default=20_000, help="characters of a caption that are read: of a longer one head and tail"
    )
    parser.add_argument(
        "--missing-as",
        type=float,
        default=None,
        help="number that CapRL's and OpenRLHF's clients get for what was not judged; default: the request fails",
    )
    parser.add_argument("--port", type=int, default=_set("REWARD_PORT", 18889, int), help="0: any free one")
    parser.add_argument(
        "--worker-port",
        type=int,
        default=_set("REWARD_WORKER_BASE", -1, int),
        help="of the first worker; 0: any free ones; default: the port and 10",
    )
    parser.add_argument(
        "--capacity", type=int, default=4096, help="captions that may be under way at once; others get a 503"
    )
    parser.add_argument("--calls", type=int, default=256, help="questions that are asked of readers at once")
    parser.add_argument(
        "--media-root", action="append", default=[], help="folder from which videos and pictures may be read"
    )
    parser.add_argument("--max-body-mib", type=float, default=64.0, help="size of a request")
    parser.add_argument("--cache", default="", help="SQLite file of judgements, kept for the next time; default: none")
    parser.add_argument("--drain-s", type=float, default=600.0, help="how long requests under way may take after a stop")


def run(arguments: Namespace) -> int:
    try:
        from sensorium.services.application import MIB, listen, serve_until_stopped
        from sensorium.systems.caprl.service import RewardService, RewardSettings, make_reward_app
    except ImportError as error:
        raise RecipeError(f"serve needs FastAPI and uvicorn: pip install 'sensorium[serve]' ({error}).") from error
    from sensorium.data.media_store import MediaStore
    from sensorium.envs.protocol import within
    from sensorium.rewards.judges.client import JudgeClient
    from sensorium.systems.caprl.terms import Reading

    for notice in unused_variables(os.environ):
        print(notice, file=sys.stderr, flush=True)
    for option, variable, there in (("mode", "REWARD_SCORE_MODE", MODES), ("task", "REWARD_TASK", TASKS)):
        if (value := getattr(arguments, option)) not in there:  # argparse does not check defaults
            raise RecipeError(f"{variable} is '{value:.40}'; there are {' and '.join(there)}.")
    if bool(arguments.checkpoint) == bool(arguments.reader):
        raise RecipeError("serve reward needs a CHECKPOINT (or REWARD_MODEL), or --reader URL, and not both.")
    for name, least, most in (
        ("workers", 1, 1024),
        ("capacity", 1, 10**6),
        ("calls", 1, 1024),
        ("qa_num", 0, 4096),
        ("longest", 1, 10**7),
        ("format_weight", -1e6, 1e6),
        ("temperature", 0, 100),
        ("worker_port", -1, 65535),
    ):
        within("serve reward", f"--{name.replace('_', '-')}", getattr(arguments, name), least, most)
    listening, key = listen(arguments.host, arguments.port)
    hosts = [arguments.host, *arguments.allowed_host]
    port = listening.getsockname()[1]
    workers, key_env, served = None, arguments.reader_key_env, arguments.model or "reader"
    urls = list(arguments.reader)
    if arguments.checkpoint:
        workers, key_env = workers_of(arguments, port)
        urls, served = [f"{worker.url}/v1" for worker in workers.workers], "reader"
    if arguments.mode == "vl_judge" and not arguments.media_root:
        print("vl_judge without --media-root: a video_path is refused, media are sent as data URLs.", file=sys.stderr)
    draws = 0 if arguments.all_qa else arguments.qa_num
    settings = RewardSettings(
        Reading("reader", draws, arguments.prompt, arguments.temperature, seed=arguments.seed, longest=arguments.longest),
        arguments.mode,
        arguments.format_weight if arguments.task == "video" else 0.0,
        arguments.missing_as,
        arguments.capacity,
        tuple(Path(root).expanduser().resolve() for root in arguments.media_root),
    )
    with TemporaryDirectory(prefix="media-", dir=temporary_folder()) as folder:
        store = MediaStore(Path(folder) / "media")
        cache = Path(arguments.cache).expanduser() if arguments.cache else Path(folder) / "judgements.sqlite"
        client = JudgeClient(judges_section(urls, served, key_env, cache, arguments.calls), store)
        client.refuse_without_keys("reader")
        service = RewardService(settings, client, store)
        if workers is not None:
            service.workers = workers.states
        around: Callable[[], Any] | None = workers.running if workers is not None else None
        app = make_reward_app(service, key, round(arguments.max_body_mib * MIB), around, hosts)
        what = f"rewards ({arguments.mode}) by {len(urls)} reader{'s' if len(urls) > 1 else ''}"
        serve_until_stopped(app, listening, what, key, arguments.drain_s)
    return 0


def workers_of(arguments: Namespace, port: int) -> "tuple[ModelWorkers, str]":
    """The workers, spread over GPUs (a printed line says how), and the variable that holds their key.

    With a --device among their own options they see the same GPUs as this process.
    """
    from sensorium.services.application import refuse_port
    from sensorium.services.model_workers import model_workers, placement_notice, worker_devices

    count, options = arguments.workers, arguments.worker_option
    first = port + WORKER_GAP if arguments.worker_port < 0 else arguments.worker_port
    refuse_port(first + count - 1 if first else 0, "--worker-port (of the last worker)")
    devices = []
    if arguments.devices or not any(option.split("=")[0] == "--device" for option in options):
        devices = worker_devices(count, arguments.devices, os.environ, _gpus)
    listed = bool(arguments.devices or os.environ.get("CUDA_VISIBLE_DEVICES"))
    if notice := placement_notice(count, devices, listed):
        print(notice, file=sys.stderr, flush=True)
    return model_workers(arguments.checkpoint, count, first, options, devices)


def _gpus() -> int:
    from sensorium.assembly.workers import gpu_count

    return gpu_count()


def unused_variables(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable of CapRL's scripts that changes nothing here."""
    given = {name: environment.get(name, "").strip() for name in UNUSED}
    return [
        f"{name}={given[name]} changes nothing: {why}."
        for name, (kept, why) in UNUSED.items()
        if given[name] not in ("", kept)
    ]


def judges_section(urls: list[str], served: str, key_env: str, cache: Path | None, calls: int) -> Any:
    """The readers as a recipe's section ``judges``."""
    from pydantic import ValidationError

    from sensorium.recipe.schema import JudgeEndpointSection, JudgesSection

    try:
        endpoints = tuple(JudgeEndpointSection(base_url=url, model=served, api_key_env=key_env) for url in urls)
    except ValidationError as error:
        raise RecipeError(f"--reader: {error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None
    return JudgesSection(endpoints={"reader": endpoints}, cache=cache, concurrency=calls, retries=12, total_deadline_s=600)


def _set(name: str, default: Value, kind: Callable[[str], Value]) -> Value:
    """The value of an environment variable, or the default."""
    given = os.environ.get(name, "")
    try:
        return kind(given) if given else default
    except ValueError as error:
        raise RecipeError(f"the environment variable {name} is '{given:.40}', which is no {kind.__name__}.") from error
