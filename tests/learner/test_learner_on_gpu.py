"""On a GPU the learner follows the stock model in float32 on the CPU, within stated bounds, and moves its weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.learner.learner import CreditedEpisode
from sensorium.recipe.schema import BatchSection, OptimizerSection

from .played import Player, distribution, make_learner, open_policy, stock_model, stock_rows

# Relative to the largest logit; in bfloat16 eight bits remain of the residual stream and of the logits.
BOUNDS = {"float32": 1e-4, "bfloat16": 0.05}
# Of the angle between the whole gradient and the stock model's.
COSINES = {"float32": 0.99999, "bfloat16": 0.98}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_logprobs_and_gradients_on_the_gpu(family: str, dtype: str, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints[family], dtype, device="cuda")
    player = Player(policy)
    groups = [player.single_turn(size=4), player.single_turn(pictures=3), player.conversation(), player.windowed()]
    learner = make_learner(policy, batch=BatchSection(tokens_per_microbatch=200), optimizer=OptimizerSection(lr=1e-6))
    found = iter([turn.cpu() for group in learner.logprobs(groups) for turns in group for turn in turns])
    stock = stock_model(checkpoints[family])
    count = sum(sample.episode.sampled_tokens for group in groups for sample in group)
    gaps = []

    def descend(sample: CreditedEpisode, turn: int, logits: Tensor, tokens: Tensor) -> None:
        expected = distribution(policy, logits, 1.0).gather(1, tokens[:, None])[:, 0]
        gaps.append(float((next(found) - expected).detach().abs().max()))
        (-(sample.advantages[turn] * expected).sum() / count).backward()

    scale = stock_rows(stock, policy, groups, descend)
    assert max(gaps) <= BOUNDS[dtype] * scale

    gradients: dict[str, Tensor] = {}
    optimizer = learner._optimizer
    step = optimizer.step

    def keep(share: float, norm: Tensor) -> None:
        gradients.update({name: gradient.cpu() for name, gradient in optimizer.gradients().items()})
        step(share, norm)

    optimizer.step = keep  # type: ignore[method-assign]
    before = {name: master.clone() for name, master in optimizer.masters().items()}
    learner.step(groups)
    flat = torch.cat([gradients[name].flatten() for name, _ in stock.named_parameters()])
    expected = torch.cat([p.grad.flatten() for _, p in stock.named_parameters()])
    assert float(torch.nn.functional.cosine_similarity(flat, expected, dim=0)) >= COSINES[dtype]
    assert float(flat.norm() / expected.norm()) == pytest.approx(1, abs=1 - COSINES[dtype])
    assert all(not torch.equal(master, before[name]) for name, master in optimizer.masters().items())
