"""VAGEN's names of environments and settings, as ours: {"env_name": "frozenlake", "env_config": {"is_slippery": false}}."""

from typing import Any

from sensorium.envs.remote.wire import Json
from sensorium.services.offers import Offers
from sensorium.vocabulary.errors import RecipeError

WITHOUT_LIMIT = 10**6
"""VAGEN counts the turns on its own side."""

KEYS = {
    "render_mode": "view",
    "is_slippery": "slippery",
    "max_actions_per_step": "max_actions_per_turn",
    "prompt_format": "response_format",
    "num_boxes": "boxes",
    "dim_room": "size",
    "max_solution_steps": "max_solution",
    "min_solution_steps": "min_solution",
}
VALUES: dict[str, dict[Any, Any]] = {"view": {"vision": "picture"}}


def environment_of(wish: Any, offers: Offers) -> tuple[str, Json]:
    """Our name and options; what has no counterpart here is refused by the environment's own checks."""
    if not isinstance(wish, dict):
        raise RecipeError("an environment is {env_name, env_config}.")
    config = wish.get("env_config", {})
    name = wish.get("env_name", config.get("env_name") if isinstance(config, dict) else None)
    if name is None and len(offers.offers) == 1:
        (name,) = offers.offers
    plain = {offer.replace("_", "").lower(): offer for offer in offers.offers}
    known = plain.get(str(name).replace("_", "").lower(), str(name))
    if not isinstance(config, dict):
        raise RecipeError("env_config must be an object.")
    options: Json = {"max_turns": WITHOUT_LIMIT, "prompt": "full"} if known in ("frozen_lake", "sokoban") else {}
    for key, value in config.items():
        if key != "env_name":
            option = KEYS.get(str(key), str(key))
            value = value[0] if option == "size" and isinstance(value, list) and value else value
            options[option] = VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value
    return known, options
