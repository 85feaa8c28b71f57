"""Aggregation against the formulas written out, and its independence from how tokens are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sensorium.algorithms.losses import sequence_weights

NAMES = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
losses = st.lists(st.lists(st.floats(-5, 5), max_size=6), min_size=1, max_size=8).filter(lambda s: any(s))


def plain(name: str, sequences: list[list[float]], constant: float) -> float:
    present = [s for s in sequences if s]
    if name == "token_mean":
        return sum(map(sum, present)) / sum(map(len, present))
    per_sequence = {
        "sequence_mean_token_mean": lambda s: sum(s) / len(s),
        "sequence_mean_token_sum": sum,
        "constant": lambda s: sum(s) / constant,
    }[name]
    return sum(map(per_sequence, present)) / len(present)


@given(losses, st.sampled_from(NAMES), st.floats(0.5, 100), st.randoms())
def test_weighted_sum_equals_the_formula_however_tokens_are_cut(sequences, name, constant, random) -> None:
    weights = sequence_weights(name, torch.tensor([len(s) for s in sequences]), constant=constant).tolist()
    tokens = [(weights[s], value) for s, values in enumerate(sequences) for value in values]
    random.shuffle(tokens)
    cut = random.randrange(len(tokens) + 1)
    total = sum(w * v for w, v in tokens[:cut]) + sum(w * v for w, v in tokens[cut:])
    assert total == pytest.approx(plain(name, sequences, constant), rel=1e-5, abs=1e-5)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="median"):
        sequence_weights("median", torch.tensor([1]))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_a_sequence_that_does_not_count_weighs_nothing(aggregation: str) -> None:
    """Its tokens may still be there: so rejected sequences drop out."""
    weights_S = sequence_weights(aggregation, torch.tensor([3, 0, 2]), constant=4.0)
    assert weights_S[1] == 0
    assert weights_S[[0, 2]].equal(sequence_weights(aggregation, torch.tensor([3, 2]), constant=4.0))
