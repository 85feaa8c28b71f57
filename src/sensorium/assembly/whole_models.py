"""How the models of a learner are held: whole in this process, or otherwise by a class that takes its place."""

from collections.abc import Sequence

from sensorium.learner.team import ALONE, Team
from sensorium.models.policy import Policy


class WholeModels:
    """Every model is whole, and its only rank is this process."""

    team: Team = ALONE

    def hold(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """A model that was just loaded, as it is held from now on; groups of ``freeze`` will not learn."""
        return policy

    def copy(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """A copy of a model that is held."""
        return policy.copy()
