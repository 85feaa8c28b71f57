"""GAE over the model's tokens alone: from the end of a response, the next token is the first of the next response."""

from functools import partial

from sensorium.algorithms import gae
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.written import over_written


def estimate(episodes: Episodes, *, gamma: float, lam: float) -> Credit:
    """As ``gae``, with the environment's positions left out of δ, discounts and targets."""
    return over_written(episodes, partial(gae.estimate, gamma=gamma, lam=lam))
