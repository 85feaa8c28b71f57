"""A run whose model now and then writes nothing at all goes on, and counts those episodes."""

from pathlib import Path

import yaml

from sensorium.engines.protocol import Capabilities, LiveEpisodes, Request, Response, WeightSource
from sensorium.models.policy import Policy
from sensorium.recipe.load import parse_recipe
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train
from sensorium.vocabulary import Episode, Score, Task
from tests.recipes import quick

HERE = "tests.trainer.test_empty_responses"
RECIPE = quick(
    "empty",
    model={"path": "tiny:qwen2_5_vl"},
    tasks={"train": [{"source": "shapes"}]},
    batch={"prompts_per_step": 2, "group_size": 4},
    rollout={"engine": f"{HERE}:Taciturn", "max_new_tokens": 4},
    rewards={"terms": [{"name": f"{HERE}:ByIndex"}]},
)


class Taciturn:
    """Writes two tokens, and nothing in the first attempt at every task."""

    def __init__(self, policy: Policy, lockstep: bool) -> None:
        self.capabilities = Capabilities(policy.chat.modalities, deterministic=True)
        self.version = 0
        self._policy = policy

    def start(self) -> None: ...

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        count = 0 if request.name.endswith("/0/0") else 2  # named by episode, whose last part is its place, and turn
        tokens = self._policy.chat.respond("red blue", request.name).tokens[:count]
        zeros = (-1.0,) * len(tokens)
        return Response(self._policy.chat.written(tokens, zeros, zeros, request.name), "stop")

    def release(self, thread: str) -> None: ...

    def update_weights(self, source: WeightSource, version: int) -> None: ...

    def reset_cache(self) -> None: ...

    def close(self) -> None: ...


class ByIndex:
    """Pays every member of a group something else, who wrote nothing most."""

    name = "by_index"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        return (Score(self.name, float(episode.index) if episode.response else 10.0),)


def test_a_run_goes_on_without_the_episodes_that_wrote_nothing(tmp_path: Path) -> None:
    recipe = parse_recipe(yaml.safe_dump(RECIPE | {"run_dir": str(tmp_path / "run")}), "recipe")
    train(recipe)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["episodes/empty"] for row in rows] == [2, 2]
    assert all(row["episodes/dropped"] == 2 and row["groups/trained"] == 2 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)
