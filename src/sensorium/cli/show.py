"""Show one task as the model will see it, without loading weights: the rendered prompt with its special tokens, tokens
by kind of medium, the media after resizing and sampling (as files), and the demonstration with what each reward term
gives.

Of a task that is played in an environment: its first observation, by its seed, and the turns of its demonstration.
Media of a training task that the recipe augments are shown twice: as they are, and augmented as in one draw.
"""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image
from rich.text import Text as Styled

from sensorium.cli.play import RECORDED_SIDE, SIDES, chosen_tasks
from sensorium.data.augmentation import augmented_task
from sensorium.data.sound import encode_wav
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import RolloutSection
from sensorium.report.album import contact_sheet, waveform
from sensorium.report.console import WorkBar
from sensorium.report.terminal import Terminal
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Episode, Segment, Status
from sensorium.vocabulary.errors import MediaError, SensoriumError
from sensorium.vocabulary.plain import counted
from sensorium.vocabulary.task import RECORDED, Task

if TYPE_CHECKING:  # it imports torch, and what needs none is shown first
    from sensorium.cli.validation import ModelFreeSession

USAGE = "sensorium show RECIPE [key=value …] [--task N|ID] [--split evaluate|train|demonstrations] [--out DIR]"
RETRIES = {"retries": 0, "retry_wait_s": 0.0}  # of terms: whoever waits here is a person
SPECIAL, FAINT = "cyan", "dim"
ENDLESS = 1 << 40  # tokens of a context: a prompt that is too long is shown, too
KINDS = ("picture", "video", "sound")


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (shapes)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: rollout.max_turns=3")
    parser.add_argument("--task", default="0", help="the task: its number, counted from 0, or its id")
    parser.add_argument("--split", choices=[*SIDES, RECORDED_SIDE], help="which tasks; by default those to evaluate on")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the media; by default runs/show/NAME")


def run(arguments: Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    recipe = recipe.model_copy(update={"rewards": recipe.rewards.model_copy(update=RETRIES)})
    from sensorium.assembly.playing import open_store

    with WorkBar() as bar:
        store = open_store(recipe)
        found = chosen_tasks(recipe, store, arguments, 1, bar)
        (task,) = found.tasks
        if found.side == SIDES["train"] and recipe.tasks.augment is not None:
            task = augmented_task(task, recipe.tasks.augment, recipe.seed, found.number)
        page = Page(arguments.out or Path("runs") / "show" / recipe.name)
        page.head(task, f"{found.side}, number {found.number}")
        if found.note:
            page.say(found.note, "yellow")
        bar.begin(f"loading the tokenizer and the chat template of {recipe.model.path}")
        from sensorium.cli.validation import model_free_session

        with model_free_session(recipe, store, alone=True) as session:
            bar.progress.stop()
            if session.stand_in:
                page.say(f"The files of {recipe.model.path} are not here: {session.stand_in} replaces it.", "yellow")
            page.show(session, task, recipe.held_out_rollout if found.side == SIDES["evaluate"] else recipe.rollout)
    return 0


class Page:
    """What is printed about one task; its media are written to ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.console, self.folder = Terminal(highlight=False), folder
        self._shown: set[Media] = set()
        self._cleared = False
        self._counts: Counter[str] = Counter()

    def head(self, task: Task, place: str) -> None:
        """What is known of a task before its prompt is rendered."""
        self.say(f"── task {task.id} ({place}) ──", "bold")
        spec = task.environment
        if spec is not None and spec.name == RECORDED:
            self.say(f"a recorded episode of {counted(len(task.demonstration), 'turn')}")
        elif spec is not None:
            options = ", ".join(f"{name}={value!r:.60}" for name, value in spec.options.items())
            self.say(f"environment {spec.name}, seed {spec.seed}" + (f", {options}" if options else ""))
        known = {"answer": task.answer, **{name: task.metadata.get(name) for name in ("category", "type")}}
        if facts := "  ".join(f"{name}: {value!r:.200}" for name, value in known.items() if value is not None):
            self.say(facts)

    def show(self, session: "ModelFreeSession", task: Task, section: RolloutSection) -> None:
        """The prompt, its media, and the turns of the demonstration with their scores."""
        from sensorium.cluster.event_loop import run_async
        from sensorium.trainer.health.start_checks import has_demonstration

        whole = section.model_copy(update={"max_context_tokens": ENDLESS, "max_episode_tokens": 0})
        contexts: list[Sequence[Segment]] = []
        (group,) = run_async(session.play([task], lambda request: "", demonstrate=True, section=whole))
        episode = group.episodes[0]
        if not episode.turns:  # nothing is demonstrated: only the prompt is shown
            failure = episode.failure if has_demonstration(task) else ""
            first = whole.model_copy(update={"max_turns": 1})

            def answer(request: Any) -> str:
                contexts.append(request.context)
                return ""

            (group,) = run_async(session.play([task], answer, section=first))
            if not contexts:
                raise SensoriumError(f"{group.episodes[0].failure.rstrip('.')}.")
            turns = group.episodes[0].turns[:1]
            shown = [message for turn in turns for message in turn.observation]
            self._context(session, contexts[0], contexts[0], section, shown)
            self.say(f"\nno demonstration{': ' + failure if failure else ''}", "bold")
            return
        self._episode(session, episode, section)

    def _episode(self, session: "ModelFreeSession", episode: Episode, section: RolloutSection) -> None:
        printed: list[Segment] = []
        for turn in episode.turns:
            segments = episode.threads[turn.thread].segments
            context = segments[: turn.segment]
            new = [segment for segment in context if not any(segment is known for known in printed)]
            name = f"turn {turn.index + 1}" if len(episode.turns) > 1 else "prompt"
            self._context(session, context, new, section, turn.observation, name)
            printed += segments[: turn.segment + 1]
            count = len(turn.response.tokens)
            cut = f", of which a response may have {section.max_new_tokens:,}" if count > section.max_new_tokens else ""
            self.say(f"\n── demonstration, {count:,} tokens{cut} ──", "bold yellow" if cut else "bold")
            self.console.print(self._rendered(session, turn.response), soft_wrap=True)
            rewards = turn.parts or ({} if turn.reward is None else {"reward": turn.reward})
            if rewards:
                self.say("environment: " + "  ".join(f"{name} {value:+g}" for name, value in rewards.items()), FAINT)
        self.say("\n── rewards of the demonstration ──", "bold")
        if episode.status is not Status.FINISHED:
            self.say(f"the episode {episode.status.value}{': ' + episode.failure if episode.failure else ''}", "yellow")
        for name, value, style in _score_lines(episode):
            self.say(f"  {name}: {value}", style)
        correct = {True: ", judged right", False: ", judged wrong", None: ""}[episode.correct]
        for name, weight in session.unasked:
            self.say(f"  {name}: not asked, since it needs a judge or a service (weight {weight:g})", FAINT)
        unasked = any(score.missing and score.weight for score in episode.scores) or any(w for _, w in session.unasked)
        total = "not known, since terms that carry weight are missing" if unasked else f"{episode.reward or 0:g}"
        self.say(f"  in all: {total}{correct}", "bold")

    def _context(
        self,
        session: "ModelFreeSession",
        context: Sequence[Segment],
        new: Sequence[Segment],
        section: RolloutSection,
        observation: Sequence[Message],
        name: str = "prompt",
    ) -> None:
        """What is new in a context as the model reads it, its tokens by kind, and the media of the observation."""
        self.say(f"\n── {name}, as the model reads it ──", "bold")
        text = Styled()
        for segment in new:
            text.append_text(self._rendered(session, segment))
        self.console.print(text, soft_wrap=True)
        counts: Counter[str] = Counter()
        for segment in new:
            layout = session.chat.layout(segment)
            for slot in layout.slots:
                counts[slot.media.kind] += slot.count
            counts["text"] += len(layout) - sum(slot.count for slot in layout.slots)
        total = sum(len(session.chat.layout(segment)) for segment in context)
        limit, key = section.prompt_limit
        parts = ", ".join(f"{counts[kind]:,} {kind}" for kind in ("text", "picture", "video", "sound") if counts[kind])
        room = f"{key.rstrip(',')} is {limit:,}, and a response may take {section.max_new_tokens:,}"
        before = " with the turns before" if len(context) > len(new) else ""
        self.say(f"tokens: {parts}; {total:,} in all{before}, where {room}", "red" if total >= limit else "green")
        for media in (medium for message in observation for medium in message.media):
            for part in session.chat.shown(media).parts:
                if part not in self._shown:
                    self._shown.add(part)
                    self._medium(session, part)

    @staticmethod
    def _rendered(session: "ModelFreeSession", segment: Segment) -> Styled:
        """A segment's text with special tokens by name, and repeated ones of media counted."""
        chat, layout = session.chat, session.chat.layout(segment)
        text, plain = Styled(), b""
        for token, run in groupby(layout.ids_T.tolist()):
            count = sum(1 for _ in run)
            if written := chat.token_bytes(token):
                plain += written * count
                continue
            text.append(plain.decode(errors="replace"))
            plain = b""
            name = chat.tokenizer.convert_ids_to_tokens(token)
            text.append(name if count == 1 else f"{name}×{count}", SPECIAL)
        return text.append(plain.decode(errors="replace"))

    def _medium(self, session: "ModelFreeSession", media: Media) -> None:
        self._counts[media.kind] += 1
        name = f"{media.kind}_{self._counts[media.kind]}"
        if media.augmentation is not None:
            self._version(session, replace(media, augmentation=None), f"{name}_original")
        self._version(session, media, name)

    def _version(self, session: "ModelFreeSession", media: Media, name: str) -> None:
        try:
            draw = {"picture": self._picture, "video": self._video, "sound": self._sound}[media.kind]
            facts, files = draw(session, media, name)
        except MediaError as error:
            self.say(f"{name.replace('_', ' ')}: {error}", "red")
            return
        count = session.chat.media_format.expand(session.chat.prepared.extent(media)).count
        self.say(f"{name.replace('_', ' ')} ({media.name}): {facts}; {count:,} tokens")
        for file in files:
            self.say(f"  {file}", FAINT)

    def _picture(self, session: "ModelFreeSession", media: Media, name: str) -> tuple[str, list[Path]]:
        from sensorium.models.prepared_media import seen_frames

        own = session.store.picture(media)
        frames = seen_frames(session.chat, media)
        if not frames:
            return f"{_size(own)} pixels, resized by the checkpoint's processor", [self._saved(own, name)]
        seen = f"{_size(frames[0])} pixels" if len(frames) == 1 else f"{len(frames)} tiles of {_size(frames[0])} pixels"
        sheet = contact_sheet(frames, [f"tile {i}" for i in range(1, len(frames) + 1)] if len(frames) > 1 else ())
        return f"{_size(own)} pixels, seen as {seen}", [self._saved(sheet, name)]

    def _video(self, session: "ModelFreeSession", media: Media, name: str) -> tuple[str, list[Path]]:
        from sensorium.models.prepared_media import seen_frames

        clip: Any = session.chat.decoder.get(media)
        frames = seen_frames(session.chat, media) or [Image.fromarray(frame) for frame in clip.frames]
        times = [f"{time:.2f}" for time in clip.times_s.tolist()]
        shown = frames[: len(times)]  # one is repeated where their number is odd
        sheet = contact_sheet(shown, [f"{time} s" for time in times])
        part = (
            f"{clip.end_s - clip.start_s:.2f} s at {clip.source_fps:g} frames a second of {clip.size[0]} x {clip.size[1]}"
        )
        facts = f"{part} pixels; {len(times)} frames, seen as {_size(frames[0])} pixels, at {', '.join(times)} s"
        return facts, [self._saved(sheet, name)]

    def _sound(self, session: "ModelFreeSession", media: Media, name: str) -> tuple[str, list[Path]]:
        clip: Any = session.chat.decoder.get(media)
        loudest = float(abs(clip.samples).max())
        wav = self._place(f"{name}.wav")
        wav.write_bytes(encode_wav(clip.samples, clip.sample_rate))
        seconds = len(clip.samples) / clip.sample_rate
        facts = f"{seconds:.2f} s at {clip.sample_rate:,} samples a second, the loudest {loudest:.3g} of full scale"
        return facts, [self._saved(waveform(clip.samples, clip.sample_rate, clip.start_s), name), wav]

    def _saved(self, picture: Image.Image, name: str) -> Path:
        place = self._place(f"{name}.png")
        picture.save(place, compress_level=1)
        return place

    def _place(self, name: str) -> Path:
        if not self._cleared:
            self._cleared = True
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in (
                file for kind in KINDS for file in self.folder.glob(f"{kind}_*") if file.suffix in (".png", ".wav")
            ):
                old.unlink()  # of another task, and to be mixed up with this one's
        return self.folder / name

    def say(self, text: str, style: str = "") -> None:
        self.console.print(Styled(text, style=style), soft_wrap=True)


def _size(picture: Image.Image) -> str:
    return f"{picture.width} x {picture.height}"


def _score_lines(episode: Episode) -> Iterator[tuple[str, str, str]]:
    """Each score's name, value and style."""
    for score in episode.scores:
        at = f" (turn {score.turn + 1})" if score.turn is not None and len(episode.turns) > 1 else ""
        if score.value is not None:
            yield score.name + at, f"{score.value:+g} × {score.weight:g}" if score.value else f"0 × {score.weight:g}", ""
        else:
            yield score.name + at, f"no score: {score.reason} (weight {score.weight:g})", "yellow"
