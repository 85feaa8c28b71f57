"""One page of errors. Each names the offending thing and the way out; the command line prints them as one paragraph."""

from pathlib import Path


class SensoriumError(Exception):
    """Base of every error a user can cause or mend; shown without a traceback."""


class RecipeError(SensoriumError):
    """The recipe, an override or a name in it is wrong; raised before anything is built."""


class UnknownJudge(RecipeError):
    """A term asks a judge that has no endpoint, in the recipe or where the run is started, or whose key is not there."""


class TaskError(SensoriumError):
    """A row or source of tasks is malformed; names file and line."""


class DataChanged(SensoriumError):
    """A data file is not what it was when the run began to read it. Ends the run, whatever is done about bad rows."""


class MediaError(SensoriumError):
    """A picture, video or sound is missing, corrupt or too large; names the item."""


class PromptTooLong(TaskError):
    """A rendered prompt does not fit the context; media are never cut to make it fit."""


class ModelError(SensoriumError):
    """A checkpoint cannot be used: unknown family, missing part, unfit template."""


class SpanMismatch(SensoriumError):
    """Placeholders and features of a medium disagree; names task, turn and item. Costs the episode, not the run."""


class MemoryExhausted(SensoriumError):
    """The GPU or the machine has no memory left. Ends the run: it goes on from its last checkpoint, with less to hold."""


class EngineError(SensoriumError):
    """The sampler failed or was asked for something it does not do."""


class EngineLost(SensoriumError):
    """The process that samples has ended or does not answer. Ends the run: nothing more can be sampled."""


class LearnerLost(SensoriumError):
    """A process that trains has ended or does not answer. Ends the run: it goes on from its last checkpoint."""


class EnvironmentFailure(SensoriumError):
    """An environment raised, or overran its deadline. Costs the episode, not the run."""


class EnvironmentLost(EnvironmentFailure):
    """The process in which an environment was played has ended: not its fault, so the episode is played again."""


class WorkersLost(SensoriumError):
    """No process is left that plays environments, or that scores. Ends the run; --resume goes on."""


class WorkGivenUp(SensoriumError):
    """Workers were lost each time they did this piece of work: it may be what ends them. Costs that work, not the run."""


class RewardFailure(SensoriumError):
    """A reward term raised, or overran its deadline. Gives a missing score, never a zero."""


class JudgeFailure(RewardFailure):
    """A judge did not answer in time, or not in the form that was asked for. Gives a missing score."""


class JudgeRefusal(JudgeFailure):
    """A judge refused the request itself (HTTP 4xx): asking again would not help, so nobody does."""


class JudgeOffline(SensoriumError):
    """An offline run needs a judgement that its cache lacks. Ends the run: it would not repeat the earlier one."""


class NonFiniteUpdate(SensoriumError):
    """Loss or gradient is not finite; raised before the optimizer step, the batch is kept on disk."""


class NothingTrained(SensoriumError):
    """A run made no update, at all or for as many steps as the recipe allows; what it has is saved.

    ``short`` is for who has seen the run's findings already: it does not repeat them.
    """

    def __init__(self, text: str, short: str = "") -> None:
        super().__init__(text)
        self.short = short or text


class NonFiniteModel(SensoriumError):
    """The model holds numbers that are not finite, so it is not saved: it must not take a good checkpoint's place."""


class CheckpointError(SensoriumError):
    """A checkpoint is incomplete, or belongs to another recipe."""


class RecordError(SensoriumError):
    """A file of a run cannot be written (a full disk, no permission), is damaged, or is held by another process."""


class WriteFailed(RecordError):
    """A file could not be written. A run adds how it goes on: from its last checkpoint, or from the start without one."""


def nearest(name: str, known: list[str], cutoff: float = 0.5) -> str:
    """A sentence that suggests the right name: ``; did you mean 'x'? Known: a, b, c``."""
    from difflib import get_close_matches

    close = get_close_matches(name, known, n=1, cutoff=cutoff)
    hint = f"; did you mean '{close[0]}'?" if close else "."
    return f"{hint} Known: {', '.join(sorted(known))}."


def similar_file(path: Path) -> str:
    """A suggestion for a path that does not exist: ``; did you mean 'data/train.jsonl'?``, or nothing."""
    from difflib import get_close_matches

    try:
        names = [entry.name for entry in path.parent.iterdir()]
    except OSError:
        return "" if path.parent.is_dir() else f"; there is no folder '{path.parent}'"
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    return f"; did you mean '{path.parent / close[0]}'?" if close else ""
