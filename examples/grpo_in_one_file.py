"""GRPO on a vision-language model, the whole algorithm in one flat file. Read it from top to bottom.

    python examples/grpo_in_one_file.py              # about four minutes on two CPU cores
    python examples/grpo_in_one_file.py --steps 40

A small real Qwen3-VL looks at pictures of coloured shapes and answers questions about them. It answers in the right form,
``<answer>red</answer>``, but only guesses at shapes, counts and places. Every step it answers 64 questions, eight times
each; what is paid better than the other seven answers to the same question becomes more likely. Nothing else teaches it.

Only the pictures, their order and the starting weights come from the library. Sampling, credit, loss and update are all
here, and draw the same random numbers: the library's own run of ``recipes/shapes.yaml`` begins with the same samples.

Tensor names carry their axes:
    P prompts of a step   G samples of a prompt   T tokens of the longest prompt   R tokens of the longest response
    S = T + G·R tokens of a row   N image tokens of all prompts   H hidden size   V vocabulary
"""

import argparse
import hashlib
import io
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from PIL import Image
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream
from sensorium.data.shapes import Shapes
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.vocabulary.task import Task

CHECKPOINT = "package:shapes"
PICTURE_SIZE = 64
TRAIN_SIZE = 4096
PROMPTS_PER_STEP = 64
GROUP_SIZE = 8
MAX_NEW_TOKENS = 6
LEARNING_RATE = 2e-4
WARMUP_STEPS = 5
CLIP = 0.2
CLIP_NORM = 1.0


class Model:
    """A stock transformers model taken apart: tower, language model and head, and which tokens may be written."""

    def __init__(self, checkpoint: str) -> None:
        folder = find_checkpoint(checkpoint)
        self.whole: Any = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)
        self.tokenizer: Any = self.processor.tokenizer
        self.core: Any = self.whole.model
        self.language: Any = self.core.language_model
        self.head: Any = self.whole.lm_head
        self.stop_ids = torch.tensor(self.whole.generation_config.eos_token_id)
        self.pad_id: int = self.whole.generation_config.pad_token_id
        # A placeholder that the model wrote itself would stand for a picture that does not exist: such ids are forbidden.
        special = {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        unowned = set(range(self.head.out_features)) - set(self.tokenizer.get_vocab().values())
        self.forbidden_ids = torch.tensor(sorted((special | unowned) - set(self.stop_ids.tolist())))

    def logits(self, hidden: Tensor) -> Tensor:
        """The policy's logits at temperature 1: the head, with forbidden ids at minus infinity."""
        return self.head(hidden).float().index_fill(-1, self.forbidden_ids, -torch.inf)


@dataclass(frozen=True)
class Prompts:
    """The prompts of a step as right-padded rows, and their pictures as patches."""

    ids_PT: Tensor
    real_PT: Tensor
    positions_3PT: Tensor
    last_P: Tensor
    next_position_P: Tensor
    patches: Tensor
    grids_P3: Tensor


def render(model: Model, tasks: list[Task], store: MediaStore) -> Prompts:
    """Questions in the model's chat format. A picture is as many placeholder tokens as the tower makes vectors of it."""
    pictures = [Image.open(io.BytesIO(store.bytes_of(task.messages[0].media[0]))).convert("RGB") for task in tasks]
    seen = model.processor.image_processor(images=pictures, return_tensors="pt")
    rows = []
    for task, grid_3 in zip(tasks, seen.image_grid_thw, strict=True):
        placeholders = "<|image_pad|>" * (int(grid_3.prod()) // model.whole.config.vision_config.spatial_merge_size**2)
        question = f"<|vision_start|>{placeholders}<|vision_end|>{task.messages[0].text}"
        rows.append(model.tokenizer(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").input_ids)
    length = max(len(row) for row in rows)
    ids_PT = torch.tensor([row + [model.pad_id] * (length - len(row)) for row in rows])
    real_PT = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows]).bool()
    # Text has one position per token; the tokens of a picture stand in a grid of rows and columns.
    positions_3PT, _ = model.core.get_rope_index(
        ids_PT,
        mm_token_type_ids=(ids_PT == model.whole.config.image_token_id).long(),
        image_grid_thw=seen.image_grid_thw,
        attention_mask=real_PT.long(),
    )
    last_P = real_PT.sum(1) - 1
    next_position_P = positions_3PT[0].gather(1, last_P[:, None])[:, 0] + 1
    return Prompts(ids_PT, real_PT, positions_3PT, last_P, next_position_P, seen.pixel_values, seen.image_grid_thw)


def embed(model: Model, prompts: Prompts, also: int = 0) -> tuple[Tensor, dict[str, Any]]:
    """Embeddings of the prompts, pictures in their places; and what Qwen3-VL's tower says to the first layers directly.

    ``also`` is how many tokens without pictures follow in every row. The tower sees each picture once, however many
    samples there are.
    """
    seen = model.core.get_image_features(prompts.patches, prompts.grids_P3)
    picture_PT = prompts.ids_PT == model.whole.config.image_token_id
    embeds_PTH = model.language.embed_tokens(prompts.ids_PT)
    embeds_PTH = embeds_PTH.masked_scatter(picture_PT[..., None], torch.cat(seen.pooler_output))
    picture_PS = torch.nn.functional.pad(picture_PT, (0, also))
    return embeds_PTH, {"visual_pos_masks": picture_PS, "deepstack_visual_embeds": seen.deepstack_features}


def prompt_mask(prompts: Prompts) -> Tensor:
    """Who sees whom among a prompt's tokens: every token itself and what stands before it, padding nobody."""
    length = prompts.ids_PT.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril() & prompts.real_PT[:, None, :]


@torch.no_grad()
def sample(model: Model, prompts: Prompts, keys_PG: Tensor | None) -> Tensor:
    """Responses [P, G, R], all at once; after its stop token a response is padding. Without keys: one, the most likely.

    A row holds a prompt once. Its samples grow side by side behind it, a column of G tokens at a time, each seeing the
    prompt and its own earlier tokens, so one cache of keys and values per prompt serves them all.
    """
    rows, count = len(prompts.ids_PT), 1 if keys_PG is None else keys_PG.shape[1]
    cache = transformers.DynamicCache(config=model.language.config)
    embeds_PTH, deepstack = embed(model, prompts)
    hidden_PTH = model.language(
        inputs_embeds=embeds_PTH,
        position_ids=prompts.positions_3PT,
        attention_mask=prompt_mask(prompts)[:, None],
        past_key_values=cache,
        use_cache=True,
        **deepstack,
    ).last_hidden_state
    hidden_PGH = hidden_PTH[torch.arange(rows), prompts.last_P][:, None].expand(-1, count, -1)
    prompt_PGT = prompts.real_PT[:, None].expand(-1, count, -1)
    own_PGG = torch.eye(count, dtype=torch.bool).expand(rows, -1, -1)
    columns: list[Tensor] = []
    stopped_PG = torch.zeros(rows, count, dtype=torch.bool)
    while True:
        logits_PGV = model.logits(hidden_PGH)
        tokens_PG = logits_PGV.argmax(-1) if keys_PG is None else draw(logits_PGV, uniforms(keys_PG, len(columns)))
        columns.append(torch.where(stopped_PG, model.pad_id, tokens_PG))
        stopped_PG = stopped_PG | torch.isin(tokens_PG, model.stop_ids)
        if len(columns) == MAX_NEW_TOKENS or bool(stopped_PG.all()):
            return torch.stack(columns, dim=-1)
        position_P = prompts.next_position_P + len(columns) - 1
        hidden_PGH = model.language(
            inputs_embeds=model.language.embed_tokens(columns[-1]),
            position_ids=position_P[None, :, None].expand(3, -1, count),
            attention_mask=torch.cat([prompt_PGT, *[own_PGG] * len(columns)], dim=-1)[:, None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state


def response_key(seed: int, step: int, task_id: str, episode: int) -> int:
    """64 bits that belong to one response of a run. (The last 0 is the turn: these conversations have only one.)"""
    body = repr((seed, step, f"train:{task_id}", episode, 0)).encode()
    return int.from_bytes(hashlib.blake2b(body, digest_size=8).digest(), "little", signed=True)


def uniforms(keys_PG: Tensor, token: int) -> Tensor:
    """A number in (0, 1) that depends on the response's key and the token's index alone, by the hash splitmix64.

    So what a response draws does not depend on what else is in the batch, nor on the order of anything.
    """

    def shifted(z: Tensor, bits: int) -> Tensor:
        return (z >> bits) & ((1 << (64 - bits)) - 1)

    def mixed(z: Tensor) -> Tensor:
        z = (z ^ shifted(z, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
        z = (z ^ shifted(z, 27)) * (0x94D049BB133111EB - 2**64)
        return z ^ shifted(z, 31)

    offset = ((token + 1) * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
    return (shifted(mixed(mixed(keys_PG) + offset), 12).double() + 0.5) * 2.0**-52


def draw(logits_PGV: Tensor, uniforms_PG: Tensor) -> Tensor:
    """The token at which the running sum of probabilities passes the uniform. Probabilities are whole numbers of 2^-52,
    whose sums are exact, so every machine draws the same token."""
    weights_PGV = ((logits_PGV - logits_PGV.amax(-1, keepdim=True)).exp() * 2.0**52).long()
    running_PGV = weights_PGV.cumsum(-1)
    total_PG1 = running_PGV[..., -1:]
    target_PG1 = torch.minimum((uniforms_PG[..., None] * total_PG1).long(), total_PG1 - 1)
    return torch.searchsorted(running_PGV, target_PG1, right=True)[..., 0]


def written(model: Model, tokens_PGR: Tensor) -> Tensor:
    """Which tokens the model wrote: all up to and with the first stop token."""
    stops_PGR = torch.isin(tokens_PGR, model.stop_ids).long()
    return stops_PGR.cumsum(-1) - stops_PGR == 0


def reward(text: str, answer: str) -> tuple[float, bool]:
    """What a response is paid, and whether it is right: 0.9 for the right answer, 0.1 for the right form."""
    found = re.search(r".*<answer>(.*)</answer>", text, re.DOTALL)
    if found is None:
        return 0.0, False
    given, known = ("".join(filter(str.isalnum, words.casefold())) for words in (found.group(1), answer))
    return 0.9 * (given == known) + 0.1, given == known


def judge(model: Model, tasks: list[Task], tokens_PGR: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards and right or wrong [P, G] of all responses."""
    texts = model.tokenizer.batch_decode(tokens_PGR.flatten(0, 1), skip_special_tokens=True)
    group_size = tokens_PGR.shape[1]
    judged = [reward(text, tasks[i // group_size].answer) for i, text in enumerate(texts)]
    paid, right = zip(*judged, strict=True)
    return torch.tensor(paid, dtype=torch.float64).view(-1, group_size), torch.tensor(right).view(-1, group_size)


def advantages(rewards_PG: Tensor) -> Tensor:
    """GRPO: how much better a response was paid than its group, in standard deviations. No critic is needed.

    A group that was all paid the same teaches nothing: exactly zero.
    """
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdim=True)
    varied_P1 = rewards_PG.amax(1, keepdim=True) > rewards_PG.amin(1, keepdim=True)
    return torch.where(varied_P1, centred_PG / (rewards_PG.std(1, keepdim=True) + 1e-6), 0.0).float()


def logprobs(model: Model, prompts: Prompts, tokens_PGR: Tensor) -> Tensor:
    """Log-probs [P, G, R] of the sampled tokens, with gradient, in one pass.

    A row is [prompt][response 1]…[response G]. The mask lets a response see its prompt and itself but not its neighbours,
    and each continues at the prompt's next position: as if every response had the prompt to itself, computed once.
    """
    rows, count, length = tokens_PGR.shape
    size = prompts.ids_PT.shape[1]
    embeds_PTH, deepstack = embed(model, prompts, also=count * length)
    embeds_PSH = torch.cat([embeds_PTH, model.language.embed_tokens(tokens_PGR.flatten(1))], dim=1)
    after_PGR = (prompts.next_position_P[:, None, None] + torch.arange(length)).expand(-1, count, -1)
    positions_3PS = torch.cat([prompts.positions_3PT, after_PGR.flatten(1).expand(3, -1, -1)], dim=2)
    mask_PSS = torch.zeros(rows, size + count * length, size + count * length, dtype=torch.bool)
    mask_PSS[:, :size, :size] = prompt_mask(prompts)
    mask_PSS[:, size:, :size] = prompts.real_PT[:, None, :]
    mask_PSS[:, size:, size:] = torch.block_diag(*[torch.ones(length, length).tril()] * count).bool()
    hidden_PSH = model.language(
        inputs_embeds=embeds_PSH,
        position_ids=positions_3PS,
        attention_mask=mask_PSS[:, None],
        use_cache=False,
        **deepstack,
    ).last_hidden_state
    # A token is predicted by the one before it: the first of a response by the prompt's last.
    first_PG1H = hidden_PSH[torch.arange(rows), prompts.last_P][:, None, None].expand(-1, count, -1, -1)
    rest_PGRH = hidden_PSH[:, size:].unflatten(1, (count, length))[:, :, :-1]
    logits_PGRV = model.logits(torch.cat([first_PG1H, rest_PGRH], dim=2))
    # Padding after a stop token may be a forbidden id; it is masked from the loss, and a finite stand-in keeps it harmless.
    targets_PGR = tokens_PGR.where(written(model, tokens_PGR), model.stop_ids[0])
    return logits_PGRV.log_softmax(-1).gather(-1, targets_PGR[..., None])[..., 0]


def policy_loss(logprobs_PGR: Tensor, old_PGR: Tensor, advantages_PG: Tensor, written_PGR: Tensor) -> Tensor:
    """The clipped loss of PPO, averaged over all tokens that were written."""
    ratio_PGR = (logprobs_PGR - old_PGR).exp()
    free_PGR = -advantages_PG[..., None] * ratio_PGR
    bound_PGR = -advantages_PG[..., None] * ratio_PGR.clamp(1 - CLIP, 1 + CLIP)
    return (torch.maximum(free_PGR, bound_PGR) * written_PGR).sum() / written_PGR.sum()


@dataclass(frozen=True)
class Step:
    """What one step did."""

    tasks: list[Task]
    tokens_PGR: Tensor
    rewards_PG: Tensor
    right_PG: Tensor
    loss: float
    grad_norm: float


def train_step(
    model: Model, optimizer: torch.optim.Optimizer, tasks: list[Task], store: MediaStore, seed: int, step: int
) -> Step:
    """One step of GRPO: answer, be paid, compare within the group, make the better answers likelier."""
    prompts = render(model, tasks, store)
    keys_PG = torch.tensor([[response_key(seed, step, task.id, g) for g in range(GROUP_SIZE)] for task in tasks])
    tokens_PGR = sample(model, prompts, keys_PG)
    rewards_PG, right_PG = judge(model, tasks, tokens_PGR)
    advantages_PG = advantages(rewards_PG)

    logprobs_PGR = logprobs(model, prompts, tokens_PGR)
    # With one update per step the old policy is the current one, and the ratio is 1: only its gradient matters.
    loss = policy_loss(logprobs_PGR, logprobs_PGR.detach(), advantages_PG, written(model, tokens_PGR))
    optimizer.zero_grad()
    loss.backward()
    grad_norm = torch.nn.utils.clip_grad_norm_(model.whole.parameters(), CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE * min(1.0, step / (WARMUP_STEPS + 1))
    optimizer.step()
    return Step(tasks, tokens_PGR, rewards_PG, right_PG, float(loss.detach()), float(grad_norm))


def accuracy(model: Model, source: Shapes, store: MediaStore) -> dict[str, float]:
    """Greedy accuracy on held-out pictures, by kind of question and over all."""
    verdicts: dict[str, list[bool]] = defaultdict(list)
    for start in range(0, len(source), 128):
        tasks = [source[i] for i in range(start, min(start + 128, len(source)))]
        _, right_P1 = judge(model, tasks, sample(model, render(model, tasks, store), keys_PG=None))
        for task, right in zip(tasks, right_P1[:, 0].tolist(), strict=True):
            verdicts[task.metadata["category"]].append(right)
            verdicts["all"].append(right)
    return {kind: sum(right) / len(right) for kind, right in verdicts.items()}


def main() -> None:
    """Train, and print the curve."""
    arguments = argparse.ArgumentParser(description="GRPO on a tiny vision-language model, in one file.")
    arguments.add_argument("--steps", type=int, default=120)
    arguments.add_argument("--seed", type=int, default=0)
    chosen = arguments.parse_args()

    store = MediaStore()
    held_out = Shapes(store=store, split="test", size=512, picture_size=PICTURE_SIZE)
    stream = TaskStream([Shapes(store=store, size=TRAIN_SIZE, picture_size=PICTURE_SIZE)], [1.0], seed=chosen.seed)
    model = Model(CHECKPOINT)
    optimizer = torch.optim.AdamW(model.whole.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)

    began = time.perf_counter()
    for step in range(chosen.steps + 1):
        if step:
            tasks = list(stream.draw((step - 1) * PROMPTS_PER_STEP, PROMPTS_PER_STEP).tasks)
            done = train_step(model, optimizer, tasks, store, chosen.seed, step)
            paid = float(done.rewards_PG.mean())
            print(f"step {step:3d}  reward {paid:.3f}  |{'█' * int(40 * paid):40}|", flush=True)
        if step % 40 == 0 or step == chosen.steps:
            kinds = "  ".join(f"{kind} {share:.2f}" for kind, share in accuracy(model, held_out, store).items())
            print(f"held out after {time.perf_counter() - began:.0f} s, greedy: {kinds}", flush=True)


if __name__ == "__main__":
    main()
