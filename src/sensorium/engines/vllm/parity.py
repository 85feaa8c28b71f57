"""Whether vLLM computes the log-probs of the policy: measured with short probes at its start and after each push.

What can go wrong with another engine's weights is silent: a tied head that kept the old ones, tower features that were
cached before the push, tower adapters that are ignored, patches that were normalised twice. Each changes log-probs by 0.5
and more, where rounding changes them by 1e-5. Media of probes are noise that goes to the towers directly: nothing is
decoded or stored. On the general path they are those of its own check, and rows are computed as the learner does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.vllm.prompts import EnginePrompt, lay_out, tower_input
from sensorium.models.attention import MaskedAttention
from sensorium.models.chat_processor import ChatProcessor, Layouts
from sensorium.models.general_path import General, SelfCheck, StockRows
from sensorium.models.policy import Policy
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Layout, placements
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import MediaSpan, Segment
from sensorium.vocabulary.errors import EngineLost

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
