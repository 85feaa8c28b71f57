"""Drawing tasks from the stream; bad rows and over-long prompts are refused, or skipped and counted, as the recipe says.

Rows are read, and their media decoded and preprocessed, in threads: the event loop stays free. While a step is trained on,
the rows of the next are read and their media decoded ahead.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from sensorium.recipe.schema import TasksSection
from sensorium.rollout.modalities import media_of
from sensorium.rollout.play import Rollout
from sensorium.tasks.mixture import Draw, Skipped, TaskStream
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import MediaError, PromptTooLong, TaskError
from sensorium.vocabulary.task import Task

SKIPPED_AT_ONCE = 10_000


class Drawing:
    """Draws what can be played: media are sound, and the prompt leaves room for a response."""

    def __init__(self, section: TasksSection, stream: TaskStream, rollout: Rollout) -> None:
        self.section, self.stream, self.rollout = section, stream, rollout
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")  # a source is read by one thread at a time
        self._ahead: tuple[tuple[int, int], Future[Draw]] | None = None

    async def draw(self, position: int, count: int) -> Draw:
        """The next ``count`` tasks from a position of the stream."""
        tasks: list[Task] = []
        skipped: list[Skipped] = []
        while len(tasks) < count:
            drawn = await asyncio.wrap_future(self._reading(position, count - len(tasks)))
            position = drawn.position
            skipped += drawn.skipped
            fitting, unfit = await self.fitting(drawn.tasks)
            tasks += fitting
            skipped += unfit
            if len(skipped) > SKIPPED_AT_ONCE:
                raise TaskError(f"{len(skipped)} tasks were skipped at once; the last because: {skipped[-1].reason}")
        return Draw(tuple(tasks), position, tuple(skipped))

    def look_ahead(self, position: int, count: int) -> None:
        """Begin to read what will be drawn next, and to decode its media. What is wrong with it is said when drawn."""
        reading = self._reader.submit(self._read, position, count)
        reading.add_done_callback(self._request)
        self._ahead = ((position, count), reading)

    async def fitting(self, tasks: Sequence[Task]) -> tuple[list[Task], list[Skipped]]:
        """Tasks whose media are sound and whose prompt leaves room for a response; media are preprocessed together."""
        errors = await asyncio.to_thread(self.rollout.prepare, tasks)
        fitting, unfit = [], []
        for task in tasks:
            try:
                for item in media_of(task.messages):
                    if item in errors:
                        raise errors[item]
                self.rollout.check_prompt(task)
                fitting.append(task)
            except (PromptTooLong, MediaError) as error:
                long = isinstance(error, PromptTooLong)
                if (self.section.on_long_prompt if long else self.section.on_bad_row) == "refuse":
                    raise
                unfit.append(Skipped(0, 0, str(error), long_prompt=long))
        return fitting, unfit

    def without_long_prompts(self, groups: Sequence[Group]) -> tuple[list[Group], int]:
        """Groups whose prompt did fit (a world shows its own only when played), and how many did not."""
        fit = []
        for group in groups:
            failure = prompt_too_long(group)
            if failure and self.section.on_long_prompt == "refuse":
                raise TaskError(failure)
            if not failure:
                fit.append(group)
        return fit, len(groups) - len(fit)

    def close(self) -> None:
        """Give the reader's thread back."""
        self._reader.shutdown(cancel_futures=True)

    def _reading(self, position: int, count: int) -> "Future[Draw]":
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead[0] == (position, count):
            return ahead[1]
        return self._reader.submit(self._read, position, count)

    def _read(self, position: int, count: int) -> Draw:
        return self.stream.draw(position, count, on_bad_row=self.section.on_bad_row)

    def _request(self, reading: "Future[Draw]") -> None:
        """Start to decode the media of what was read, unless reading was cut off or went wrong."""
        if reading.cancelled() or reading.exception() is not None:
            return
        self.rollout.chat.request(media_of(message for task in reading.result().tasks for message in task.messages))


def prompt_too_long(group: Group) -> str:
    """What was said of the first episode whose prompt left no room for a response; empty if all had some."""
    return next((e.failure for e in group.episodes if e.info.get("prompt_too_long")), "")


def skip_metrics(skipped: Sequence[Skipped], long: int) -> dict[str, float]:
    """How many tasks were left out by policy; ``long`` more for a prompt that a world showed when played."""
    too_long = sum(skip.long_prompt for skip in skipped)
    return {"tasks/skipped_bad": len(skipped) - too_long, "tasks/skipped_long": too_long + long}
