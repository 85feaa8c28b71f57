"""Which metrics a recipe can produce, as far as shows before it runs: for keys that name one (``checkpoint.best``)."""

from sensorium.recipe.schema import CheckpointSection, Recipe
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.errors import nearest

OF_A_STEP = (
    "reward/mean", "reward/greedy", "accuracy", "tasks/skipped_bad", "tasks/skipped_long", "groups/zero_variance",
    "groups/trained", "groups/dropped", "groups/rounds", "groups/without_signal", "groups/short", "groups/cancelled",
    "groups/unused", "groups/too_alike", "episodes/length_mean", "episodes/length_max", "episodes/turns_mean",
    "episodes/truncated", "episodes/out_of_context", "episodes/empty", "episodes/failed", "episodes/dropped",
    "episodes/masked", "episodes/kept_length_mean", "episodes/kept_length_max", "episodes/dropped_length_mean",
    "episodes/dropped_length_max", "groups/open",
    "policy/loss", "policy/clip_fraction", "policy/entropy", "policy/grad_norm", "policy/kl_old", "policy/kl_ref",
    "policy/kl_coef", "policy/learning_share", "policy/lr", "policy/ratio_max", "policy/skipped",
)  # fmt: skip
OF_A_CRITIC = ("value/loss", "value/explained_variance", "value/mean", "value/clip_fraction", "value/grad_norm")
OPEN = (
    "mismatch", "correction", "router", "packing", "media", "time", "throughput", "memory", "health", "retries", "sight",
    "environment", "engine", "staleness", "wait", "worker",
)  # fmt: skip
"""Families that no recipe would choose a checkpoint by; any name in them is taken."""

OF_AN_EVALUATION = ("accuracy", "reward", "length_mean", "turns_mean", "failed", "missing")
OWN_NAMES = ("environment", "accuracy_by_type")  # these terms may name their scores themselves, as a user's own terms may


def wrong_metric(recipe: Recipe, metric: str) -> str:
    """What is wrong with a metric that is to choose the best checkpoint, in a sentence; empty if it can be produced."""
    if not metric or metric == CheckpointSection.model_fields["best"].default:
        return ""
    family, _, rest = metric.partition("/")
    if family == "eval":
        return _wrong_evaluation(recipe, metric, rest)
    known = [*OF_A_STEP, *_terms(recipe, "reward/"), *_terms(recipe, "missing/")]
    if estimator_traits(recipe.algorithm.advantage.name).critic:
        known += OF_A_CRITIC
    if metric in known or family in OPEN or (family in ("reward", "missing") and _names_its_own(recipe)):
        return ""
    return f"this recipe never has the metric '{metric}'{nearest(metric, [*known, 'eval/accuracy', 'eval/reward'])}"


def _wrong_evaluation(recipe: Recipe, metric: str, rest: str) -> str:
    if not recipe.evaluation.every or not recipe.tasks.evaluate:
        return f"'{metric}' is never measured: give tasks.evaluate a source and set evaluation.every."
    known = [*OF_AN_EVALUATION, *_terms(recipe, "reward/")]
    if recipe.evaluation.samples > 1:
        known += [f"{name}@{recipe.evaluation.samples}" for name in ("mean", "best", "majority")]
    if rest in known or rest.startswith("accuracy/") or (rest.startswith("reward/") and _names_its_own(recipe)):
        return ""
    return f"no evaluation has the metric '{metric}'{nearest(metric, [f'eval/{name}' for name in known])}"


def _terms(recipe: Recipe, prefix: str) -> list[str]:
    return [f"{prefix}{term.options.get('name', term.name)}" for term in recipe.rewards.terms]


def _names_its_own(recipe: Recipe) -> bool:
    """True if a term's scores may have names that the recipe does not tell, such as the parts an environment pays."""
    return any(":" in term.name or term.name in OWN_NAMES for term in recipe.rewards.terms)
