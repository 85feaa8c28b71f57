"""The learner of a run as the trainer sees it: what holds the weights and trains them, wherever it is.

Everything that goes in and out is plain data (episodes, samples, numbers, tensors, paths), so a learner may work in another
thread or process, or be sharded over many devices. A step of the trainer asks it, in this order:

    assess(groups)       what credit must know of the sampled episodes
    step(samples, loss)  all updates; returns metrics
    token_measures(ids)  entropies and mismatches that the step found, of the episodes that are logged
    weights()            what the engine samples with from now on, counted by ``version``
    problem(), save()    where the model is measured or saved
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from sensorium.learner.credited_episode import Assessment, Groups, TokenMeasures
from sensorium.vocabulary.episode import Episode


class RunLearner(Protocol):
    """Trains one policy through the stages of a run: the supervised warm start, if there is one, then RL.

    It is built with the weights that the run starts from, or with those of the checkpoint that it goes on from.
    """

    @property
    def version(self) -> int:
        """How many updates the policy has had."""
        ...

    def begin_rl(self) -> None:
        """Begin RL: with a new optimizer and critic, and the policy as it is now as the KL reference."""
        ...

    def assess(self, groups: Sequence[Sequence[Episode]]) -> Assessment:
        """Positions of the episodes, and what the models think of them, as far as credit needs it."""
        ...

    def step(self, groups: Groups, loss: str) -> dict[str, float]:
        """All updates of one step; returns its metrics. Raises NonFiniteUpdate with the weights as they were."""
        ...

    def token_measures(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        """Entropies and mismatches that the last step found, for those of these episodes that it trained on."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters that learn, by their name in the model. They may be the live ones: copy, do not change them."""
        ...

    def problem(self) -> str:
        """Why the model must not be saved or measured (it holds or gives numbers that are not finite); "" if it may."""
        ...

    def save(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model, and beside it in ``trainer/`` whatever ``load`` needs."""
        ...

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called; the policy's weights are those of the folder already."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
