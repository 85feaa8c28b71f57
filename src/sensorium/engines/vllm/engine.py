"""The engine ``vllm``: this side of it. Requests are laid out and checked here, and sampled by vLLM in other processes.

vLLM is given weights at its start and after each update, and is held against the policy each time (``parity``). It batches
by the clock and draws from one stream of random numbers, so what it samples does not repeat. (A seed for each request would
not make it repeat either, and has it sample row by row.)
"""

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.protocol import (
    Capabilities,
    FinishReason,
    LiveEpisodes,
    Request,
    Response,
    Sampling,
    WeightSource,
)
from sensorium.engines.vllm import parity
from sensorium.engines.vllm.actor_process import ActorProcess
from sensorium.engines.vllm.arguments import EngineSettings, describe, engine_arguments
from sensorium.engines.vllm.one_kind import OneKindAtATime
from sensorium.engines.vllm.options import check_options
from sensorium.engines.vllm.prompts import EnginePrompt, check_prompt, lay_out
from sensorium.engines.vllm.recipe_checks import TOWER_GROUPS, refuse_adapters, refuse_dtype, refuse_family
from sensorium.engines.vllm.requests import RequestSender
from sensorium.engines.vllm.startup import environment, write_startup
from sensorium.engines.vllm.transfers import pushed_by
from sensorium.engines.vllm.versions import installed_version
from sensorium.engines.vllm.weight_backend import BROADCAST
from sensorium.engines.vllm.weights import ChangedWeights, published
from sensorium.engines.weight_group import WeightSender
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent
from sensorium.models.segment_layout import Layout
from sensorium.recipe.recomputation import VLLM_SHARE
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import Segment, VersionSpan
from sensorium.vocabulary.errors import EngineError, EngineLost
from sensorium.workers.hosts import ProcessHost, ThisMachine

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

    check_options = staticmethod(check_options)

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
        self.parity: dict[str, parity.Difference] = {}
        self._policy = policy
        self._parameters = [name for name, _ in policy.model.named_parameters()]
        self._tied = policy.adapter.head.weight is policy.adapter.language_model.embed_tokens.weight
        self._start_s, self._reply_s, self._restarts_left = start_s, reply_s, restarts
        self._bound = parity.BOUNDS[dtype] if parity_bound is None else parity_bound
        self._probes = parity.make_probes(policy)
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
            parity.refuse_apart(self.parity, self._bound, f"after the push of version {version}")

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

    def _measure(self) -> dict[str, parity.Difference]:
        """Each probe twice: its own tokens scored, and a few tokens written after it through vLLM's caches.

        Under LoRA nothing is scored: vLLM 0.32 ends where a step with adapters scores a prompt beside another request. A
        tower with adapters is shown one probe at a time, and none while others are open (see ``one_kind``).
        """
        sampling, sender = Sampling(max_new_tokens=parity.WRITTEN_TOKENS), self._running()
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
            found[probe.modality] = parity.difference(self._policy, probe, {**last, "scores": first["scores"]})
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
