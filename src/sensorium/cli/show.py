"""Pictures in a terminal: by kitty's or iTerm2's protocol, or as half-blocks, two pixels to a character."""

import base64
import io
import os
from collections.abc import Mapping
from typing import Literal

from PIL import Image
from rich.console import Console
from rich.syntax import Syntax

from sensorium.cli.dry_run import check_model, look_at
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import a_few, make_sources
from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.load import dump_recipe
from sensorium.recipe.plan import TOWER, Plan, for_tasks, make_plan
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import IncompleteConfig, is_ours
from sensorium.report.tables import disk_note, plan_table
from sensorium.vocabulary.errors import SensoriumError
from sensorium.vocabulary.task import Task

Way = Literal["kitty", "iterm", "blocks", "none"]
WAYS: tuple[Way, ...] = ("kitty", "iterm", "blocks", "none")
CHUNK = 4096
ACROSS, DOWN = 64, 32
"""Characters that a picture of half-blocks takes at most."""


def usual_way(terminal: bool, variables: Mapping[str, str] = os.environ) -> Way:
    """How this terminal shows pictures; what is not a terminal shows none."""
    if not terminal:
        return "none"
    if "KITTY_WINDOW_ID" in variables or "kitty" in variables.get("TERM", "") or "ghostty" in variables.get("TERM", ""):
        return "kitty"
    return "iterm" if variables.get("TERM_PROGRAM", "") in ("iTerm.app", "WezTerm") else "blocks"


def drawn(picture: Image.Image, way: Way) -> str:
    """The text that shows a picture."""
    if way == "none":
        return ""
    if way == "blocks":
        return half_blocks(picture)
    buffer = io.BytesIO()
    picture.convert("RGB").save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    if way == "iterm":
        return f"\x1b]1337;File=inline=1;size={len(buffer.getvalue())}:{data}\a"
    parts = [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)]
    frames = []
    for place, part in enumerate(parts):
        control = ("a=T,f=100," if place == 0 else "") + f"m={int(place + 1 < len(parts))}"
        frames.append(f"\x1b_G{control};{part}\x1b\\")
    return "".join(frames)


def half_blocks(picture: Image.Image) -> str:
    """A picture of upper half-blocks in 24-bit colours, its proportions kept."""
    scale = min(1.0, ACROSS / picture.width, 2 * DOWN / picture.height)
    width, height = max(1, round(picture.width * scale)), max(2, round(picture.height * scale) // 2 * 2)
    small = picture.convert("RGB").resize((width, height), Image.Resampling.BOX)
    rows = []
    for top in range(0, height, 2):
        row = []
        for column in range(width):
            above, below = small.getpixel((column, top)), small.getpixel((column, top + 1))
            row.append("\x1b[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below))  # type: ignore[misc]
        rows.append("".join(row) + "\x1b[0m")
    return "\n".join(rows)


def show_dry_run(recipe: Recipe, console: Console, *, train: bool = True, model: str = "", named: str = "RECIPE") -> None:
    """The resolved recipe, its plan, and what is found where it says its model and data are; nothing is spent.

    What a run would refuse of its model is refused before anything is shown. ``model`` stands for the recipe's own,
    and ``named`` is how a command names the recipe.
    """
    found = check_model(recipe, model)
    seen: list[Task] = []
    lines = list(look_at(recipe, train=train, named=named, seen=seen))
    text = dump_recipe(recipe)
    if console.is_terminal:
        console.print(Syntax(text, "yaml", theme="ansi_dark", background_color="default"))
    else:
        say(text, console)
    plan = for_tasks(_plan(_with_model(recipe, model)), seen)
    _show(plan, console)
    short = [disk_note(recipe, plan), _memory_note(recipe, plan)] if train else []
    for caution in [*cautions(recipe), *found, *filter(None, short)]:
        console.print(caution, style="yellow", markup=False, highlight=False)
    for line in lines:
        say(line, console)


def _memory_note(recipe: Recipe, plan: Plan) -> str:
    """What is said where memory may not suffice; torch is not loaded for models of which nothing is."""
    if is_ours(recipe.model.path):
        return ""
    from sensorium.assembly.memory import memory_note

    return memory_note(recipe, plan)


def _with_model(recipe: Recipe, path: str) -> Recipe:
    """The recipe with another model; the revision of a hub id belongs to the recipe's own."""
    if path in ("", recipe.model.path):
        return recipe
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"path": path, "revision": ""})})


def show_plan(recipe: Recipe, console: Console) -> None:
    """The resolved numbers of a run. Why tasks cannot be read is said by the run itself."""
    plan = _plan(recipe)
    _show(for_tasks(plan, read_a_few(recipe)[0]) if TOWER in plan.memory else plan, console)


def read_a_few(recipe: Recipe) -> tuple[list[Task], str]:
    """Two tasks of every source, to see which media they have; none and the reason, if those of one cannot be read."""
    tasks: list[Task] = []
    for where, sections in (("tasks.train", recipe.tasks.train), ("tasks.evaluate", recipe.tasks.evaluate)):
        try:
            for i, source in enumerate(make_sources(sections, MediaStore(), where)):
                if not (found := a_few([source], each=2)):
                    return [], f"{where}.{i}: the rows that were tried are bad; sensorium validate names them"
                tasks += found
        except (SensoriumError, TypeError) as error:  # the latter of a source without a length
            return [], str(error)
    return tasks, ""


def _plan(recipe: Recipe) -> Plan:
    try:
        return make_plan(recipe)
    except IncompleteConfig:
        from sensorium.models.load_chat import read_config

        model = recipe.model
        return make_plan(recipe, read_config(model.path, model.family, model.revision, weights=False).config.to_dict())


def _show(plan: Plan, console: Console) -> None:
    console.print(plan_table(plan))
    console.print()


def say(text: str, console: Console) -> None:
    """Print words as they are, whatever brackets they hold and however narrow the terminal is."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
