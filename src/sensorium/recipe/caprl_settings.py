"""The environment variables of CapRL's training scripts, as overrides of the recipes caprl_image and caprl_video.

    CAPTION_MODEL=/captioner DATASET=rows.jsonl SAVE_DIR=/runs BATCH_SIZE=64 sensorium train caprl_video --caprl-env
    → model.path=/captioner tasks.train.0.options.path=rows.jsonl run_dir=/runs/caprl_video batch.prompts_per_step=64 …

Those of the reward service (REWARD_MODEL, REWARD_QA_NUM, …) are read by ``sensorium serve reward``.
"""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

from sensorium.vocabulary.errors import RecipeError

NEEDED = ("CAPTION_MODEL", "DATASET", "SAVE_DIR")
KEYS = {
    "CAPTION_MODEL": "model.path",
    "DATASET": "tasks.train.0.options.path",
    "BATCH_SIZE": "batch.prompts_per_step",
    "ROLLOUT_N": "batch.group_size",
    "SAVE_FREQ": "checkpoint.every",
    "ACTOR_LR": "optimizer.lr",
    "MAX_RESPONSE_LENGTH": "rollout.max_new_tokens",
}
OF_TERMS = {
    "FORMAT_REWARD_WEIGHT": ("timestamps", "weight"),
    "REWARD_LENGTH_WEIGHT": ("token_length", "weight"),
    "REWARD_LENGTH_L1": ("token_length", "options.full_until"),
    "REWARD_LENGTH_L2": ("token_length", "options.none_from"),
}
LENGTHS = {"MAX_PROMPT_LENGTH": 4096, "MAX_RESPONSE_LENGTH": 4096}
PORT, BATCH, EPOCHS = "18889", "128", "3"


def caprl_overrides(environment: Mapping[str, str], recipe: str, terms: Sequence[str]) -> list[str]:
    """The overrides that the variables stand for; ``terms`` are the names of the recipe's reward terms, in order."""
    given = {name: value for name, value in environment.items() if value}
    if lacking := [name for name in NEEDED if name not in given]:
        raise RecipeError(f"--caprl-env: the environment variable {lacking[0]} is needed and not set.")
    found = [f"{key}={given[name]}" for name, key in KEYS.items() if name in given]
    name = given.get("RUN_NAME", Path(recipe).stem)
    found += [f"name={name}", f"run_dir={Path(given['SAVE_DIR']) / name}"]
    if any(key in given for key in LENGTHS):
        most = sum(_whole(given, key, str(usual)) for key, usual in LENGTHS.items())
        found.append(f"rollout.max_context_tokens={most}")
    for variable, (term, key) in OF_TERMS.items():
        if variable in given and term in terms:
            found.append(f"rewards.terms.{list(terms).index(term)}.{key}={given[variable]}")
    if "REWARD_REMOTE_URL" in given or "REWARD_NODE_IP" in given:
        usual = f"http://{given.get('REWARD_NODE_IP', '')}:{given.get('REWARD_PORT', PORT)}"
        servers = [url.strip() for url in given.get("REWARD_REMOTE_URL", usual).split(",")]
        found.append(f"rewards.terms.0.options.servers={json.dumps(servers)}")
    if any(name.startswith("WANDB_") for name in given):
        found.append("logging.loggers=[wandb]")
    epochs, batch = _whole(given, "TOTAL_EPOCHS", EPOCHS), _whole(given, "BATCH_SIZE", BATCH)
    return [*found, f"steps={ceil(epochs * _rows(Path(given['DATASET'])) / batch)}"]


def _whole(given: Mapping[str, str], name: str, usual: str) -> int:
    try:
        number = int(given.get(name, usual))
    except ValueError as error:
        raise RecipeError(f"--caprl-env: {name} is '{given[name]:.40}', which is no whole number.") from error
    if number < 1:
        raise RecipeError(f"--caprl-env: {name} is {number}; it must be 1 or more.")
    return number


def _rows(path: Path) -> int:
    """How many rows a file has, which says how many steps an epoch has."""
    try:
        if path.suffix == ".parquet":
            from pyarrow.parquet import read_metadata

            return int(read_metadata(path).num_rows)
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)
    except OSError as error:
        raise RecipeError(f"--caprl-env: DATASET '{path}' cannot be read: {error}.") from error
