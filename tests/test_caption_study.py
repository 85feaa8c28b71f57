"""The committed results of caption RL hold what the docs say of them."""

import json
from pathlib import Path

import pytest

from studies.word_reader import letter_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("kind", "things"), [("image", "pictures"), ("video", "videos")])
def test_captions_tell_more_after_training_and_nothing_of_other_things(kind: str, things: str) -> None:
    result = json.loads((ROOT / "studies" / "results" / f"captions_{kind}.json").read_text())
    page = (ROOT / "docs/guides/services.md").read_text()
    swapped = f"after, {things} swapped"
    for run in result["runs"]:
        assert run["readers"]["first"]["own"] >= 0.98
        looks = [look for look in run if look.startswith(("before", "after"))]
        shares = {(look, mode): run[look][mode]["terms"]["caption_qa"] for look in looks for mode in ("sampled", "greedy")}
        assert min(run[when][mode]["tasks"] for when, mode in shares) >= 500
        assert max(run[when][mode]["missing"] for when, mode in shares) == 0
        assert shares["after", "sampled"] - shares["before", "sampled"] >= 0.2
        assert shares["after", "greedy"] - shares["before", "greedy"] >= 0.1
        for mode in ("sampled", "greedy"):
            assert abs(shares[swapped, mode] - run[f"chance with {things} swapped"]) < 0.05
            for reader in set(run["readers"]) - {"first"}:  # those that took no part in training
                assert shares[f"after, {reader} reader", mode] - shares[f"before, {reader} reader", mode] >= 0.1
            if kind == "video":
                assert run["after"][mode]["terms"]["timestamps"] >= 0.95
        if run["seed"] == 0:
            assert all(f"{share:.3f}" in page for share in shares.values())
    assert any("after, second reader" in run for run in result["runs"])


def test_the_reader_that_was_never_trained_reads_words() -> None:
    asked = '"[00:02] a red circle"\n%s?\nA) blue\nB) red\nC) green\nD) can not answer'
    assert letter_of(asked) == "B"
    assert letter_of('"[00:02] a red circle"\nWhen?\nA) 3\nB) 1\nC) 2\nD) can not answer') == "C"
    assert letter_of('"a red and blue circle"\nWhich?\nA) blue\nB) red\nC) can not answer') == "C"
