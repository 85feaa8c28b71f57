"""Which algorithm settings contradict each other, and which are legal but amount to something simpler.

A setting that the named estimator or loss does not take is refused when it differs from its default: it would do nothing.
"""

from collections.abc import Iterator, Sequence

from sensorium.recipe.estimators_and_losses import (
    CLIP,
    ESTIMATORS,
    LOSSES,
    PPO_CLIP,
    estimator_traits,
    loss_takes,
    loss_traits,
)
from sensorium.recipe.registry import PARAMETER_GROUPS
from sensorium.recipe.schema import CriticSection, Recipe, ScheduleSection, Section
from sensorium.vocabulary.errors import nearest

Problem = tuple[str, str]
WIDE_FOR_A_SEQUENCE = 0.05
LENGTH_TERMS = {"overlong", "token_length"}  # rewards that lower what a response gets that does not end
SHARED_BY_LOSSES = ("name", "aggregation", "aggregation_constant", "entropy_coef")


TRUNCATED = (
    "rollout.top_p {top_p:g}, top_k {top_k}: tokens are sampled from the truncated policy and trained as if from the whole "
    "one. Ratios (current / old) are of the whole policy and exactly 1 in the first update, so they do not see it: what "
    "was cut off is never tried and only loses probability, and entropy falls faster. Sample the whole policy (top_p 1, "
    "top_k 0), or weigh tokens by policy / truncated: algorithm.correction: {{weights: token, engine_logprobs: sampled}}."
)
UNCORRECTED = (
    "rollout.quantization is 'fp8' and algorithm.correction is off: tokens are sampled with weights in FP8 and trained as "
    "if sampled with those in bfloat16. Turn it on, algorithm.correction: {weights: token}, and watch mismatch/prob_error."
)


def algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Contradictions and settings without effect in ``algorithm``."""
    yield from _estimator(recipe)
    yield from _loss(recipe)
    yield from _kl(recipe)
    yield from _correction(recipe)
    yield from _schedule(recipe)
    yield from _critic(recipe)


def cautions(recipe: Recipe) -> list[str]:
    """Settings that run, but equal something simpler, or are risky: one sentence each, for the start of the run."""
    section, found = recipe.algorithm.advantage, []
    name, one_turn = section.name, recipe.rollout.max_turns == 1
    unit = section.gamma == section.lam == section.turn_gamma == section.turn_lam == 1.0
    if name == "bi_level_gae" and unit:
        found.append(
            "algorithm.advantage: bi_level_gae with gamma, lam, turn_gamma and turn_lam all 1 equals masked_gae with gamma "
            "and lam 1, as long as rewards come at turn ends. To weigh turns differently set turn_gamma below 1."
        )
    elif name == "bi_level_gae" and one_turn:
        found.append(
            "algorithm.advantage: with rollout.max_turns 1 there is one turn, so bi_level_gae has no use for turn_gamma "
            "and turn_lam."
        )
    if name == "turn_wise_gae" and one_turn:
        found.append(
            "algorithm.advantage: with rollout.max_turns 1 turn_wise_gae is the episode's reward minus one value, the same "
            "for all its tokens."
        )
    discount = "gamma" if name in ("gae", "masked_gae") else "turn_gamma"
    undiscounted = estimator_traits(name).critic and getattr(section, discount) == 1.0
    if undiscounted and not one_turn and not (name == "bi_level_gae" and unit):
        found.append(
            f"algorithm.advantage: {name} without a discount: an episode that is cut short counts as what the critic says "
            f"of its end, so a policy may learn to be cut short. Where that happens set {discount} below 1."
        )
    if undiscounted and one_turn and not LENGTH_TERMS & {term.name for term in recipe.rewards.terms}:
        limit = recipe.rollout.max_new_tokens
        masked = "is not trained on" if recipe.rollout.mask_truncated else "counts as what the critic says of its end"
        found.append(
            f"algorithm.advantage: {name} without a discount: an answer that reaches rollout.max_new_tokens {limit} "
            f"{masked}, and a wrong one that ends costs more, so a policy may learn never to end. Let it cost, by "
            f"the term {{name: overlong, options: {{max_tokens: {limit}, buffer_tokens: 1}}}}, or {discount} below 1."
        )
    if not recipe.algorithm.loss_mask:
        found.append(
            "algorithm.loss_mask: false trains on the text of observations as if the model had written it: it learns what "
            f"the environment will say.{' With rollout.max_turns 1 nothing is observed after a response.' * one_turn}"
        )
    if name == "gdpo" and len(recipe.rewards.terms) == 1:
        found.append("algorithm.advantage: gdpo with a single reward term is grpo, whitened over the batch.")
    rollout, correction = recipe.rollout, recipe.algorithm.correction
    truncated = recipe.steps > 0 and (rollout.top_p < 1 or rollout.top_k > 0)
    sampled = correction.engine_logprobs == "sampled"
    if truncated and not (sampled and correction.weights != "none"):
        found.append(TRUNCATED.format(top_p=rollout.top_p, top_k=rollout.top_k))
    if sampled and not truncated:
        found.append(
            "algorithm.correction.engine_logprobs: sampled is the same as policy here, since neither rollout.top_p nor "
            "rollout.top_k cuts anything off."
        )
    fp8 = rollout.quantization == "fp8"
    if fp8 and recipe.steps > 0 and correction.weights == "none":
        found.append(UNCORRECTED)
    on_policy = rollout.engine.name in ("native", "process") and recipe.schedule.name == "synchronous" and not fp8
    if correction.weights != "none" and on_policy and not (truncated and sampled):
        found.append(
            "algorithm.correction: this engine samples with the learner's own weights and log-probs of the whole "
            "policy, so the correction's weights are about 1."
        )
    return [*found, *_loss_cautions(recipe)]


def _loss_cautions(recipe: Recipe) -> Iterator[str]:
    section = recipe.algorithm.loss
    name, low, high = section.name, section.clip_low, section.clip_high
    if name == "gspo" and low is not None and high is not None and max(low, high) >= WIDE_FOR_A_SEQUENCE:
        own = " and ".join(f"{value:g}" for value in loss_traits(name).clip)
        yield (
            f"algorithm.loss: gspo with clip_low {low:g} and clip_high {high:g} clips hardly anything: the mean ratio of a "
            f"sequence moves a thousand times less than that of a token. Leave both out for the published {own}."
        )
    if section.dual_clip is None and loss_takes(name, "dual_clip") and name in LOSSES:
        yield (
            f"algorithm.loss: {name} without dual_clip: a bad token that became e^19 times likelier has a gradient of e^19 "
            "and drowns the update. Watch policy/ratio_max, or leave dual_clip at its default."
        )


def _estimator(recipe: Recipe) -> Iterator[Problem]:
    section, at = recipe.algorithm.advantage, "algorithm.advantage"
    traits = estimator_traits(section.name)
    if section.name in ESTIMATORS:
        yield from _unused(section, traits.settings, ("name", "post"), at, f"the estimator '{section.name}'")
    if section.post != "none" and not traits.compares:
        yield f"{at}.post", f"{section.post} mends advantages within a group, and {section.name} does not compare groups."
    rollout, algorithm = recipe.rollout, recipe.algorithm
    if algorithm.sees_observations and rollout.window and rollout.window < rollout.max_turns:
        key = f"{at}.name" if algorithm.masked else f"algorithm.{'gae' if algorithm.loss_mask else 'loss'}_mask"
        yield (
            key,
            f"{section.name} runs over one growing thread, observations included, and rollout.window {rollout.window} cuts "
            "an episode into several; use masked_gae with its masks, or window 0.",
        )
    if not algorithm.gae_mask and not traits.critic:
        yield "algorithm.gae_mask", f"gae_mask: false does nothing: {section.name} is no form of GAE. Leave it out."
    if not algorithm.loss_mask and algorithm.gae_mask and traits.critic and not traits.observations:
        without = f"{section.name} with gae_mask gives observations no advantage, so there is nothing to train them with"
        yield "algorithm.loss_mask", f"{without}. Set algorithm.gae_mask: false too, or leave both out."


def _loss(recipe: Recipe) -> Iterator[Problem]:
    section, at = recipe.algorithm.loss, "algorithm.loss"
    traits = loss_traits(section.name)
    if section.name == "likelihood" and recipe.steps:
        yield f"{at}.name", "likelihood ignores advantages; it is the warm start's loss (warm_start.steps), not one of RL."
    if section.name in LOSSES:
        yield from _unused(section, traits.settings, SHARED_BY_LOSSES, at, f"the loss '{section.name}'")
    if traits.aggregations and section.aggregation not in ("auto", *traits.aggregations):
        yield (
            f"{at}.aggregation",
            f"{section.name} is defined over whole sequences, so '{section.aggregation}' would weigh its tokens wrongly; "
            f"use {' or '.join(traits.aggregations)} (or leave it out).",
        )
    if section.aggregation != "constant" and section.aggregation_constant != 1.0:
        unused = f"only aggregation 'constant' uses it, and aggregation is '{section.aggregation}'"
        yield f"{at}.aggregation_constant", f"aggregation_constant {section.aggregation_constant} does nothing: {unused}."
    if section.cov_low >= section.cov_high:
        yield f"{at}.cov_low", f"the band from cov_low {section.cov_low} to cov_high {section.cov_high} is empty."


def _kl(recipe: Recipe) -> Iterator[Problem]:
    section, at = recipe.algorithm.kl, "algorithm.kl"
    if section.place == "loss" and section.estimator == "k1":
        yield (
            f"{at}.estimator",
            "k1 in the loss has no gradient in expectation, so it would hold nothing back; use k2, k3 or "
            "k1_straight_through, or place: reward.",
        )
    if section.place == "reward" and section.estimator.endswith("_straight_through"):
        plain = section.estimator.removesuffix("_straight_through")
        yield f"{at}.estimator", f"a reward has no gradient to pass straight through; use {plain}."
    if section.place == "reward" and section.coef and estimator_traits(recipe.algorithm.advantage.name).per_term:
        yield f"{at}.place", "gdpo normalises named reward terms, and a KL in the reward is none of them; use place: loss."
    episodes = recipe.batch.prompts_per_step * recipe.batch.group_size
    if section.control == "adaptive" and section.coef and 0.2 * episodes >= section.horizon:
        yield (
            f"{at}.horizon",
            f"a step of {episodes} episodes could move the coefficient past 0 within a horizon of {section.horizon:g}; use "
            f"at least {episodes}.",
        )
    if not section.coef:
        yield from _unused(section, (), ("coef", "estimator"), at, "a coefficient of 0")
    elif section.control == "fixed":
        yield from _unused(section, (), ("coef", "estimator", "place", "control"), at, "a fixed coefficient")


def _correction(recipe: Recipe) -> Iterator[Problem]:
    section, at = recipe.algorithm.correction, "algorithm.correction"
    takes = ["weights", "reject"]
    if section.weights != "none":
        takes += ["mode", "high"] if section.mode == "truncate" else ["mode", "low", "high"]
    if section.reject != "none":
        takes += ["estimator", "reject_above"]
    if section.weights != "none" or section.reject != "none":
        takes += ["engine_logprobs"]
    yield from _unused(section, (), takes, at, f"weights '{section.weights}' ({section.mode}), reject '{section.reject}'")
    if section.mode == "band" and section.low >= section.high:
        yield f"{at}.low", f"the band from low {section.low} to high {section.high} is empty."


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    schedule, best = recipe.schedule.name, recipe.checkpoint.best
    if schedule != "synchronous" and recipe.algorithm.correction.weights == "none":
        older = f"with {schedule} a step is trained on episodes of older policies, and nothing accounts for that"
        yield "schedule", f"{older}: set algorithm.correction.weights (token), or schedule: synchronous."
    if schedule == "one_step_off" and best and not best.startswith("eval/"):
        due = f"with schedule one_step_off nothing is played ahead where a checkpoint is due; '{best}' may be best anywhere"
        yield "checkpoint.best", f"{due}: name a metric of evaluations (eval/…), or leave it empty."
    if schedule != "asynchronous":
        if recipe.schedule.max_staleness != ScheduleSection().max_staleness:
            yield "schedule.max_staleness", f"{schedule} has no such bound; it belongs to schedule: asynchronous."
        return
    if recipe.rollout.schedule == "lockstep":
        yield (
            "rollout.schedule",
            "lockstep waits for every episode before each token, and with schedule asynchronous there is always one that "
            "has just begun: set rollout.schedule: eager.",
        )
    section = recipe.selection
    asked = {"dynamic": section.dynamic, "oversample": section.oversample > 1, "variance_share": section.variance_share < 1}
    for option, wanted in asked.items():
        if wanted:
            yield (
                f"selection.{option}",
                "it chooses among the groups of a step, and with schedule asynchronous a step is the groups that are "
                "complete: leave it at its default, or use another schedule.",
            )
    name = recipe.algorithm.advantage.name
    if estimator_traits(name).greedy:
        yield (
            "algorithm.advantage",
            f"'{name}' compares a group with a greedy episode of the same weights, and with schedule asynchronous a group "
            "may be of several: use another estimator, or another schedule.",
        )


def _critic(recipe: Recipe) -> Iterator[Problem]:
    section, at = recipe.algorithm.critic, "algorithm.critic"
    name = recipe.algorithm.advantage.name
    if not estimator_traits(name).critic:
        if section != CriticSection():
            with_critic = ", ".join(known for known, traits in ESTIMATORS.items() if traits.critic)
            yield at, f"the estimator '{name}' needs no critic, so these settings do nothing; those that do: {with_critic}."
        return
    if section.trunk == "shared" and (section.path or section.freeze):
        yield at, "a head on the policy's trunk has no trunk of its own: path and freeze belong to trunk: own."
    if section.trunk == "own" and section.trunk_coef:
        yield f"{at}.trunk_coef", "an own trunk sees the whole value loss; trunk_coef belongs to trunk: shared."
    if recipe.steps and section.warmup_steps >= recipe.steps:
        yield (
            f"{at}.warmup_steps",
            f"warmup_steps is {section.warmup_steps}: the policy does not learn in the first {section.warmup_steps} of "
            f"{recipe.steps} steps, so never.",
        )
    for i, group in enumerate(section.freeze):
        if group not in PARAMETER_GROUPS:
            yield f"{at}.freeze.{i}", f"unknown parameter group '{group}'{nearest(group, list(PARAMETER_GROUPS))}"


def _unused(section: Section, taken: Sequence[str], shared: Sequence[str], at: str, who: str) -> Iterator[Problem]:
    """Settings without effect that differ from their default. PPO's clip, and null, are accepted with any loss."""
    for key, field in type(section).model_fields.items():
        value = getattr(section, key)
        inherited = key in CLIP and value == PPO_CLIP[CLIP.index(key)]
        if key not in (*taken, *shared) and value not in (field.default, None) and not inherited:
            known = f"takes {', '.join(taken)}" if taken else "has no use for it"
            yield f"{at}.{key}", f"'{key}: {value}' does nothing: {who} {known}. Leave it out."
