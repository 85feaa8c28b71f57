"""VAGEN's environments and settings under our names: {"env_name": "frozenlake", "env_config": {"is_slippery": false}}.

Settings that a file leaves out have VAGEN's defaults, which differ between its legacy and its current version. Also the
seeds that its data files mean, so that tasks are the same as in VAGEN.
"""

import hashlib
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.systems.migration.outcomes import Answer, Migration, Setting, Sheet, no_place
from sensorium.systems.migration.verl import VAGEN_RECIPES
from sensorium.vocabulary.errors import RecipeError

WITHOUT_LIMIT = 10**6  # VAGEN counts the turns on its own side
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
# Further settings under our names, by environment.
OF_ENVIRONMENT = {
    "frozen_lake": {"success_reward": "goal_reward"},
    "sokoban": {"min_actions_to_succeed": "max_solution"},  # despite its name the most that VAGEN lets a room take
    "navigation": {"success_threshold": "success_distance", "resolution": "side", "fov": "field_of_view"},
    "ai2thor": {"success_threshold": "success_distance"},
    "primitive_skill": {"env_id": "id"},
    "svg": {"dataset_name": "dataset", "split": "dataset_split"},
}
# VAGEN's defaults where ours differ.
LEGACY = "grounding_worldmodeling"
LEGACY_DEFAULTS: dict[str, dict[str, Any]] = {
    "frozen_lake": {
        "max_actions_per_turn": 3, "goal_reward": 10.0, "format_reward": 0.5, "response_format": LEGACY
    },
    "sokoban": {"max_actions_per_turn": 3, "response_format": LEGACY},
    "svg": {"response_format": LEGACY, "pixel_weight": 0.0},
    "navigation": {"response_format": LEGACY},
    "ai2thor": {"response_format": LEGACY},
    "primitive_skill": {"response_format": LEGACY},
}  # fmt: skip
WALK = {
    "action_names": "move_forward", "success_reward": 1.0, "format_reward": 0.01, "success_distance": 1.0,
    "step_length": 0.3, "response_format": "free_think",
}  # fmt: skip
CURRENT_DEFAULTS: dict[str, dict[str, Any]] = {
    "frozen_lake": {
        "max_actions_per_turn": 5, "goal_reward": 1.0, "format_reward": 0.02, "view": "text",
        "response_format": "free_think",
    },
    "sokoban": {
        "max_actions_per_turn": 3, "success_reward": 1.0, "format_reward": 0.1, "step_reward": 0.0, "box_reward": 0.0,
        "view": "text", "response_format": "wm",
    },
    "svg": {"response_format": "free_think", "pixel_weight": 0.0},
    "navigation": WALK,
    "ai2thor": WALK,
    "primitive_skill": {"format_reward": 0.1, "response_format": "wm"},
}  # fmt: skip
# Settings of VAGEN's own machinery: they change nothing that is played here.
IDLE = (
    "image_placeholder", "record_video", "video_record_dir", "mask_success", "gpu_device", "device", "model_size",
    "max_objects_in_state", "max_action_penalty", "reset_seed_max_tries", "min_solution_bfs_max_depth", "example_count",
    "use_example_in_sys_prompt",
)  # fmt: skip
# Settings that VAGEN has in one environment and that change nothing there.
IDLE_IN = {
    "frozen_lake": ("min_actions_to_succeed",),
    "sokoban": ("max_steps",),  # the room under VAGEN's counts moves, and VAGEN does not look at the count
    "svg": ("data_dir", "max_actions_per_step", "seed"),  # where its copy of the data set is; a reset's seed counts
}
# Settings that can be played here with this value only.
ONLY: dict[str, Any] = {
    "multiview": False, "down_sample_ratio": 1.0, "slip_prob": 0.0, "desc": None, "format_penalty": 0.0,
    "special_token_list": ["<think>", "</think>", "<answer>", "</answer>"],
}  # fmt: skip
SKILL_TASKS = ("AlignTwoCube", "PlaceTwoCube", "PutAppleInDrawer", "StackThreeCube")
CLIENT = (
    "base_urls", "url_file", "timeout", "retries", "backoff", "max_delay", "backoff_jitter_min", "backoff_jitter_range",
    "token", "log_retries", "failover_after_failures",
)  # fmt: skip
STATE_REWARD = ("use_state_reward", "grounding_reward_weight", "worldmodeling_reward_weight")
DESCRIBING = ("grounding", "worldmodeling", "grounding_worldmodeling")
VALUES: dict[str, dict[str, str]] = {
    "view": {"vision": "picture"},
    "response_format": {f"{form}_structured": form for form in DESCRIBING},  # states are described by row and column here
}
MOST_SEED = 2**31 - 1
HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}")


def environment_of(wish: Any, offered: Mapping[str, str], current: bool = False) -> tuple[str, dict[str, Any]]:
    """Our name and options; settings without a counterpart are refused, here or by the environment.

    ``offered`` are the environments by the names they are offered under: {"sokoban": "sokoban", "rooms": "ai2thor"}.
    ``current``: the wish comes from today's VAGEN, whose defaults differ from the legacy version's.
    """
    config = wish.get("env_config") or {} if isinstance(wish, dict) else None
    if not isinstance(config, dict):
        raise RecipeError("an environment of VAGEN's is {env_name: name, env_config: {…}}.")
    name = wish.get("env_name", config.get("env_name"))
    if name is None and len(offered) == 1:
        (name,) = offered
    plain = {offer.replace("_", "").lower(): offer for offer in offered}
    known = plain.get(str(name).replace("_", "").lower(), str(name))
    if offered.get(known, known) == "navigation" and "eval_set" in config:
        known = _with_task_files(offered)
    kind = offered.get(known, known)
    defaults = (CURRENT_DEFAULTS if current else LEGACY_DEFAULTS).get(kind)
    settings = {str(key): value for key, value in _with_state_reward(config).items() if key != "env_name"}
    if defaults is None:
        return known, _renamed(kind, settings)
    settings = _playable(kind, settings, current)
    return known, {"max_turns": WITHOUT_LIMIT, "prompt": "full", **defaults, **_renamed(kind, settings)}


def _with_task_files(offered: Mapping[str, str]) -> str:
    """The name of AI2-THOR among those offered: VAGEN's navigation with an eval_set plays its rooms."""
    for name, kind in offered.items():
        if kind == "ai2thor":
            return name
    raise RecipeError(
        "VAGEN's navigation plays the rooms of AI2-THOR (eval_set), and its task files are not named here. For "
        "the source vagen, give options: {ai2thor: {tasks: 'FOLDER/{eval_set}.json'}}; for a service, offer "
        "ai2thor=FILE.yaml with {environment: ai2thor, options: {tasks: 'FOLDER/{eval_set}.json'}}. The environment "
        "navigation has rooms of its own: leave eval_set out to play those."
    )


def entry_name(name: str, config: Mapping[str, Any], data_source: str) -> str:
    """The environment of an entry; of ``RemoteEnv``, a client, the one that its server plays.

    {name: RemoteEnv, data_source: navigation, config: {eval_set: base}} is navigation; one with an env_id plays skills.
    """
    if name != "RemoteEnv":
        return name
    return str(config.get("env_name") or ("primitive_skill" if "env_id" in config else data_source))


def without_client(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings without those of VAGEN's client, such as servers and retries."""
    return {key: value for key, value in config.items() if key not in CLIENT}


def _playable(known: str, settings: dict[str, Any], current: bool) -> dict[str, Any]:
    """Settings without those that change nothing here; RecipeError for one that cannot be played."""
    found = {key: value for key, value in settings.items() if key not in (*IDLE, *IDLE_IN.get(known, ()))}
    for key, value in ONLY.items():
        if found.pop(key, value) != value:
            raise RecipeError(
                f"VAGEN's {key}: {settings[key]!r:.40} has no counterpart here; only {value!r} can be played."
            )
    form = str(found.get("prompt_format"))
    if form.removesuffix("_symbolic") in DESCRIBING and form.endswith("_symbolic"):
        raise RecipeError(
            f"VAGEN's prompt_format {form} asks for a drawn grid, which is not read here: states are described by row and "
            f"column. Use {form.removesuffix('_symbolic')}."
        )
    if "eval_set" in found and not re.fullmatch(r"\w{1,60}", str(found["eval_set"])):
        raise RecipeError(f"VAGEN's eval_set is the name of a task file, not {found['eval_set']!r:.60}.")
    walks = known in ("navigation", "ai2thor")
    apart = {"svg": "~~", "primitive_skill": "|"}.get(known, "|" if walks and current else ",")
    if found.pop("action_sep", apart) != apart:
        raise RecipeError(f"VAGEN's action_sep: actions of {known} are separated by '{apart}' here.")
    if walks and current:
        if found.pop("format_reward", 0.0):
            raise RecipeError(
                "VAGEN's format_reward of navigation is given once, at the end; here the format is rewarded each turn: "
                "per_turn_format_reward."
            )
        if "per_turn_format_reward" in found:
            found["format_reward"] = found.pop("per_turn_format_reward")
    if known == "svg":
        data = found.get("dataset_name")
        if data is None:
            found.pop("split", None)  # pictures made from seeds have no splits
        elif not isinstance(data, str) or not HUB_ID.fullmatch(data):
            raise RecipeError(f"VAGEN's dataset_name is a data set of the hub, owner/name, not {data!r:.60}.")
    if known == "sokoban" and isinstance(steps := found.get("min_solution_steps"), list | tuple) and len(steps) == 2:
        found["min_solution_steps"], found["max_solution_steps"] = steps
    if known == "primitive_skill" and found.get("env_id", SKILL_TASKS[0]) not in SKILL_TASKS:
        raise RecipeError(f"VAGEN's env_id is one of {', '.join(SKILL_TASKS)}, not {found['env_id']!r:.40}.")
    return found


def _renamed(known: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under our names, with our values."""
    options: dict[str, Any] = {}
    for key, value in settings.items():
        option = (OPTIONS | OF_ENVIRONMENT.get(known, {})).get(key, key)
        value = value[0] if option == "size" and isinstance(value, list | tuple) and value else value
        options[option] = VALUES.get(option, {}).get(value, value) if isinstance(value, str) else value
    return options


def _with_state_reward(config: dict[str, Any]) -> dict[str, Any]:
    """VAGEN's reward for descriptions has a switch and two weights; here it is one number, 0 where it is off."""
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
        raise RecipeError(f"{name}: {count} seeds from {low} to {high}, each at most {seed[2]} times, do not exist.")
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


def migrate_environments(data: Mapping[str, Any], named: str) -> Migration:
    """VAGEN's env_config.yaml: each entry is a source of environments, for training and for test."""
    words = " ".join(str(entry.get("env_name", "")) for entry in data.values()).lower()
    start = next((recipe for word, recipe in VAGEN_RECIPES.items() if word in words), "vagen_frozen_lake")
    settings = [Setting(f"{name}.{key}", value) for name, entry in data.items() for key, value in entry.items()]
    sheet = Sheet("VAGEN's env_config.yaml", start, settings)
    sources: dict[str, list[Any]] = {"train": [], "evaluate": []}
    offered = {one: one for one in LEGACY_DEFAULTS}
    for name, entry in data.items():
        problem, environment, options = "", "", dict[str, Any]()
        try:
            environment, options = environment_of(entry, offered)
        except RecipeError as error:
            problem = str(error)
        if not problem and environment not in offered:
            problem = f"VAGEN's environment '{entry.get('env_name')}' is not shipped here; docs/guides/environments.md"
        if problem:
            for key in entry:
                sheet.apply(no_place(problem), sheet.settings[f"{name}.{key}"])
            continue
        options["max_turns"] = sheet.at("rollout.max_turns", 3)
        for side, split, size in (("train", "train", "train_size"), ("evaluate", "test", "test_size")):
            if entry.get(size):
                rows = {"environment": environment, "split": split, "size": entry[size], "distinct": False}
                sources[side].append({"source": "environments", "options": {**rows, "options": options}})
        train, test = (f"tasks.{side}.{len(sources[side]) - 1}.options" for side in ("train", "evaluate"))
        shown = ", ".join(f"{option}: {value}" for option, value in options.items())
        became = {
            "env_name": f"{train}.environment={environment}",
            "env_config": f"{train}.options={{{shown}}}",
            "train_size": f"{train}.size={entry.get('train_size')}",
            "test_size": f"{test}.size={entry.get('test_size')}",
        }
        for key in entry:
            unknown = Answer("unknown", "VAGEN's env_config.yaml has no such key that is known here")
            answer = Answer("became", became[key]) if key in became else unknown
            sheet.apply(answer, sheet.settings[f"{name}.{key}"])
    for side, found in sources.items():
        if found:
            sheet.put(f"tasks.{side}", found)
    return sheet.finish(named)
