"""All errors. Each names the offending thing and the way out; the command line prints them as one paragraph."""

from pathlib import Path


class SensoriumError(Exception):
    """Base of every error that a user can cause or fix; shown without a traceback."""


class RecipeError(SensoriumError):
    """The recipe, an override or a name in it is wrong; raised before anything is built."""


class UnknownJudge(RecipeError):
    """A term asks a judge without an endpoint or key, in the recipe or where the run is started."""


class TaskError(SensoriumError):
    """A row or source of tasks is malformed; names file and line."""


class DataChanged(SensoriumError):
    """A data file has changed since the run began to read it. Ends the run, whatever tasks.on_bad_row says."""


class MediaError(SensoriumError):
    """A picture, video or sound is missing, corrupt or too large; names the item."""


class PromptTooLong(TaskError):
    """A rendered prompt does not fit the context; media are never cut to make it fit."""


class ModelError(SensoriumError):
    """A checkpoint cannot be used: unknown family, missing part, unfit template."""


class SpanMismatch(SensoriumError):
    """Placeholders and features of a medium disagree; names task, turn and item. Costs the episode, not the run."""


class MemoryExhausted(SensoriumError):
    """The GPU or the machine has no memory left. Ends the run, which can continue from its last checkpoint."""


class EngineError(SensoriumError):
    """The engine failed or does not support a request."""


class EngineLost(SensoriumError):
    """The process that samples has ended or does not answer. Ends the run: nothing more can be sampled."""


class LearnerLost(SensoriumError):
    """A process that trains has ended or does not answer. Ends the run, which can continue from its last checkpoint."""


class EnvironmentFailure(SensoriumError):
    """An environment raised, or overran its deadline. Costs the episode, not the run."""


class EnvironmentLost(EnvironmentFailure):
    """The process in which an environment was played has ended: not its fault, so the episode is played again."""


class ServerLost(EnvironmentLost):
    """A server of environments does not answer, or does not know the episode: wait for it, and play again."""


class WorkersLost(SensoriumError):
    """No process or server is left that plays environments, or that scores. Ends the run; --resume continues it."""


class WorkGivenUp(SensoriumError):
    """Workers were lost each time they did this piece of work, so it may be the cause. Costs that work, not the run."""


class RewardFailure(SensoriumError):
    """A reward term raised, or overran its deadline. Gives a missing score, never a zero."""


class JudgeFailure(RewardFailure):
    """A judge did not answer in time, or not in the required form. Gives a missing score."""


class JudgeRefusal(JudgeFailure):
    """A judge refused the request itself (HTTP 4xx), so it is not repeated."""


class JudgeOffline(SensoriumError):
    """An offline run needs a judgement that its cache lacks. Ends the run: it would not repeat the earlier one."""


class NonFiniteUpdate(SensoriumError):
    """Loss or gradient is not finite; raised before the optimizer step, the batch is kept on disk."""


class NothingTrained(SensoriumError):
    """A run made no update, at all or for as many steps as the recipe allows. ``short`` omits the run's findings."""

    def __init__(self, text: str, short: str = "") -> None:
        super().__init__(text)
        self.short = short or text


class NonFiniteModel(SensoriumError):
    """The model holds numbers that are not finite, so it is not saved."""


class CheckpointError(SensoriumError):
    """A checkpoint is incomplete, or belongs to another recipe."""


class RecordError(SensoriumError):
    """A file of a run cannot be written (a full disk, no permission), is damaged, or is held by another process."""


class WriteFailed(RecordError):
    """A file could not be written. A run adds how to continue."""


MOST_KNOWN = 100  # names in an error; a run may have 100,000 episodes


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """A sentence that suggests the right name: ``; did you mean 'x'? Known: a, b, c``; of very many names a dozen."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    shown = sorted(known) if len(known) <= MOST_KNOWN else [*sorted(known)[:12], f"and {len(known) - 12:,} others"]
    return f"{hint} Known: {', '.join(shown)}."


def similar_file(path: Path) -> str:
    """A suggestion for a path that does not exist: ``; did you mean 'data/train.jsonl'?``, or nothing."""
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return "" if path.parent.is_dir() else f"; there is no folder '{path.parent}'"
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""
