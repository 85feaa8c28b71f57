"""VAGEN's names of environments and settings, as ours: {"env_name": "frozenlake", "env_config": {"is_slippery": false}}.

Also the seeds that its data files stand for, so that a task here is the one that it is there.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from sensorium.vocabulary.errors import RecipeError

WITHOUT_LIMIT = 10**6
"""VAGEN counts the turns on its own side."""

OPTIONS = {
    "render_mode": "view",
    "is_slippery": "slippery",
    "max_actions_per_step": "max_actions_per_turn",
    "prompt_format": "response_format",
    "num_boxes": "boxes",
    "dim_room": "size",
    "max_solution_steps": "max_solution",
    "min_solution_steps": "min_solution",
}
PLAYED_BY_TURNS = ("frozen_lake", "sokoban", "svg", "navigation")
OF_NAVIGATION = {"success_threshold": "success_distance", "resolution": "side", "fov": "field_of_view"}
STATE_REWARD = ("use_state_reward", "grounding_reward_weight", "worldmodeling_reward_weight")
VALUES: dict[str, dict[str, str]] = {"view": {"vision": "picture"}}
MOST_SEED = 2**31 - 1


def environment_of(wish: Any, offered: Collection[str]) -> tuple[str, dict[str, Any]]:
    """Our name (of those offered) and options; what has no counterpart here is refused by the environment's own checks."""
    config = wish.get("env_config") or {} if isinstance(wish, dict) else None
    if not isinstance(config, dict):
        raise RecipeError("an environment of VAGEN's is {env_name: name, env_config: {…}}.")
    name = wish.get("env_name", config.get("env_name"))
    if name is None and len(offered) == 1:
        (name,) = offered
    plain = {offer.replace("_", "").lower(): offer for offer in offered}
    known = plain.get(str(name).replace("_", "").lower(), str(name))
    options: dict[str, Any] = {"max_turns": WITHOUT_LIMIT, "prompt": "full"} if known in PLAYED_BY_TURNS else {}
    config = _with_state_reward(config)
    if known == "navigation" and "eval_set" in config:
        raise RecipeError(
            "VAGEN's navigation plays the rooms of AI2-THOR (eval_set); here that is the environment ai2thor with tasks: "
            "the file of that name. navigation has rooms of its own: leave eval_set out to play those."
        )
    for key, value in config.items():
        if key != "env_name":
            option = (OPTIONS | (OF_NAVIGATION if known == "navigation" else {})).get(str(key), str(key))
            value = value[0] if option == "size" and isinstance(value, list) and value else value
            options[option] = VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value
    return known, options


def _with_state_reward(config: dict[str, Any]) -> dict[str, Any]:
    """VAGEN switches the pay for descriptions on, and weighs its two parts; here it is one number, 0 where it is off."""
    found = {key: value for key, value in config.items() if key not in STATE_REWARD}
    if config.get("use_state_reward"):
        weights = [config.get(key, 0.5) for key in STATE_REWARD[1:]]
        if weights[0] != weights[1]:
            raise RecipeError(f"{STATE_REWARD[1]} and {STATE_REWARD[2]} differ; here both are one state_reward.")
        found["state_reward"] = weights[0]
    return found


def seeds_of(count: int, seed: Sequence[int] | int, name: str, index: int = 0, base_seed: int = 0) -> list[int]:
    """The seeds of an entry of VAGEN's data file: ``[a]`` of all, ``[a, b]`` with repeats, ``[a, b, k]`` at most k times.

    ``seeds_of(3, [1, 10000, 1], "FrozenLake")`` is [3768, 111, 7926].
    """
    seed = [seed] if isinstance(seed, int) else seed
    if len(seed) not in (1, 2, 3) or not all(isinstance(number, int) and not isinstance(number, bool) for number in seed):
        raise RecipeError(f"a seed of VAGEN's is [a], [a, b] or [a, b, k] of whole numbers, not {list(seed)!r:.60}.")
    text = f"{base_seed}|{index}|{name}|seed-{list(seed)}"
    chance = random.Random(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little"))
    if len(seed) == 1:
        return [chance.randint(0, MOST_SEED) for _ in range(count)]
    low, high = seed[0], seed[1]
    if high < low:
        raise RecipeError(f"{name}: there is no seed from {low} to {high}.")
    if len(seed) == 2:
        return [chance.randint(low, high) for _ in range(count)]
    if (high - low + 1) * seed[2] < count:
        raise RecipeError(f"{name}: {count} seeds from {low} to {high}, each at most {seed[2]} times, are not to be had.")
    if seed[2] == 1:
        return chance.sample(range(low, high + 1), count)
    seeds: list[int] = []
    used: Counter[int] = Counter()
    while len(seeds) < count:
        number = chance.randint(low, high)
        if used[number] < seed[2]:
            used[number] += 1
            seeds.append(number)
    return seeds
