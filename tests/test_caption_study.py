"""The committed results of caption RL hold what the docs say of them."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("kind", "things"), [("image", "pictures"), ("video", "videos")])
def test_captions_tell_more_after_training_and_nothing_of_other_things(kind: str, things: str) -> None:
    result = json.loads((ROOT / "studies" / "results" / f"captions_{kind}.json").read_text())
    page = (ROOT / "docs" / "services.md").read_text()
    swapped = f"after, {things} swapped"
    assert result["readers"]["first"]["own"] >= 0.98
    for run in result["runs"]:
        looks = [look for look in run if look.startswith(("before", "after"))]
        shares = {(look, mode): run[look][mode]["terms"]["caption_qa"] for look in looks for mode in ("sampled", "greedy")}
        assert min(run[when][mode]["tasks"] for when, mode in shares) >= 500
        assert max(run[when][mode]["missing"] for when, mode in shares) == 0
        assert shares["after", "sampled"] - shares["before", "sampled"] >= 0.2
        assert shares["after", "greedy"] - shares["before", "greedy"] >= 0.1
        for mode in ("sampled", "greedy"):
            assert abs(shares[swapped, mode] - run[f"chance with {things} swapped"]) < 0.05
            if "after, second reader" in run:
                assert shares["after, second reader", mode] - shares["before, second reader", mode] >= 0.1
            if kind == "video":
                assert run["after"][mode]["terms"]["timestamps"] >= 0.95
        if run["seed"] == 0:
            assert all(f"{share:.3f}" in page for share in shares.values())
    assert any("after, second reader" in run for run in result["runs"])
