"""The committed result of caption RL holds what the docs say of it."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_captions_of_pictures_tell_more_after_training_and_nothing_of_other_pictures() -> None:
    result = json.loads((ROOT / "studies" / "results" / "captions_image.json").read_text())
    page = (ROOT / "docs" / "services.md").read_text()
    for run in result["runs"]:
        shares = {
            (when, mode): run[when][mode]["terms"]["caption_qa"]
            for when in ("before", "after", "after, pictures swapped")
            for mode in ("sampled", "greedy")
        }
        assert min(run[when][mode]["tasks"] for when, mode in shares) >= 500
        assert max(run[when][mode]["missing"] for when, mode in shares) == 0
        assert shares["after", "sampled"] - shares["before", "sampled"] >= 0.2
        assert shares["after", "greedy"] - shares["before", "greedy"] >= 0.1
        for mode in ("sampled", "greedy"):
            assert abs(shares["after, pictures swapped", mode] - run["chance with pictures swapped"]) < 0.05
        if run["seed"] == 0:
            assert all(
                f"{shares[when, mode]:.3f}" in page for when in ("before", "after") for mode in ("sampled", "greedy")
            )
