"""Updates that are computed by one process and by teams of ranks, to be compared: metrics, gradients and weights.

A rank is a process. It is started once and computes all scenarios, one after the other:

    python -m tests.learner.sharded.scenarios RANK SIZE FOLDER NAME…

``NAME@2`` computes a scenario with ``cluster.sequence_parallel`` 2.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from sensorium.learner.credited_episode import CreditedEpisode, CriticValues
from sensorium.learner.critic import Critic
from sensorium.learner.forward import hidden_states
from sensorium.learner.learner import Learner
from sensorium.learner.optimizer import Optimizer
from sensorium.learner.saved_state import spread_like, whole_of
from sensorium.learner.team import ALONE, Team
from sensorium.models.policy import FrozenCopy, Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.schema import (
    AdvantageSection,
    AlgorithmSection,
    BatchSection,
    CorrectionSection,
    CriticSection,
    KLSection,
    LossSection,
    OptimizerSection,
)
from sensorium.vocabulary import Segment, Thread
from sensorium.vocabulary.episode import Routes

from ...models.clips import clip
from ..played import Groups, Player, distribution, make_learner, open_policy, stock_model, stock_rows


def pictures(player: Player) -> Groups:
    """One group has no picture and one no advantage, so ranks differ in what they have to run."""
    silent = [CreditedEpisode(s.episode, tuple(a * 0 for a in s.advantages)) for s in player.single_turn(size=2)]
    return [player.single_turn(size=3), player.single_turn(size=2, pictures=0), player.windowed(size=2, turns=3), silent]


def long_video(player: Player) -> Groups:
    """One prompt that is nearly all a video, of which no rank sees more than its share."""
    film = clip(player.policy.chat.store, 3, 48, 84, 84, 24.0)
    return [player.single_turn(size=3, pictures=0, more=[film])]


def videos(player: Player) -> Groups:
    """Of two ranks one has the video and the other nothing to look at."""
    return [player.single_turn(size=2, pictures=0, more=[player.film()]), player.single_turn(size=4, pictures=0)]


def with_routes(player: Player) -> Groups:
    """As ``pictures``; but for the first group, an engine recorded experts, here drawn at random."""
    groups, policy = pictures(player), player.policy
    experts, top_k, layers = policy.routers[0].num_experts, policy.experts_per_token, len(policy.routers)

    def routed(thread: Thread, written: Segment) -> Segment:
        tokens = sum(len(policy.chat.layout(segment)) for segment in thread.segments) - 1
        ids = np.stack([player.rng.permutation(experts)[:top_k] for _ in range(tokens * layers)]).astype(np.uint8)
        return replace(written, routes=Routes(0, ids.tobytes(), b"", layers, top_k, 1))

    def sample(one: CreditedEpisode) -> CreditedEpisode:
        turns = tuple(
            replace(turn, response=routed(e.threads[turn.thread], turn.response)) for e in [one.episode] for turn in e.turns
        )
        return replace(one, episode=replace(one.episode, turns=turns))

    return [groups[0], *([sample(one) for one in group] for group in groups[1:])]


PLAIN = AlgorithmSection()
SPLIT = BatchSection(tokens_per_microbatch=120)


@dataclass(frozen=True)
class Scenario:
    """A family's tiny checkpoint, what is played, and how it is learned."""

    family: str
    play: Callable[[Player], Groups]
    algorithm: AlgorithmSection = PLAIN
    batch: BatchSection = SPLIT
    freeze: tuple[str, ...] = ()
    offload: bool = False
    dtype: str = "float32"


CLIP = LossSection(clip_low=0.02, clip_high=0.03, entropy_coef=0.01, aggregation="sequence_mean_token_mean")
FULL = AlgorithmSection(loss=CLIP, kl=KLSection(coef=0.05), correction=CorrectionSection(weights="token"))
VALUES = CriticSection(optimizer=OptimizerSection(lr=1e-4))
PPO = AlgorithmSection(advantage=AdvantageSection(name="masked_gae"), critic=VALUES)
TWICE = BatchSection(tokens_per_microbatch=120, epochs_per_step=2)
SCENARIOS = {
    "pictures": Scenario("qwen3_vl", pictures, FULL),
    "videos": Scenario("qwen2_5_vl", videos, AlgorithmSection(loss=LossSection(name="gspo")), TWICE),
    "experts": Scenario(
        "qwen3_vl_moe",
        with_routes,
        AlgorithmSection(router_coef=0.1, router_replay=True),
        freeze=("vision", "projector"),
    ),
    "states": Scenario("qwen3_5", pictures, FULL),
    "critic": Scenario("qwen2_5_vl", pictures, PPO, offload=True),
    "long video": Scenario("qwen3_vl", long_video),
    "bfloat16": Scenario("smallest", videos, dtype="bfloat16"),
}

# Those whose tokens ranks can share: gated delta nets read them one after the other.
SHAREABLE = [
    name
    for name, scenario in SCENARIOS.items()
    if scenario.dtype == "float32" and not FAMILIES[scenario.family].has_delta_nets
]


SMALLEST = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    "vision_depth": 1, "vision_hidden_size": 16, "vision_intermediate_size": 16, "vision_num_heads": 1,
    "vision_fullatt_block_indexes": [0],
}  # fmt: skip


def make_checkpoints(folder: Path) -> None:
    """The tiny checkpoints of all scenarios; bfloat16 has a smaller one, which a CPU computes a thousand times slower."""
    for family in sorted({scenario.family for scenario in SCENARIOS.values()}):
        name, sizes = ("qwen2_5_vl", SMALLEST) if family == "smallest" else (family, {})
        make_tiny(name, folder / family, initializer_range=0.06, vision_initializer_range=0.15, **sizes)


@dataclass
class Outcome:
    """What a step computed: its metrics, the gradients of each update, and the weights after it.

    ``kept``: the most bytes that the layers over a micro-batch left for its backward pass, weights not counted;
    ``kept_by_towers``: that the towers left for theirs.
    """

    metrics: dict[str, float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]
    kept: int = 0
    kept_by_towers: int = 0


def _counted(part: Callable[..., Any], found: list[int]) -> Callable[..., Any]:
    """A function that adds to ``found`` how many bytes it keeps for the backward pass, weights not counted."""

    def counted(*given: Any) -> Any:
        storages: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            base = tensor._base if tensor._is_view() else tensor
            if not isinstance(base, torch.nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            result = part(*given)
        found.append(sum(storages.values()))
        return result

    return counted


def compute(scenario: Scenario, folder: Path, team: Team = ALONE) -> Outcome:
    """One step of a scenario on the checkpoint of its family."""
    policy = open_policy(folder / scenario.family, scenario.dtype)
    groups = scenario.play(
        Player(policy, engine=_stock_logprobs(folder / scenario.family, policy, scenario.play(Player(policy))))
    )
    learner = _learner(scenario, policy, team)
    if learner.critic is not None:
        groups = _taught(learner, groups)
    gradients: list[dict[str, Tensor]] = []
    step = Optimizer.step

    def noted(self: Optimizer, share: float, norm: Tensor) -> None:
        found = {name: whole_of(spread_like(g, self._tensors[name].parameter)) for name, g in self.gradients().items()}
        gradients.append({name: gradient.clone() for name, gradient in found.items()})
        step(self, share, norm)

    kept, by_towers = list[int](), list[int]()
    layers = patch("sensorium.learner.update.hidden_states", _counted(hidden_states, kept))
    towers = patch.object(Policy, "encode", _counted(Policy.encode, by_towers))
    with patch.object(Optimizer, "step", noted), layers, towers:
        metrics = learner.step(groups, costs=[float(3 + i) for i in range(len(groups))])
    weights = {name: whole_of(weight).clone() for name, weight in learner.weights().items()}
    return Outcome(metrics, gradients, weights, max(kept), max(by_towers))


def _stock_logprobs(checkpoint: Path, policy: Policy, groups: Groups) -> dict[str, list[float]]:
    """What the stock model, at a slightly other temperature, says of the responses: an engine near the learner."""
    found: dict[str, list[float]] = {}

    def row(sample: CreditedEpisode, turn: int, logits: Tensor, tokens: Tensor) -> None:
        logprobs = distribution(policy, logits, temperature=1.05).gather(1, tokens[:, None])
        found[sample.episode.turns[turn].response.text] = logprobs[:, 0].tolist()

    with torch.no_grad():
        stock_rows(stock_model(checkpoint), policy, groups, row)
    return found


def _learner(scenario: Scenario, policy: Policy, team: Team) -> Learner:
    algorithm = scenario.algorithm
    reference = policy.frozen_copy() if algorithm.kl.coef else None
    trunk = policy.copy() if algorithm.critic is VALUES else None
    if team is not ALONE:
        from sensorium.learner.sharding import shard_policy

        shard_policy(policy, team, scenario.freeze, offload=scenario.offload)
        if reference is not None:
            shard_policy(reference, team, policy.groups())
        if trunk is not None:
            shard_policy(trunk, team, VALUES.freeze)
    critic = None if trunk is None else Critic(trunk, algorithm.critic, total_steps=10, team=team)
    if critic is not None:
        torch.nn.init.normal_(critic.head.weight, std=0.3, generator=torch.Generator().manual_seed(0))
    return make_learner(
        policy,
        optimizer=OptimizerSection(),
        algorithm=algorithm,
        batch=scenario.batch,
        freeze=scenario.freeze,
        reference=None if reference is None else FrozenCopy(reference),
        critic=critic,
        team=team,
    )


def _taught(learner: Learner, groups: Groups) -> Groups:
    """The groups with the critic's values, and targets above them: a sum that cancels would show its rounding."""
    found = learner.assess([[sample.episode for sample in group] for group in groups])
    assert found.values_P is not None
    random = torch.Generator().manual_seed(1)
    lengths = [sum(stretch.length for stretch in several) for several in found.positions.stretches]
    values = iter(found.values_P.split(lengths))

    def one(sample: CreditedEpisode) -> CreditedEpisode:
        values_P = next(values)
        return replace(sample, critic_values=CriticValues(values_P, values_P + torch.rand(len(values_P), generator=random)))

    return [[one(sample) for sample in group] for group in groups]


def main(rank: str, size: str, folder: str, *names: str) -> None:
    """Compute scenarios as a rank, and write what came of each to ``SIZE-RANK-NAME.pt``."""
    import torch.distributed as dist

    from sensorium.learner.sharding import RankTeam

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    meeting = f"file://{folder}/meeting-{size}"
    dist.init_process_group("gloo", init_method=meeting, rank=int(rank), world_size=int(size), timeout=timedelta(minutes=5))
    teams = {
        sharing: RankTeam(torch.device("cpu"), int(sharing or 1))
        for sharing in sorted({n.partition("@")[2] for n in names})
    }
    for name in names:
        scenario, _, sharing = name.partition("@")
        outcome: Any = compute(SCENARIOS[scenario], Path(folder), teams[sharing])
        torch.save(vars(outcome), Path(folder) / f"{size}-{rank}-{name}.pt")
    if rank == "0" and "bfloat16" in names:  # here: after it, a CPU without bfloat16 rounds otherwise in this process
        torch.save(vars(compute(SCENARIOS["bfloat16"], Path(folder))), Path(folder) / "1-0-bfloat16.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
