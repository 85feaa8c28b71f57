"""The engine ``vllm`` in the driver. Requests are laid out and checked here, and sampled by vLLM in other processes.

vLLM gets weights at its start and after each update, and is compared with the policy each time (``difference``). It
batches by the clock and samples from one stream of random numbers, so what it samples does not repeat. (A seed for each
request would not make it repeat either, and makes it sample row by row.)

Whether vLLM computes the log-probs of the policy is measured with short probes. What can go wrong with another engine's
weights is silent: a tied head that kept the old ones, tower features that were cached before the push, tower adapters
that are ignored, patches that were normalised twice. Each changes log-probs by 0.5 and more, where rounding changes
them by 1e-5. Media of probes are noise that goes to the towers directly: nothing is decoded or stored. On the general
path they are those of its own check, and rows are computed as the learner does.
"""

import asyncio
import json
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import shorten
from typing import Any, Unpack

import torch
from torch import Tensor

from sensorium.cluster.python_process import ProcessHost, ThisMachine
from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.options import LORA_RANKS, VllmOptions, check_vllm_options, completed_vllm
from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, Sampling, WeightSource
from sensorium.engines.vllm.actor_process import ActorProcess, environment, write_startup
from sensorium.engines.vllm.prompts import EnginePrompt, RequestSender, check_prompt, lay_out, tower_input
from sensorium.engines.vllm.recipe_checks import (
    TOWER_GROUPS,
    VllmVersion,
    installed_version,
    refuse_adapters,
    refuse_architecture,
    refuse_dtype,
    refuse_family,
)
from sensorium.engines.vllm.weight_backend import BROADCAST, FILE, SHARED, ChangedWeights, published, pushed_by
from sensorium.engines.weight_group import WeightSender
from sensorium.models.attention import MaskedAttention
from sensorium.models.chat_processor import ChatProcessor, Layouts
from sensorium.models.general_path import General, SelfCheck, StockRows
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Layout, placements
from sensorium.recipe.family_facts import FAMILIES
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import MediaSpan, Segment, VersionSpan
from sensorium.vocabulary.errors import EngineError, EngineLost

# The largest mean difference of log-probs that is rounding. Tiny models in float32 stay below 2e-6.
BOUNDS = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
TEXT_TOKENS, WRITTEN_TOKENS, MEL_FRAMES = 40, 8, 100


@dataclass(frozen=True)
class Difference:
    """How far vLLM's log-probs of a probe are from the policy's."""

    mean: float
    largest: float


@dataclass(frozen=True)
class Probe:
    """A context of one modality, with the tower inputs of its media. ``row``: on the general path, with what follows it."""

    modality: str
    prompt: EnginePrompt
    layout: Layout
    inputs: dict[Media, TowerInput]
    row: Callable[[Sequence[int]], Tensor] | None = None


class _ProbeMedia:
    """Extents of media that are not stored anywhere."""

    def __init__(self, inputs: dict[Media, TowerInput]) -> None:
        self._inputs = inputs

    def extent(self, media: Media) -> Extent:
        return self._inputs[media].extent


def make_probes(policy: Policy) -> list[Probe]:
    """One probe for text, and one for each kind of medium that the model takes; the same in every process."""
    check = None if policy.general is None else SelfCheck(policy)
    chat = policy.chat if check is None else check.chat
    pads = chat.media_format.placeholders
    allowed = sorted({*range(chat.vocab_size)} - {*chat.forbidden_ids, *chat.stop_ids})
    generator = torch.Generator().manual_seed(0)
    media_kinds: tuple[MediaKind, ...] = ("picture", "video", "sound") if check is None else ("picture", "sound")
    probes = []
    for kind in (None, *(kind for kind in media_kinds if kind in pads)):
        text = [allowed[i] for i in torch.randint(len(allowed), (TEXT_TOKENS,), generator=generator).tolist()]
        inputs: dict[Media, TowerInput] = {}
        spans: tuple[MediaSpan, ...] = ()
        if kind is not None:
            media = Media(kind, f"probe-{kind}", "probe") if check is None else check.medium(kind, 0)
            inputs[media] = _noise(policy, kind, generator) if check is None else tower_input(chat, media)
            # vLLM's positions look for the marks around it
            sense = "audio" if kind == "sound" else "vision"
            marks = [getattr(policy.model.config, f"{sense}_{end}_token_id", None) for end in ("start", "end")]
            text[2:2] = (
                [pads[kind]] if None in marks or kind in chat.media_format.own_marks else [marks[0], pads[kind], marks[1]]
            )
            spans = (MediaSpan(text.index(pads[kind]), media),)
        segment = Segment("environment", tuple(text), spans)
        source = _ProbeMedia(inputs)
        layouts: Any = Layouts(chat.media_format, source)  # type: ignore[arg-type]
        prompt = lay_out(layouts, source.extent, chat.media_format, [segment])
        row = None if policy.general is None else partial(_read_row, policy.general, chat, segment)
        probes.append(Probe(kind or "text", prompt, layouts(segment), inputs, row))
    if check is not None:
        chat.decoder.close()  # its media are prepared
    return probes


def _read_row(general: General, chat: ChatProcessor, segment: Segment, written: Sequence[int]) -> Tensor:
    row = general.row(chat, [segment, Segment("model", tuple(written))])
    return general.read(chat, StockRows((row,), (torch.arange(len(row)),)))


def _noise(policy: Policy, kind: MediaKind, generator: torch.Generator) -> TowerInput:
    """A medium of two by two features, a video of two such steps at its first two seconds, a sound of a second."""
    if kind == "sound":
        mels, margin = policy.model.config.audio_config.num_mel_bins, getattr(policy.chat.media_format, "margin", 0)
        mels_TC = torch.randn(MEL_FRAMES + margin, mels, generator=generator)
        return TowerInput(mels_TC, Extent("sound", (MEL_FRAMES, 1, 1)))
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
    layout, device = probe.layout, policy.device
    length = len(layout)
    ids_T = torch.cat([layout.ids_T, torch.tensor(list(written), dtype=torch.long)])
    if probe.row is not None:
        hidden_TX = probe.row(written)
    else:
        features = {media: policy.adapter.towers[media.kind]([given])[0] for media, given in probe.inputs.items()}
        after_3N = layout.advance + torch.arange(len(written)).expand(3, -1)
        positions_3T = torch.cat([layout.positions_3T, after_3N], dim=1)
        hidden_TX = policy.language(
            ids_T[None].to(device), positions_3T[:, None].to(device), MaskedAttention(), placements(layout, features)
        )[0]
    logits_TV = policy.logits(hidden_TX)
    given_T = logits_TV[: length - 1].log_softmax(-1).gather(1, ids_T[1:length, None].to(device))[:, 0]
    masked_NV = logits_TV[length - 1 : -1].index_fill(1, torch.tensor(policy.chat.forbidden_ids, device=device), -torch.inf)
    written_N = masked_NV.log_softmax(-1).gather(1, ids_T[length:, None].to(device))[:, 0]
    return given_T.cpu(), written_N.cpu()


def difference(policy: Policy, probe: Probe, answer: dict[str, Any]) -> Difference:
    """How far an answer of vLLM is from the policy, over the tokens that it wrote and the text tokens that it scored."""
    given_T, written_N = policy_logprobs(policy, probe, answer["tokens"])
    off_N = (torch.tensor(answer["logprobs"]) - written_N).abs()
    if answer["scores"] is not None:
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


SAMPLING_OPTIONS = frozenset(["temperature", "greedy", "stop", "ignore_stop_tokens"])


def backend_of(options: Mapping[str, Any], device: str, *, own_device: bool) -> str:
    """How weights get to vLLM, by its name for it. ``own_device``: learner and engine are on different GPUs."""
    if options["push"] != "auto":
        return {"file": FILE, "broadcast": BROADCAST, "ipc": SHARED}[options["push"]]
    if device == "cpu":
        return FILE
    if own_device:
        return BROADCAST
    return SHARED if options["tensor_parallel"] == 1 else FILE  # one of several GPUs is the learner's too


def describe(policy: Policy, folder: Path) -> None:
    """Write all of a checkpoint but its weights, as vLLM reads it: with what transformers 5 leaves out of configs."""
    policy.save_description(folder)
    path, facts = folder / "config.json", FAMILIES.get(policy.family)
    config = json.loads(path.read_text())
    if facts is None:  # the class that is trained, whatever the checkpoint was saved as
        config["architectures"] = [type(policy.model).__name__]
    if policy.experts_per_token:
        config.get("text_config", config).setdefault("norm_topk_prob", True)
    if facts is not None and facts.is_thinker:  # vLLM knows the whole model alone, of which it loads the thinker
        config["text_config"].setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
        vision = config["vision_config"]
        if "num_position_embeddings" in vision:
            side = round(vision["num_position_embeddings"] ** 0.5) * vision["patch_size"]
            config["vision_config"] = {"image_size": side, "apply_vit_abs_pos_embed": True} | vision
        name = f"{facts.prefix.removesuffix('Thinker')}ForConditionalGeneration"
        config = {"architectures": [name], "model_type": policy.family, "thinker_config": config}
    path.write_text(json.dumps(config, indent=2))


def engine_arguments(options: Mapping[str, Any], policy: Policy, version: VllmVersion, folder: Path) -> dict[str, Any]:
    """vLLM's arguments for a policy whose description is in ``folder``; its weights are pushed later."""
    on_cpu = version.on_cpu or policy.device.type == "cpu"
    context = options["max_context"] or policy.model.config.get_text_config().max_position_embeddings
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
        "max_num_seqs": options["max_rows"],
        "enforce_eager": on_cpu if options["eager"] is None else options["eager"],
        "tensor_parallel_size": options["tensor_parallel"],
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **dict(version.switches),
    }
    if on_cpu:
        given |= {"block_size": 32}  # vLLM's smallest: prompts shorter than a block are computed for each sample
    else:
        given |= {"gpu_memory_utilization": options["gpu_share"]}
    facts = FAMILIES.get(policy.family)
    if facts is None or facts.has_delta_nets:  # vLLM would take the model's dtype where the config has none
        given |= {"mamba_ssm_cache_dtype": "float32"}
    if policy.adapters is not None:
        section = policy.adapters.section
        given |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(rank for rank in LORA_RANKS if rank >= section.rank),
        }
        if TOWER_GROUPS & {*section.groups}:
            given |= {"enable_tower_connector_lora": True}
    return given | dict(options["engine_args"])


class OneKindAtATime:
    """Admits requests that show the kind of medium that is shown now, or none.

    vLLM 0.32 lays out the adapters of a tower for all media of a step, and then runs the tower over pictures and over
    videos separately: a step with both ends the engine. So requests with one kind wait until none with the other is open:

        open: two with pictures    comes: a video, waits    comes: a picture, joins    all three end    the video begins
    """

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


@dataclass
class PushTimes:
    """How long the last push took, with the pause and the loading in it; how long the comparison after it took."""

    total_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0
    parity_s: float = 0.0


class VllmEngine:
    """Samples with vLLM, which ``host`` starts, here or on another machine. ``VllmOptions`` has the options."""

    check_options = staticmethod(check_vllm_options)

    def __init__(
        self,
        policy: Policy,
        *,
        lockstep: bool = False,
        host: ProcessHost | None = None,
        **options: Unpack[VllmOptions],
    ) -> None:
        self._vllm = installed_version()
        self._host: ProcessHost = ThisMachine() if host is None else host
        self._options = completed_vllm(options)
        if self._host.own_device and self._options["push"] == "ipc":
            raise EngineError(
                "rollout.engine.options.push is ipc, which is for a learner and an engine on one GPU, and this engine has "
                "its own. Use broadcast, or auto."
            )
        own_device = self._host.own_device and not self._host.shared
        self._backend = backend_of(self._options, policy.device.type, own_device=own_device)
        dtype = str(policy.dtype).removeprefix("torch.")
        groups = () if policy.adapters is None else policy.adapters.section.groups
        on_cpu = self._vllm.on_cpu or policy.device.type == "cpu"
        if policy.general is not None:
            refuse_architecture(type(policy.model).__name__, self._vllm)
        else:
            refuse_family(policy.family, dtype, on_cpu=on_cpu)
        refuse_dtype(dtype, on_cpu=on_cpu)
        refuse_adapters(policy.family, groups, on_cpu=on_cpu)
        unsampled = frozenset(() if policy.general is None else ("video",))  # whose frames vLLM would choose itself
        self.capabilities = Capabilities(
            policy.chat.modalities - unsampled,
            deterministic=False,
            sampling=SAMPLING_OPTIONS,
            in_flight=True,
            own_weights=True,
        )
        self.version = policy.version
        self.restarts = 0
        self.pushed = PushTimes()
        self.parity: dict[str, Difference] = {}
        self._policy = policy
        self._tower_adapters = bool(TOWER_GROUPS & {*groups})
        saved, first = policy.model.state_dict().keys(), {id(one): name for name, one in policy.model.named_parameters()}
        self._saved = [name for name in policy.tensors() if name in saved]
        every = policy.model.named_parameters(remove_duplicate=False)
        self._tied = {name: first[id(one)] for name, one in every if first[id(one)] != name}
        self._start_s, self._reply_s = self._options["start_s"], self._options["reply_s"]
        self._restarts_left = self._options["restarts"]
        bound = self._options["parity_bound"]
        self._bound = BOUNDS[dtype] if bound is None else bound
        self._probes = make_probes(policy)
        self._changed = ChangedWeights()
        self._actor: ActorProcess | None = None
        self._sender: RequestSender | None = None
        self._folder: Path | None = None
        self._weights: WeightSender | None = None
        self._open: set[str] = set()
        self._replacing = threading.Lock()
        self._kinds = OneKindAtATime()
        facts = FAMILIES.get(policy.family)
        self._under = "thinker." if facts is not None and facts.is_thinker else ""
        self._turned = facts is not None and facts.turned_experts
        self._renamed_model = policy.model if facts is None or facts.renamed else None

    @property
    def pid(self) -> int | None:
        """The actor's process id and that of its process group, once it is started."""
        return None if self._actor is None else self._actor.pid

    @property
    def ready(self) -> bool:
        """True if it takes requests: not while it starts, or starts again."""
        return self._sender is not None

    def start(self) -> None:
        """Start vLLM without weights, push the policy's, and compare the two."""
        if self._actor is not None:
            return
        policy, chat = self._policy, self._policy.chat
        self._folder = Path(tempfile.mkdtemp(prefix="sensorium-vllm-", dir=self._host.folder))
        try:
            describe(policy, self._folder / "model")
            on_cpu = self._vllm.on_cpu or policy.device.type == "cpu"
            startup = write_startup(self._folder / "startup")
            variables = environment(startup, on_cpu=on_cpu, cache_gib=self._options["cache_gib"])
            self._actor = ActorProcess(self._host, self._folder / "vllm.log", variables)
            if self._backend == BROADCAST:
                workers = self._options["tensor_parallel"]
                self._weights = WeightSender(self._host.address, workers, policy.device, self._start_s)
            message = {
                "do": "start",
                "temporary": str(self._folder),
                "engine_args": engine_arguments(self._options, policy, self._vllm, self._folder / "model"),
                "backend": self._backend,
                "transfer": {} if self._weights is None else {"meeting": asdict(self._weights.meeting)},
                "forbidden": list(chat.forbidden_ids),
                "stops": list(chat.stop_ids),
                "vocab_size": policy.vocab_size,
                "tells_versions": self._vllm.tells_weight_versions,
            }
            context = self._actor.ask(message, self._start_s)["context"]
            self._sender = RequestSender(chat, self._vllm, self._actor, context, self._shared_folder, look_s=self._reply_s)
            if policy.adapters is not None:  # the base weights never change
                self._push(policy.tensors(), policy.version)
            self._load(policy, policy.version)
        except BaseException:
            self.close()
            raise

    def restart(self) -> None:
        """End what is left of the engine and start another with the policy's weights; its caches are empty."""
        self.close()
        self.restarts += 1
        self.start()

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response. Cancelling the wait withdraws the request."""
        if request.thread in self._open:
            raise EngineError(f"thread '{request.thread}' is being continued already; a thread has one response at a time.")
        chat = self._policy.chat
        prompt = lay_out(chat.layout, chat.prepared.extent, chat.media_format, request.context)
        check_prompt(prompt, request.name, self._policy.vocab_size, self._running().context, chat.media_format)
        if request.sampling.top_p < 1 or request.sampling.top_k:
            raise EngineError("the engine vllm does not truncate by top_p or top_k; leave them at 1 and 0.")
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
        """Sample with these weights from now on. Open responses continue, with a version for each of their parts.

        A vLLM that dies of it is replaced, as far as ``restarts`` go, by one that has them.
        """
        actor = self._actor
        try:
            self._load(source, version)
        except EngineLost:
            if actor is None or not self._replaced(actor):
                raise
            self._load(source, version)

    def push_weights(self, source: WeightSource, version: int) -> None:
        """The same as ``update_weights``, which keeps open responses. From any thread."""
        self.update_weights(source, version)

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report which vLLM it is, what it lacks, and how close it is to the policy."""
        for sentence in self._vllm.sentences():
            noted(sentence)
        apart = ", ".join(f"{modality} {found.largest:.1e}" for modality, found in self.parity.items())
        noted(f"rollout.engine: largest difference of vLLM's log-probs from the policy's: {apart}")

    def reset_cache(self) -> None:
        """Drop features, keys and values."""
        self._ask({"do": "reset"})

    def metrics(self) -> dict[str, float]:
        """The engine's metrics of a step."""
        row = {
            "engine/push_s": self.pushed.total_s,
            "engine/push_pause_s": self.pushed.pause_s,
            "engine/parity_s": self.pushed.parity_s,
            "engine/restarts": float(self.restarts),
        }
        for modality, found in self.parity.items():
            row |= {f"engine/parity_mean/{modality}": found.mean, f"engine/parity_max/{modality}": found.largest}
        return row

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

    def _kind_of(self, request: Request, prompt: EnginePrompt) -> MediaKind | None:
        """The kind of medium that no other may be shown with; None where that does not matter."""
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
        inputs = {placed.media: tower_input(self._policy.chat, placed.media) for placed in prompt.media}
        stops = StopStrings(sampling.stop) if sampling.stop else None
        began = self.version
        answer = await self._running().sample(prompt, inputs, sampling, stops)
        logprobs = answer["logprobs"]
        if any(one != one for one in logprobs):
            raise EngineError(f"the logits of '{request.name}' are not finite; are the weights?")
        spans = tuple(VersionSpan(int(version), start, end) for version, start, end in answer["versions"])
        versions = spans if len(spans) > 1 else ()
        segment = self._policy.chat.written(
            answer["tokens"],
            logprobs,
            [0.0] * len(logprobs) if sampling.temperature == 0 else logprobs,
            request.name,
            spans[0].version if spans else began,
            versions,
        )
        return Response(segment, "stop" if answer["finish"] == "stop" else "length", versions)

    def _load(self, source: WeightSource, version: int) -> None:
        """Push weights, and compare vLLM with the policy where they are the policy's."""
        started = time.perf_counter()
        if self._policy.adapters is not None:
            answer = self._push_adapters(version)
        else:
            answer = self._push(source.tensors(), version)
        self.version = version
        self.pushed = PushTimes(time.perf_counter() - started, answer.get("pause_s", 0.0), answer.get("load_s", 0.0))
        if source is self._policy:
            started = time.perf_counter()
            self.parity = self._measure()
            self.pushed.parity_s = time.perf_counter() - started
            refuse_apart(self.parity, self._bound, f"after the push of version {version}")

    def _push(self, tensors: Mapping[str, Tensor], version: int) -> dict[str, Any]:
        names = self._changed.select(tensors, self._saved)
        ordered = [name for name in self._saved if name in names]
        sent = published(
            tensors, ordered, tied=self._tied, turned=self._turned, under=self._under, model=self._renamed_model
        )
        with pushed_by(self._backend, sent, self._shared_folder, self._weights) as update:
            answer = self._replace({"do": "push", "update": update, "version": version})
        self._changed.note(tensors, names)
        return answer

    def _push_adapters(self, version: int) -> dict[str, Any]:
        """Replace vLLM's adapter by the policy's."""
        assert self._policy.adapters is not None
        assert self._folder is not None
        folder = self._folder / "adapter"
        self._policy.adapters.save(folder, under=self._under)
        try:
            return self._replace({"do": "lora", "path": str(folder), "version": version})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _replace(self, message: dict[str, Any]) -> dict[str, Any]:
        """Have weights or adapters replaced. A failure ends vLLM, which is left paused: a request would wait forever."""
        try:
            return self._ask(message)
        except EngineError as error:
            told = shorten(str(error), 500, placeholder=" …").rstrip(".")  # vLLM lists all names that it knows
            lost = EngineLost(
                f"the push of weights of version {message['version']} into vLLM failed: {told}."
                f"{'' if self._renamed_model is None else ' If it has other names for them, use rollout.engine: native.'}"
            )
            self._running().actor.fail(lost)
            raise lost from error

    def _measure(self) -> dict[str, Difference]:
        """Ask each probe twice: with its own tokens scored, and with a few tokens written after it through vLLM's caches.

        Under LoRA nothing is scored: vLLM 0.32 ends where a step with adapters scores a prompt beside another request. A
        tower with adapters is shown one probe at a time, and none while others are open (see ``OneKindAtATime``).
        """
        sampling, sender = Sampling(max_new_tokens=WRITTEN_TOKENS), self._running()
        probes = [probe for probe in self._probes if not (self._tower_adapters and self._open and probe.inputs)]
        ways = (False,) if self._policy.adapters is not None else (True, False)
        asked = [
            (sender.message(probe.prompt, sampling, score=score), probe.prompt, probe.inputs)
            for probe in probes
            for score in ways
        ]
        each = 1 if self._tower_adapters else len(asked)
        runs = [asked[i : i + each] for i in range(0, len(asked), each)]
        answers = [answer for run in runs for answer in sender.ask_together(run, self._reply_s)]
        found = {}
        for i, probe in enumerate(probes):
            first, last = answers[len(ways) * i], answers[len(ways) * i + len(ways) - 1]
            found[probe.modality] = difference(self._policy, probe, {**last, "scores": first["scores"]})
        return found

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
        """True if there is another engine than the one that was lost; the first caller starts it."""
        with self._replacing:
            if self._actor is lost:
                if not self._restarts_left:
                    return False
                self._restarts_left -= 1
                self.restart()
            return self._actor is not None
