"""A model that can no longer give finite log-probs is found right after the update that ruined it, and never saved."""

from collections.abc import Sequence

from sensorium.learner.learner import Learner, Sample
from sensorium.vocabulary.errors import NonFiniteUpdate


def refuse_ruined(learner: Learner, samples: Sequence[Sequence[Sample]], step: int, rate: float, saved_at: int) -> None:
    """Raise if the weights, as an update left them, give log-probs that are not finite for its shortest episode."""
    trained = [sample for group in samples for sample in group if sample.episode.sampled_tokens]
    if not trained:
        return
    shortest = min(trained, key=_length)
    ((found,),) = learner.logprobs([[shortest]])
    if all(bool(logprobs_T.isfinite().all()) for logprobs_T in found):
        return
    kept = f"The last checkpoint, of step {saved_at}, is as it was" if saved_at > 0 else "No checkpoint was written"
    raise NonFiniteUpdate(
        f"step {step}: after its update the model gives log-probs that are not finite, so it is ruined and was not saved. "
        f"The learning rate was {rate:g}; lower it (optimizer.lr, for a warm start warm_start.optimizer.lr). {kept}."
    )


def _length(sample: Sample) -> int:
    return sum(len(segment.tokens) for thread in sample.episode.threads for segment in thread.segments)
