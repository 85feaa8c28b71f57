"""Act as the policy yourself: see what the model is shown, write its responses, and see the reward of each turn."""

import base64
import io
import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from PIL import Image
from rich.text import Text as Styled

from sensorium.data.demonstrations import demonstrations_of
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskSource, find_row, make_sources
from sensorium.data.task_content import id_of
from sensorium.envs.protocol import WatchedEnvironment
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.console import WorkBar
from sensorium.report.terminal import Terminal, unguarded
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

USAGE = "sensorium play RECIPE [key=value …] [--task N|ID] [--episodes N] [--split evaluate|train] [--demonstrate] …"
Way = Literal["kitty", "iterm", "blocks", "none"]
CHUNK = 4096  # of kitty's protocol
ACROSS, DOWN = 64, 32  # largest picture of half-blocks, in characters
SIDES = {"evaluate": "tasks.evaluate", "train": "tasks.train"}  # where --task is looked for
RECORDED_SIDE = "demonstrations"
HOW = "Write a response and press Enter; a line that ends in a backslash goes on in the next one. Ctrl-D ends."


class EndOfPlay(Exception):
    """The input has ended."""


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (frozen_lake)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: rollout.max_turns=3")
    parser.add_argument("--split", choices=["evaluate", "train"], help="which tasks; by default those to evaluate on")
    parser.add_argument("--task", default="0", help="the first task to play: its number, counted from 0, or its id")
    parser.add_argument("--episodes", type=int, default=1, help="tasks to play, one after the other")
    parser.add_argument("--demonstrate", action="store_true", help="watch the demonstrations of tasks and environments")
    parser.add_argument("--pictures", choices=["auto", "kitty", "iterm", "blocks", "none"], default="auto")
    parser.add_argument("--save", help="folder for the pictures; by default runs/play/NAME")


def run(arguments: Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    with WorkBar() as bar:
        bar.begin(f"{recipe.name}: loading the tokenizer and the chat template of {recipe.model.path}")
        from sensorium.cli.validation import model_free_session
        from sensorium.cluster.event_loop import run_async

        with model_free_session(recipe) as session:
            found = chosen_tasks(recipe, session.store, arguments, arguments.episodes, bar)
            bar.progress.stop()
            screen = Screen(
                recipe, Path(arguments.save or Path("runs") / "play" / recipe.name), arguments.pictures, session
            )
            if session.stand_in:
                screen.say(f"The files of {recipe.model.path} are not here: tokens are counted as {session.stand_in} does.")
            if found.note:
                screen.say(found.note, "yellow")
            screen.say(HOW if not arguments.demonstrate else "")
            try:
                for task in found.tasks:
                    groups = run_async(screen.play(task, demonstrate=arguments.demonstrate))
                    screen.end(groups[0].episodes[0])
            except EndOfPlay:
                screen.say("the input has ended")
    return 0


@dataclass(frozen=True)
class ChosenTasks:
    """Tasks that a command was asked for: of which part of the recipe, from which number on, and a note on an ambiguity."""

    tasks: tuple[Task, ...]
    side: str
    number: int
    note: str = ""


def chosen_tasks(recipe: Recipe, store: MediaStore, arguments: Namespace, count: int, bar: WorkBar) -> ChosenTasks:
    """``count`` tasks from the one that ``--task`` names, by its number or its id; only their rows are read."""
    wanted: str = arguments.task
    sides: list[Any] = [arguments.split] if arguments.split else [s for s in SIDES if getattr(recipe.tasks, s)]
    lengths: dict[str, int] = {}
    example = ""
    for side in sides:
        place = SIDES.get(side, f"warm_start.{side}")
        bar.begin(f"{recipe.name}: looking for task {wanted} in {place}")
        sources = [_recorded(recipe, store)] if side == RECORDED_SIDE else make_sources(recipe.tasks, side, store)
        places = [(number, row) for number, source in enumerate(sources) for row in range(len(source))]
        lengths[place], example = len(places), example or (id_of(sources[0], 0) or "" if places else "")
        found = find_row(sources, wanted)
        if found is None:
            continue
        first = places.index(found)
        chosen = [sources[number][row] for number, row in places[first : first + max(1, count)]]
        note = ""
        if wanted == str(first) != chosen[0].id and chosen[0].id.isdecimal():
            ids = (nth for nth, (number, row) in enumerate(places) if id_of(sources[number], row) == wanted)
            other = next(ids, None)
            note = "" if other is None else f"--task {wanted} is a number; the task with this id is --task {other}."
        return ChosenTasks(tuple(chosen), place, first, note)
    here = " and ".join(f"{place} has {length:,} tasks" for place, length in lengths.items())
    raise RecipeError(
        f"--task {wanted}: there is no such number or id; {here}, counted from 0, with ids such as '{example}'."
    )


def _recorded(recipe: Recipe, store: MediaStore) -> TaskSource:
    if (found := demonstrations_of(recipe, store)) is None:
        raise RecipeError(
            f"{recipe.name}: its warm start reads no recorded demonstrations. Name them: warm_start.demonstrations=FOLDER, "
            "with warm_start.steps above 0."
        )
    return found


class Screen:
    """Shows a person what the model would see, asks for responses, and saves the pictures."""

    def __init__(self, recipe: Recipe, folder: Path, pictures: str, session: Any) -> None:
        self.console = Terminal(highlight=False)
        self.recipe, self.folder, self.session = recipe, folder, session
        self.way: Any = usual_way(self.console.is_terminal) if pictures == "auto" else pictures
        self.turn = 0
        self.task = Task("")

    async def play(self, task: Task, *, demonstrate: bool) -> Any:
        from sensorium.assembly.playing import EnvironmentMaker

        made = EnvironmentMaker(self.session.store)
        self.task, self.turn = task, 0
        self.say(f"── task {task.id} ──", "bold")
        # Whoever types a response has seen it.
        shown: Any = (lambda response: self.say(f"> {response}", "green")) if demonstrate else lambda response: None
        return await self.session.play(
            [task],
            lambda request: self.ask(request.sampling.max_new_tokens),
            demonstrate=demonstrate,
            make=lambda chosen: WatchedEnvironment(made(chosen), self.show_first, self.show_step, shown),
        )

    def show_first(self, returned: Any) -> Any:
        """Show what an environment's reset returned; the rollout reports values of a wrong type."""
        with suppress(AttributeError, TypeError, ValueError):
            head, observation = returned
            self.show(head)
            self.show(observation.messages)
        return returned

    def show_step(self, returned: Any) -> Any:
        """Show what an environment's step returned; the rollout reports values of a wrong type."""
        with suppress(AttributeError, TypeError, ValueError):
            self.turn += 1
            reward = returned.reward
            parts = reward if isinstance(reward, Mapping) else {} if reward is None else {"reward": reward}
            rewards = "  ".join(f"{name} {_signed(value)}" for name, value in parts.items())
            self.say(f"turn {self.turn}: {rewards or 'the environment gives no reward'}", "cyan")
            if returned.observation is not None and not returned.done and not returned.truncated:
                self.show(returned.observation.messages)
        return returned

    def show(self, messages: Sequence[Message]) -> None:
        """Messages with their pictures."""
        for message in messages:
            self.say(f"[{message.role}]", "dim")
            for block in message.content:
                if isinstance(block, Text):
                    self.say(block.text)
                else:
                    self._show_medium(block)

    def _show_medium(self, media: Media) -> None:
        if media.kind != "picture":
            self.say(f"({media.kind} {media.name})", "dim")
            return
        picture = self.session.store.picture(media)
        if text := drawn(picture, self.way):
            print(text, file=unguarded(sys.stdout), flush=True)
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.task.id)[:80]
        place = self.folder / f"{name}_turn{self.turn}_{media.hash[:8]}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture.convert("RGB").save(place)
        self.say(f"(picture {picture.width}x{picture.height}: {place})", "dim")

    def ask(self, budget: int) -> str:
        """A response from standard input."""
        lines: list[str] = []
        while True:
            self.console.print("> ", end="", style="bold green")
            line = sys.stdin.readline()
            if not line:
                print()
                raise EndOfPlay
            line = line.rstrip("\n")
            if not sys.stdin.isatty():
                self.say(line)
            lines.append(line.removesuffix("\\"))
            if not line.endswith("\\"):
                break
        written = "\n".join(lines)
        tokens = len(self.session.chat.respond(written, "play").tokens)
        if tokens > budget:
            self.say(f"note: that is {tokens} tokens, and the model may write {budget}: it would be cut", "yellow")
        return written

    def end(self, episode: Episode) -> None:
        """How the episode ended, and its scores."""
        self.say(f"the episode {episode.status.value}{': ' + episode.failure if episode.failure else ''}", "bold")
        for score in episode.scores:
            value = "missing: " + score.reason if score.value is None else _signed(score.value)
            at = f" (turn {score.turn + 1})" if score.turn is not None else ""
            self.say(f"  {score.name}{at}: {value} × {score.weight:g}")
        correct = {True: ", correct", False: ", not correct", None: ""}[episode.correct]
        self.say(f"  reward {episode.reward if episode.reward is None else round(episode.reward, 6)}{correct}\n", "bold")

    def say(self, text: str, style: str = "") -> None:
        if text:
            self.console.print(Styled(text, style=style), soft_wrap=True)


def _signed(value: float) -> str:
    return f"{value:+g}" if value else "0"


def usual_way(terminal: bool, variables: Mapping[str, str] = os.environ) -> Way:
    """How this terminal shows pictures."""
    if not terminal:
        return "none"
    if "KITTY_WINDOW_ID" in variables or "kitty" in variables.get("TERM", "") or "ghostty" in variables.get("TERM", ""):
        return "kitty"
    return "iterm" if variables.get("TERM_PROGRAM", "") in ("iTerm.app", "WezTerm") else "blocks"


def drawn(picture: Image.Image, way: Way) -> str:
    """The text that shows a picture: kitty's or iTerm2's protocol, or half-blocks, two pixels to a character."""
    if way == "none":
        return ""
    if way == "blocks":
        return _half_blocks(picture)
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


def _half_blocks(picture: Image.Image) -> str:
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
