"""The models of a rank: spread over the team as soon as they are loaded."""

from collections.abc import Sequence
from pathlib import Path

from sensorium.assembly.models import load_trained
from sensorium.assembly.whole_models import WholeModels
from sensorium.learner.sharded.rank_team import RankTeam
from sensorium.learner.sharded.sharding import copy_weights, shard_policy
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe


class ShardedModels(WholeModels):
    """Every model is spread over the ranks of a team, by the recipe's cluster section."""

    team: RankTeam

    def __init__(self, recipe: Recipe, team: RankTeam, saved: Path | None) -> None:
        self._recipe, self.team, self._saved = recipe, team, saved

    def hold(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """Spread a model in place."""
        shard_policy(policy, self.team, freeze, offload=self._recipe.cluster.offload)
        return policy

    def copy(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """A model with the weights of one that is spread: loaded again, since a spread one cannot be copied."""
        chat = policy.chat
        copy = load_trained(self._recipe, chat.store, self._saved, chat.decoder)
        copy.chat.share_media(chat)
        copy.version = policy.version
        self.hold(copy, freeze)
        copy_weights(policy.model, copy.model)
        return copy
