"""Act as the policy yourself: see what the model is shown, write its responses, and see what each turn is paid."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text as Styled

from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.terminal import Terminal, unguarded
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

USAGE = "sensorium play RECIPE [key=value …] [--task N|ID] [--episodes N] [--split evaluate|train] [--demonstrate] …"
HOW = "Write a response and press Enter; a line that ends in a backslash goes on in the next one. Ctrl-D ends."


class EndOfPlay(Exception):
    """The person has had enough: the input has ended."""


def configure(parser: ArgumentParser) -> None:
    """The arguments."""
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (frozen_lake)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: rollout.max_turns=3")
    parser.add_argument("--split", choices=["evaluate", "train"], help="which tasks; by default those to evaluate on")
    parser.add_argument("--task", default="0", help="the first task to play: its number, counted from 0, or its id")
    parser.add_argument("--episodes", type=int, default=1, help="tasks to play, one after the other")
    parser.add_argument("--demonstrate", action="store_true", help="watch the demonstrations of tasks and environments")
    parser.add_argument("--pictures", choices=["auto", "kitty", "iterm", "blocks", "none"], default="auto")
    parser.add_argument("--save", help="folder for the pictures; by default runs/play/NAME")


def run(arguments: Namespace) -> int:
    """Play."""
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    from sensorium.cli.validation import model_free_session
    from sensorium.cluster.event_loop import run_async
    from sensorium.data.mixture import each_once, make_sources

    sides = {"evaluate": recipe.tasks.evaluate, "train": recipe.tasks.train}
    splits = [arguments.split] if arguments.split else [side for side in sides if sides[side]]
    by_number = arguments.task.lstrip("-").isdecimal()
    with model_free_session(recipe) as session:
        for split in splits[:1] if by_number else splits:
            sources = make_sources(sides[split], session.store, f"tasks.{split}")
            tasks, _ = each_once(sources, on_bad_row=recipe.tasks.on_bad_row)
            ids = [task.id for task in tasks]
            first = int(arguments.task) if by_number else ids.index(arguments.task) if arguments.task in ids else -1
            if first >= 0:
                break
        chosen = tasks[first : first + max(1, arguments.episodes)]
        if first < 0 or not chosen:
            here = f"tasks.{split} has {len(tasks)} tasks, counted from 0"
            none = here if by_number else f"no task of {' and '.join(f'tasks.{side}' for side in splits)} has this id"
            raise RecipeError(f"--task {arguments.task}: {none}; ids are such as '{ids[0] if ids else ''}'.")
        screen = Screen(recipe, Path(arguments.save or Path("runs") / "play" / recipe.name), arguments.pictures, session)
        if session.stand_in:
            screen.say(f"The files of {recipe.model.path} are not here: tokens are counted as {session.stand_in} does.")
        if by_number and arguments.task in ids and ids[first] != arguments.task:
            screen.say(
                f"--task {first} is a number; the task with this id is --task {ids.index(arguments.task)}.", "yellow"
            )
        screen.say(HOW if not arguments.demonstrate else "")
        try:
            for task in chosen:
                groups = run_async(screen.play(task, demonstrate=arguments.demonstrate))
                screen.end(groups[0].episodes[0])
        except EndOfPlay:
            screen.say("the input has ended")
    return 0


class Screen:
    """Shows a person what the model would see, asks for responses, and saves the pictures."""

    def __init__(self, recipe: Recipe, folder: Path, pictures: str, session: Any) -> None:
        from sensorium.cli.show import usual_way

        self.console = Terminal(highlight=False)
        self.recipe, self.folder, self.session = recipe, folder, session
        self.way: Any = usual_way(self.console.is_terminal) if pictures == "auto" else pictures
        self.turn = 0
        self.task = Task("")

    async def play(self, task: Task, *, demonstrate: bool) -> Any:
        """One episode."""
        from sensorium.assembly.session import EnvironmentMaker
        from sensorium.cli.validation import WatchedEnvironment

        made = EnvironmentMaker(self.session.store)
        self.task, self.turn = task, 0
        self.say(f"── task {task.id} ──", "bold")
        return await self.session.play(
            [task],
            lambda request: self.ask(request.sampling.max_new_tokens),
            demonstrate=demonstrate,
            make=lambda chosen: WatchedEnvironment(made(chosen), self.watch),
        )

    def watch(self, method: str, returned: Any) -> None:
        """Show what an environment returned."""
        if method == "reset":
            head, observation = returned
            self.show(head)
            self.show(observation.messages)
            return
        self.turn += 1
        paid = returned.reward
        parts = paid if isinstance(paid, Mapping) else {} if paid is None else {"reward": paid}
        told = (
            "  ".join(f"{name} {_signed(value)}" for name, value in parts.items()) or "nothing is paid by the environment"
        )
        self.say(f"turn {self.turn}: {told}", "cyan")
        if returned.observation is not None and not returned.done and not returned.truncated:
            self.show(returned.observation.messages)

    def show(self, messages: Sequence[Message]) -> None:
        """Messages with their pictures."""
        for message in messages:
            self.say(f"[{message.role}]", "dim")
            for block in message.content:
                if isinstance(block, Text):
                    self.say(block.text)
                else:
                    self.show_medium(block)

    def show_medium(self, media: Media) -> None:
        """A picture in the terminal and as a file; of other media where they come from."""
        from sensorium.cli.show import drawn

        if media.kind != "picture":
            self.say(f"({media.kind} {media.name})", "dim")
            return
        picture = self.session.store.picture(media)
        if told := drawn(picture, self.way):
            print(told, file=unguarded(sys.stdout), flush=True)
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in self.task.id)[:80]
        place = self.folder / f"{name}_turn{self.turn}_{media.hash[:8]}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        picture.convert("RGB").save(place)
        self.say(f"(picture {picture.width}x{picture.height}: {place})", "dim")

    def ask(self, budget: int) -> str:
        """A response from the person, or from what is piped in."""
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
        """How the episode ended, and what the reward terms say of it."""
        self.say(f"the episode {episode.status.value}{': ' + episode.failure if episode.failure else ''}", "bold")
        for score in episode.scores:
            value = "missing: " + score.reason if score.value is None else _signed(score.value)
            at = f" (turn {score.turn + 1})" if score.turn is not None else ""
            self.say(f"  {score.name}{at}: {value} × {score.weight:g}")
        correct = {True: ", correct", False: ", not correct", None: ""}[episode.correct]
        self.say(f"  reward {episode.reward if episode.reward is None else round(episode.reward, 6)}{correct}\n", "bold")

    def say(self, text: str, style: str = "") -> None:
        """A line as it is."""
        if text:
            self.console.print(Styled(text, style=style), soft_wrap=True)


def _signed(value: float) -> str:
    """A number with its sign; nothing is 0, also where it was computed as -0.0."""
    return f"{value:+g}" if value else "0"
