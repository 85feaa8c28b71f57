"""The engine ``vllm``: this side of it. Requests are laid out and checked here, and sampled by vLLM in other processes."""

import asyncio
import json
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensorium.cluster.python_process import ProcessHost, ThisMachine
from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.options import LORA_RANKS, check_vllm_options
from sensorium.engines.protocol import Capabilities, FinishReason, LiveEpisodes, Request, Response, Sampling, WeightSource
from sensorium.engines.vllm.actor_process import ActorProcess, environment, write_startup
from sensorium.engines.vllm.prompts import EnginePrompt, RequestSender, check_prompt, lay_out
from sensorium.engines.vllm.recipe_checks import (
    TOWER_GROUPS,
    VllmVersion,
    installed_version,
    refuse_adapters,
    refuse_dtype,
    refuse_family,
)
from sensorium.engines.vllm.weight_backend import BROADCAST, FILE, SHARED
from sensorium.engines.vllm.weights import ChangedWeights, published, pushed_by
from sensorium.engines.weight_group import WeightSender
from sensorium.models.attention import MaskedAttention
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_expansion import Layouts
from sensorium.models.segment_layout import Layout, placements
from sensorium.recipe.plan import VLLM_SHARE
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import MediaSpan, Segment, VersionSpan
from sensorium.vocabulary.errors import EngineError, EngineLost


@dataclass(frozen=True)
class EngineSettings:
    """Options that go to vLLM.

    ``max_rows`` responses are written at once. ``max_context`` is the longest thread, response included (default: what the
    model allows). ``cache_gib`` is for keys and values on a CPU, ``gpu_share`` the part of a GPU's memory that vLLM may
    take, the weights included. ``eager`` runs without compiled graphs (default: on a CPU). ``push`` is how weights get
    there: ``file``, ``broadcast``, or ``ipc`` where engine and learner share a GPU; ``own_device`` says that they do not.
    ``engine_args`` go to vLLM as they are.
    """

    max_rows: int
    max_context: int | None
    cache_gib: int
    gpu_share: float
    eager: bool | None
    tensor_parallel: int
    push: str
    engine_args: dict[str, Any]
    own_device: bool = False

    def backend(self, device: str) -> str:
        """How weights get there, by vLLM's name of it, from a policy on a device of this type."""
        named = {"file": FILE, "broadcast": BROADCAST, "ipc": SHARED}
        if self.push != "auto":
            return named[self.push]
        if device == "cpu":
            return FILE
        if self.own_device:
            return BROADCAST
        return SHARED if self.tensor_parallel == 1 else FILE  # of several GPUs one is the learner's too


@dataclass(frozen=True)
class EngineArguments:
    """What vLLM is started with, and the backend that weights are pushed by."""

    engine_args: dict[str, Any]
    backend: str
    on_cpu: bool


def describe(policy: Policy, folder: Path) -> None:
    """All of a checkpoint but its weights, as vLLM reads it."""
    policy.save_description(folder)
    if policy.experts_per_token:  # transformers leaves out what it always does, and vLLM asks for it
        path = folder / "config.json"
        config = json.loads(path.read_text())
        config.get("text_config", config).setdefault("norm_topk_prob", True)
        path.write_text(json.dumps(config, indent=2))


def engine_arguments(settings: EngineSettings, policy: Policy, version: VllmVersion, folder: Path) -> EngineArguments:
    """vLLM's arguments for a policy whose description is in ``folder``; its weights are pushed later."""
    on_cpu = version.on_cpu or policy.device.type == "cpu"
    context = settings.max_context or policy.model.config.get_text_config().max_position_embeddings
    given: dict[str, Any] = {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": str(policy.dtype).removeprefix("torch."),
        "seed": secrets.randbits(31),  # engines with one seed would write the same responses to one prompt
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1,
        "skip_tokenizer_init": False,
        "generation_config": "vllm",
        "max_model_len": context,
        # A medium must fit one batch of its encoder, or its request would never be scheduled: a context's worth does.
        "max_num_batched_tokens": max(context, 2048 if on_cpu else 8192),
        "max_num_seqs": settings.max_rows,
        "enforce_eager": on_cpu if settings.eager is None else settings.eager,
        "tensor_parallel_size": settings.tensor_parallel,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **dict(version.switches),
    }
    if on_cpu:
        given |= {"block_size": 32}  # the least that vLLM takes: prompts shorter than a block are computed for each sample
    else:
        given |= {"gpu_memory_utilization": settings.gpu_share}
    if policy.adapters is not None:
        section = policy.adapters.section
        given |= {
            "enable_lora": True,
            "max_loras": 2,  # responses that span a push go on with the adapter they began with
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= section.rank),
        }
        if TOWER_GROUPS & {*section.groups}:
            given |= {"enable_tower_connector_lora": True}
    return EngineArguments({**given, **settings.engine_args}, settings.backend(policy.device.type), on_cpu)


# vLLM 0.32 lays out the adapters of a tower for all media of a step, and then runs the tower over pictures and over videos
# separately: a step with both ends the engine. So requests with one kind wait until none with the other is open. For
# example:
#
#     open: two with pictures    comes: a video, waits    comes: a picture, joins    all three end    the video begins


class OneKindAtATime:
    """Lets requests in that show the kind of medium that is shown now, or none."""

    def __init__(self) -> None:
        self._kind: MediaKind | None = None
        self._open = 0
        self._waiting: list[asyncio.Future[None]] = []

    @asynccontextmanager
    async def showing(self, kind: MediaKind | None) -> AsyncIterator[None]:
        """Inside, no other kind is shown."""
        if kind is None:
            yield
            return
        while self._open and self._kind != kind:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter
        self._kind = kind
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                waiting, self._waiting = self._waiting, []
                for waiter in waiting:
                    if not waiter.done():
                        waiter.set_result(None)


# What can go wrong with another engine's weights is silent: a tied head that kept the old ones, features of the tower
# that were cached before the push, adapters of the tower that are ignored, patches that were normalised twice. Each
# moves log-probs by 0.5 and more, where rounding moves them by 1e-5. So a few short probes tell. Media of probes are
# noise that goes to the towers directly: nothing is decoded or stored.


BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
"""The largest mean difference of log-probs that is rounding. Tiny models in float32 stay below 2e-6."""

TEXT_TOKENS, WRITTEN_TOKENS = 40, 8


@dataclass(frozen=True)
class Difference:
    """How far vLLM's log-probs of a probe are from the policy's."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Probe:
    """A context of one modality and, of its media, what the towers take."""

    modality: str
    context: tuple[Segment, ...]
    prompt: EnginePrompt
    inputs: dict[Media, TowerInput]
    layouts: "ProbeLayouts"


class ProbeLayouts:
    """Layouts of segments whose media are not stored anywhere."""

    def __init__(self, media_format: Any, inputs: dict[Media, TowerInput]) -> None:
        self._inputs = inputs
        self.layout: Any = Layouts(media_format, self)  # type: ignore[arg-type]

    def extent(self, media: Media) -> Extent:
        """How large a medium is to its tower."""
        return self._inputs[media].extent


def make_probes(policy: Policy) -> list[Probe]:
    """One probe for text, and one for each kind of medium that the model takes; the same in every process."""
    chat = policy.chat
    allowed = sorted({*range(chat.vocab_size)} - {*chat.forbidden_ids, *chat.stop_ids})
    generator = torch.Generator().manual_seed(0)
    probes = []
    kinds: list[MediaKind | None] = [
        None,
        *(kind for kind in ("picture", "video") if kind in chat.media_format.placeholders),
    ]
    for kind in kinds:
        text = [allowed[i] for i in torch.randint(len(allowed), (TEXT_TOKENS,), generator=generator).tolist()]
        inputs: dict[Media, TowerInput] = {}
        spans: tuple[MediaSpan, ...] = ()
        if kind is not None:
            media = Media(kind, f"probe-{kind}", "probe")
            inputs[media] = _noise(policy, kind, generator)
            spans = (MediaSpan(2, media),)
            text[2:2] = _framed(chat, kind)
            spans = (MediaSpan(text.index(chat.media_format.placeholders[kind]), media),)
        segment = Segment("environment", tuple(text), spans)
        layouts = ProbeLayouts(chat.media_format, inputs)
        prompt = lay_out(layouts, chat.media_format, [segment])
        probes.append(Probe(kind or "text", (segment,), prompt, inputs, layouts))
    return probes


def _framed(chat: Any, kind: MediaKind) -> list[int]:
    """The placeholder of a medium between the marks that a prompt has around it; vLLM's positions look for them."""
    pad = chat.media_format.placeholders[kind]
    if kind in chat.media_format.own_marks:
        return [pad]
    ids = chat.tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    return [ids[0], pad, ids[1]]


def _noise(policy: Policy, kind: MediaKind, generator: torch.Generator) -> TowerInput:
    """A medium of two by two features, a video of two such steps at its first two seconds."""
    vision: Any = policy.chat.media_format.vision  # type: ignore[attr-defined]
    side, steps = 2 * vision.spatial_merge_size, 2 if kind == "video" else 1
    per_patch = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    frames = steps * vision.temporal_patch_size
    times = tuple(i / vision.temporal_patch_size for i in range(frames)) if kind == "video" else ()
    extent = Extent(kind, (steps, side, side), times, 1 / vision.temporal_patch_size if times else 0.0)
    return TowerInput(torch.randn(steps * side * side, per_patch, generator=generator), extent)


@torch.no_grad()
def policy_logprobs(policy: Policy, probe: Probe, written: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Log-probs of a probe's own tokens at temperature 1 (but the first), and of what was written after it, masked."""
    layout: Layout = probe.layouts.layout(probe.context[0])
    device, length = policy.device, len(layout)
    features = {media: policy.adapter.towers[media.kind]([given])[0] for media, given in probe.inputs.items()}
    ids_T = torch.cat([layout.ids_T, torch.tensor(list(written), dtype=torch.long)])
    after_3N = layout.advance + torch.arange(len(written)).expand(3, -1)
    positions_3T = torch.cat([layout.positions_3T, after_3N], dim=1)
    hidden_1TH = policy.language(
        ids_T[None].to(device), positions_3T[:, None].to(device), MaskedAttention(), placements(layout, features)
    )
    logits_TV = policy.logits(hidden_1TH[0])
    given_T = logits_TV[: length - 1].log_softmax(-1).gather(1, ids_T[1:length, None].to(device))[:, 0]
    masked_NV = logits_TV[length - 1 : -1].index_fill(1, torch.tensor(policy.chat.forbidden_ids, device=device), -torch.inf)
    written_N = masked_NV.log_softmax(-1).gather(1, ids_T[length:, None].to(device))[:, 0]
    return given_T.cpu(), written_N.cpu()


def difference(policy: Policy, probe: Probe, answer: dict[str, Any]) -> Difference:
    """How far an answer of vLLM is from the policy, over tokens that it wrote and, where it scored them, tokens of text."""
    given_T, written_N = policy_logprobs(policy, probe, answer["tokens"])
    off_N = (torch.tensor(answer["logprobs"]) - written_N).abs()
    if answer["scores"] is None:
        return Difference(off_N.mean().item(), off_N.max().item())
    scores_T = torch.tensor([0.0 if score is None else score for score in answer["scores"][1:]])
    pads = {place - 1 for placed in probe.prompt.media for place in range(placed.start, placed.start + placed.length)}
    text = torch.tensor([i for i in range(len(given_T)) if i not in pads])
    off_N = torch.cat([(scores_T - given_T)[text].abs(), off_N])
    return Difference(off_N.mean().item(), off_N.max().item())


def refuse_apart(differences: dict[str, Difference], bound: float, when: str) -> None:
    """End the run if vLLM samples from another policy than the one that is trained."""
    for modality, found in differences.items():
        if not found.mean <= bound:
            raise EngineLost(
                f"vLLM's log-probs of a {modality} probe are {found.mean:.3g} from the policy's on average (at most "
                f"{found.largest:.3g}) {when}; rounding explains no more than {bound:g}. vLLM computes another model than "
                "the one that is trained, so the run ends here. Use rollout.engine: native, or, if this is rounding, raise "
                "rollout.engine.options.parity_bound."
            )


# vLLM is given weights at its start and after each update, and is held against the policy each time (``parity``). It
# batches by the clock and draws from one stream of random numbers, so what it samples does not repeat. (A seed for each
# request would not make it repeat either, and has it sample row by row.)


SAMPLING_OPTIONS = frozenset(["temperature", "greedy", "stop", "ignore_stop_tokens"])


@dataclass
class PushTimes:
    """How long the last push took, and of it the pause and the loading; how long the check after it took."""

    total_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    parity_s: float = 0.0


class VllmEngine:
    """Samples with vLLM. ``arguments.EngineSettings`` has the options that go to vLLM.

    ``start_s`` bounds its start, ``reply_s`` every later answer; a vLLM that answers no request for so long must give a
    sign of life. ``parity_bound`` is the largest mean difference of log-probs that passes for rounding (default: by dtype).
    ``restarts`` is how often an engine that died is replaced; its open requests are then sampled again. ``host`` starts
    vLLM, here or on another machine.
    """

    check_options = staticmethod(check_vllm_options)

    def __init__(
        self,
        policy: Policy,
        *,
        lockstep: bool = False,
        max_rows: int = 256,
        max_context: int | None = None,
        start_s: float = 600.0,
        reply_s: float = 600.0,
        cache_gib: int = 1,
        gpu_share: float = VLLM_SHARE,
        eager: bool | None = None,
        tensor_parallel: int = 1,
        push: str = "auto",
        parity_bound: float | None = None,
        restarts: int = 0,
        engine_args: Mapping[str, Any] | None = None,
        host: ProcessHost | None = None,
    ) -> None:
        self._vllm = installed_version()
        self._host: ProcessHost = ThisMachine() if host is None else host
        if self._host.own_device and push == "ipc":
            raise EngineError(
                "rollout.engine.options.push is ipc, which is for a learner and an engine on one GPU, and this engine has "
                "one of its own. Use broadcast, or auto."
            )
        self._settings = EngineSettings(
            max_rows,
            max_context,
            cache_gib,
            gpu_share,
            eager,
            tensor_parallel,
            push,
            dict(engine_args or {}),
            self._host.own_device and not self._host.shared,
        )
        dtype = str(policy.dtype).removeprefix("torch.")
        refuse_family(policy.model.config.model_type, on_cpu=policy.device.type == "cpu")
        refuse_dtype(dtype, on_cpu=policy.device.type == "cpu")
        refuse_adapters(() if policy.adapters is None else policy.adapters.section.groups)
        self.capabilities = Capabilities(
            policy.chat.modalities, deterministic=False, sampling=SAMPLING_OPTIONS, in_flight=True, own_weights=True
        )
        self.version = policy.version
        self.restarts = 0
        self.pushed = PushTimes()
        self.parity: dict[str, Difference] = {}
        self._policy = policy
        self._parameters = [name for name, _ in policy.model.named_parameters()]
        self._tied = policy.adapter.head.weight is policy.adapter.language_model.embed_tokens.weight
        self._start_s, self._reply_s, self._restarts_left = start_s, reply_s, restarts
        self._bound = BOUNDS[dtype] if parity_bound is None else parity_bound
        self._probes = make_probes(policy)
        self._changed = ChangedWeights()
        self._actor: ActorProcess | None = None
        self._sender: RequestSender | None = None
        self._folder: Path | None = None
        self._weights: WeightSender | None = None
        self._open: set[str] = set()
        self._replacing = threading.Lock()
        self._kinds = OneKindAtATime()
        self._tower_adapters = policy.adapters is not None and bool(TOWER_GROUPS & {*policy.adapters.section.groups})
        self._adapters_written = 0

    @property
    def pid(self) -> int | None:
        """The actor's process id and that of its process group, once it is started."""
        return None if self._actor is None else self._actor.pid

    @property
    def ready(self) -> bool:
        """True if it takes requests: not while it starts, or starts again."""
        return self._sender is not None

    def start(self) -> None:
        """Start vLLM without weights, push the policy's, and hold the two against each other."""
        if self._actor is not None:
            return
        policy = self._policy
        self._folder = Path(tempfile.mkdtemp(prefix="sensorium-vllm-", dir=self._host.folder))
        try:
            describe(policy, self._folder / "model")
            arguments = engine_arguments(self._settings, policy, self._vllm, self._folder / "model")
            startup = write_startup(self._folder / "startup")
            variables = environment(startup, on_cpu=arguments.on_cpu, cache_gib=self._settings.cache_gib)
            self._actor = ActorProcess(self._host, self._folder / "vllm.log", variables)
            if arguments.backend == BROADCAST:
                workers = self._settings.tensor_parallel
                self._weights = WeightSender(self._host.address, workers, policy.device, self._start_s)
            told = {
                "do": "start",
                "temporary": str(self._folder),
                "engine_args": arguments.engine_args,
                "backend": arguments.backend,
                "transfer": {} if self._weights is None else {"meeting": self._weights.told},
                "forbidden": list(policy.chat.forbidden_ids),
                "stops": list(policy.chat.stop_ids),
                "vocab_size": policy.vocab_size,
                "tells_versions": self._vllm.tells_weight_versions,
            }
            context = self._actor.ask(told, self._start_s)["context"]
            self._sender = RequestSender(
                policy.chat, self._vllm, self._actor, context, self._shared_folder, look_s=self._reply_s
            )
            self._backend = arguments.backend
            self._push_base()
            self._load(policy, policy.version)
        except BaseException:
            self.close()
            raise

    def restart(self, source: WeightSource | None = None, version: int | None = None) -> None:
        """End what is left of the engine and start another with these weights (the policy's); its caches are empty."""
        self.close()
        self.restarts += 1
        self.start()
        if source is not None:
            self.update_weights(source, self.version if version is None else version)

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        if request.thread in self._open:
            raise EngineError(f"thread '{request.thread}' is being continued already; a thread has one response at a time.")
        prompt = self._lay_out(request)
        self._open.add(request.thread)
        try:
            while True:
                actor = self._actor
                try:
                    async with self._kinds.showing(self._kind_of(request, prompt)):
                        return await self._respond(request, prompt)
                except EngineLost:
                    if actor is None or not await asyncio.to_thread(self._replaced, actor):
                        raise
        finally:
            self._open.discard(request.thread)

    def release(self, thread: str) -> None:
        """Nothing is kept for a thread: vLLM's prefix cache finds by content."""

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights from now on. Responses that are open go on, with a version for each of their parts.

        A vLLM that dies of it is replaced, as far as ``restarts`` go, by one that has them.
        """
        actor = self._actor
        try:
            self._load(source, version)
        except EngineLost:
            if actor is None or not self._replaced(actor):
                raise
            self._load(source, version)

    def _load(self, source: WeightSource, version: int) -> None:
        started = time.perf_counter()
        if self._policy.adapters is not None:
            answer = self._push_adapters(version)
        else:
            answer = self._push(source.tensors(), self._parameters, version)
        self.version = version
        self.pushed = PushTimes(time.perf_counter() - started, answer.get("pause_s", 0.0), answer.get("load_s", 0.0))
        if source is self._policy:
            started = time.perf_counter()
            self.parity = self._measure()
            self.pushed.parity_s = time.perf_counter() - started
            refuse_apart(self.parity, self._bound, f"after the push of version {version}")

    def push_weights(self, source: WeightSource, version: int) -> None:
        """The same as ``update_weights``, which keeps open responses. From any thread."""
        self.update_weights(source, version)

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Say which vLLM it is, what it lacks, and how close it is to the policy."""
        for sentence in self._vllm.sentences():
            noted(sentence)
        apart = ", ".join(f"{modality} {found.largest:.1e}" for modality, found in self.parity.items())
        noted(f"rollout.engine: largest difference of vLLM's log-probs from the policy's: {apart}")

    def reset_cache(self) -> None:
        """Drop features, keys and values."""
        self._ask({"do": "reset"})

    def metrics(self) -> dict[str, float]:
        """What a step's row says of the engine."""
        told = {
            "engine/push_s": self.pushed.total_s,
            "engine/push_pause_s": self.pushed.pause_s,
            "engine/parity_s": self.pushed.parity_s,
            "engine/restarts": float(self.restarts),
        }
        for modality, found in self.parity.items():
            told |= {f"engine/parity_mean/{modality}": found.mean, f"engine/parity_max/{modality}": found.largest}
        return told

    def close(self) -> None:
        """End vLLM with all its processes, and remove its folder."""
        if self._actor is not None:
            self._actor.close()
        if self._weights is not None:
            self._weights.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._actor = self._sender = self._folder = self._weights = None
        self._changed.forget()

    # Requests.

    def _lay_out(self, request: Request) -> EnginePrompt:
        chat = self._policy.chat
        prompt = lay_out(_StoredMedia(self._policy), chat.media_format, request.context)
        check_prompt(prompt, request.name, self._policy.vocab_size, self._running().context, chat.media_format.placeholders)
        if request.sampling.top_p < 1 or request.sampling.top_k:
            raise EngineError("the engine vllm does not truncate by top_p or top_k; leave them at 1 and 0.")
        return prompt

    def _kind_of(self, request: Request, prompt: EnginePrompt) -> MediaKind | None:
        """The kind of medium that nothing else may be shown with; None where that does not matter."""
        kinds = {placed.media.kind for placed in prompt.media}
        if not self._tower_adapters or not kinds:
            return None
        if len(kinds) > 1:
            raise EngineError(
                f"'{request.name}' shows pictures and videos, and vLLM ends where a tower with adapters sees both at once. "
                "Leave 'vision' and 'projector' out of model.lora.groups, or use rollout.engine: native."
            )
        return kinds.pop()

    async def _respond(self, request: Request, prompt: EnginePrompt) -> Response:
        sampling = request.sampling
        inputs = {placed.media: self._policy.chat.prepared.get([placed.media])[0] for placed in prompt.media}
        stops = StopStrings(sampling.stop) if sampling.stop else None
        began, sender = self.version, self._running()
        answer = await sender.sample(prompt, inputs, sampling, stops)
        if any(one != one for one in answer["logprobs"]):
            raise EngineError(f"the logits of '{request.name}' are not finite; are the weights?")
        spans = tuple(VersionSpan(int(version), start, end) for version, start, end in answer["versions"])
        version = spans[0].version if spans else began
        logprobs = answer["logprobs"]
        drawn = [0.0] * len(logprobs) if sampling.temperature == 0 else logprobs
        versions = spans if len(spans) > 1 else ()
        segment = self._policy.chat.written(answer["tokens"], logprobs, drawn, request.name, version, versions)
        finish: FinishReason = "stop" if answer["finish"] == "stop" else "length"
        return Response(segment, finish, versions)

    # Weights.

    def _push_base(self) -> None:
        """Under LoRA the base weights are pushed once; they never change."""
        if self._policy.adapters is not None:
            self._push(self._policy.tensors(), self._parameters, self._policy.version)

    def _push(self, tensors: Mapping[str, Tensor], parameters: Sequence[str], version: int) -> dict[str, Any]:
        names = self._changed.select(tensors, parameters)
        sent = published(tensors, [name for name in parameters if name in names], tied=self._tied)
        with pushed_by(self._backend, sent, self._shared_folder, self._weights) as update:
            try:
                answer = self._ask({"do": "push", "update": update, "version": version})
            except EngineError as error:  # vLLM is left paused and without weights: a request would wait for ever
                lost = EngineLost(f"the push of weights of version {version} into vLLM failed: {error}")
                self._running().actor.fail(lost)
                raise lost from error
        self._changed.note(tensors, names)
        return answer

    def _push_adapters(self, version: int) -> dict[str, Any]:
        """Every version is a new adapter to vLLM: of a number that it knows it would keep the earlier one."""
        assert self._policy.adapters is not None
        assert self._folder is not None
        self._adapters_written += 1
        folder = self._folder / f"adapter-{self._adapters_written}"
        self._policy.adapters.save(folder)
        try:
            return self._ask({"do": "lora", "path": str(folder), "number": self._adapters_written, "version": version})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _measure(self) -> dict[str, Difference]:
        """Each probe twice: its own tokens scored, and a few tokens written after it through vLLM's caches.

        Under LoRA nothing is scored: vLLM 0.32 ends where a step with adapters scores a prompt beside another request. A
        tower with adapters is shown one probe at a time, and none while others are open (see ``one_kind``).
        """
        sampling, sender = Sampling(max_new_tokens=WRITTEN_TOKENS), self._running()
        probes = [probe for probe in self._probes if not (self._tower_adapters and self._open and probe.inputs)]
        ways = (False,) if self._policy.adapters is not None else (True, False)
        asked = []
        for probe in probes:
            messages = [sender.message(probe.prompt, sampling, score=score) for score in ways]
            asked += [(message, probe.prompt, probe.inputs) for message in messages]
        each = 1 if self._tower_adapters else len(asked)
        runs = [asked[i : i + each] for i in range(0, len(asked), each)]
        answers = [answer for run in runs for answer in sender.ask_together(run, self._reply_s)]
        found = {}
        for i, probe in enumerate(probes):
            first, last = answers[len(ways) * i], answers[len(ways) * i + len(ways) - 1]
            found[probe.modality] = difference(self._policy, probe, {**last, "scores": first["scores"]})
        return found

    # The actor.

    @property
    def _shared_folder(self) -> Path | None:
        """Where files for vLLM go if it may be on another machine."""
        return None if self._host.folder is None else self._folder

    def _running(self) -> RequestSender:
        if self._sender is None:
            raise EngineLost("vLLM was not started, or is closed; call start() first.")
        return self._sender

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        return self._running().actor.ask(message, self._reply_s)

    def _replaced(self, lost: ActorProcess) -> bool:
        """True if there is another engine than the one that was lost; the first to ask starts it."""
        with self._replacing:
            if self._actor is lost:
                if not self._restarts_left:
                    return False
                self._restarts_left -= 1
                self.restart()
            return self._actor is not None


class _StoredMedia:
    """Layouts and extents of media that are stored."""

    def __init__(self, policy: Policy) -> None:
        self._chat = policy.chat

    def layout(self, segment: Segment) -> Layout:
        return self._chat.layout(segment)

    def extent(self, media: Media) -> Extent:
        return self._chat.prepared.extent(media)
