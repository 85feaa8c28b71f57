"""CapRL++'s environment variables and scripts: those of training become a recipe; the reward service reads its own.

REWARD_MODEL=/reader REWARD_PORT=18889 bash scripts/start_reward_serve_rm.sh      → sensorium serve reward reads them, too
CAPTION_MODEL=/captioner DATASET=rows.jsonl SAVE_DIR=/runs bash scripts/train_caprl.sh    → caprl_video with these values
"""

from collections.abc import Mapping, Sequence

from sensorium.migration.outcomes import DROP, Migration, Setting, Sheet, parsed, unset
from sensorium.migration.verl import RULES
from sensorium.recipe.caprl_settings import NEEDED, WITHOUT_EFFECT, caprl_settings
from sensorium.recipe.load import load_recipe

SERVICE = "start_reward_serve_rm.sh"
OF_SERVICE = (
    "REWARD_MODEL", "REWARD_PORT", "REWARD_WORKER_BASE", "REWARD_NUM_WORKERS", "REWARD_QA_NUM", "REWARD_SCORE_MODE",
    "REWARD_TASK", "FORMAT_REWARD_WEIGHT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
KNOWN = (
    *NEEDED, *WITHOUT_EFFECT, *OF_SERVICE, "TOTAL_EPOCHS", "RUN_NAME", "SAVE_HF_MODEL", "WANDB_PROJECT", "REWARD_NODE_IP",
    "REWARD_REMOTE_URL", "BATCH_SIZE", "ROLLOUT_N", "SAVE_FREQ", "ACTOR_LR", "MAX_RESPONSE_LENGTH", "REWARD_LENGTH_L1",
    "REWARD_LENGTH_L2", "REWARD_LENGTH_WEIGHT", "REWARD_LENGTH_TOKENIZER_PATH", "ROLLOUT_PROMPT_LENGTH",
    "ROLLOUT_RESPONSE_LENGTH", "ROLLOUT_MAX_MODEL_LEN",
)  # fmt: skip
"""Variables by which a script is recognised as CapRL's."""


def migrate_caprl(
    variables: Sequence[Setting], overrides: Sequence[Setting], text: str, named: str, notes: Sequence[str] = ()
) -> Migration:
    """The recipe of CapRL's variables, and of overrides that its script hands on to verl."""
    given: Mapping[str, Setting] = {setting.key: setting for setting in variables}
    image = str(given["REWARD_TASK"].value if "REWARD_TASK" in given else "") == "image"
    image = image or any((setting.key, setting.value) == ("data.input_type", "image") for setting in overrides)
    start = "caprl_image" if image else "caprl_video"
    sheet = Sheet("CapRL++", start, [*variables, *overrides], notes)
    trains = SERVICE not in text or "train_caprl.sh" in text
    for setting in variables:
        if not trains and setting.key in OF_SERVICE:
            sheet.nothing(setting, "no place", "of the reward service: sensorium serve reward reads this variable itself")
        elif unset(setting.value):
            sheet.nothing(setting, "no place", f"its value is not in the file ({setting.shown})")
    taken = {key: str(one.value) for key, one in given.items() if key not in sheet.outcomes}
    lacking = [name for name in NEEDED if name not in taken]
    recipe = load_recipe(start)
    usual = {"CAPTION_MODEL": recipe.model.path, "DATASET": sheet.at("tasks.train.0.options.path"), "SAVE_DIR": "runs"}
    settings = caprl_settings({**{name: usual[name] for name in lacking}, **taken}, start, recipe, files=False)
    for name, changed in settings.overrides.items():
        parts = {place: parsed(value) for place, _, value in (one.partition("=") for one in changed)}
        parts = {place: DROP if (place, value) == ("steps", None) else value for place, value in parts.items()}
        if name in lacking:
            continue
        if name in taken:
            sheet.became(given[name], parts, "" if parts else "taken together with a variable above")
        elif name != "RUN_NAME" and name not in lacking:
            for place, value in parts.items():  # a default of CapRL's script
                sheet.put(place, value)
    for name, why in settings.without_effect.items():
        sheet.nothing(given[name], "no effect", why)
    for name in taken:
        if name not in sheet.outcomes and name in KNOWN:
            sheet.nothing(given[name], "no effect", "as it is here anyway")
    if lacking and trains:
        sheet.notes.append(f"CapRL's script needs {', '.join(lacking)}, which are not given; the recipe has its own there.")
    sheet.settle(RULES)
    return sheet.finish(named)


def is_caprl(variables: Mapping[str, object], text: str) -> bool:
    """Whether a script is one of CapRL's."""
    return (
        "train_caprl.sh" in text
        or SERVICE in text
        or bool({"CAPTION_MODEL", "REWARD_TASK", "REWARD_MODEL"} & set(variables))
    )
