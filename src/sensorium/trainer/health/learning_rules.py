"""Rules about what updates do to the model: rates and gradients, entropy, a sudden loss, the engine, and sight."""

from math import hypot, sqrt
from statistics import NormalDist

from sensorium.evaluation.intervals import Z95
from sensorium.record.findings import Finding
from sensorium.trainer.health.facts import HeldOutResult, StepFacts

LARGEST_RATE = 0.05
LARGEST_GRADIENT = 1e3
LARGEST_RATIO = 100.0
SMALLEST_SHARE = 0.1
FRESH_SHARE = 0.25
"""Effective share of the tokens of a step below which what older weights wrote no longer bears on the new ones."""
COLLAPSED = 0.05
NO_GAIN, LEARNED = 0.02, 0.15
"""Held-out accuracy that gained no more than the first, while training accuracy gained more than the second."""
BY_CHANCE = 0.01
"""How often a fall may be told of accuracy that only varies, divided by the number of comparisons."""
SURE = 4.0
ROUNDING = 1e-5
"""The largest difference of a log-prob that float32 on a CPU explains, in units of the logits' scale (at least 1)."""
LARGEST_KL = 2e-2
"""The largest KL of engine and learner that bfloat16 or a GPU's kernels explain."""
BLANKED = {"picture": "pictures blanked", "video": "videos blanked", "sound": "sound muted"}


def learning_rate(facts: StepFacts) -> Finding | None:
    """The learning rate is larger than weights are: AdamW moves every weight by about the rate in each update."""
    rate = facts.row.get("policy/lr", 0.0)
    if rate <= LARGEST_RATE:
        return None
    section = "warm_start.optimizer" if facts.supervised else "optimizer"
    cause = "AdamW moves every weight by about that much in each update, and most weights are smaller"
    advice = f"Lower {section}.lr: 1e-6 to 1e-5 is usual for whole models, 1e-4 for adapters and very small models"
    return Finding("learning_rate", f"the learning rate is {rate:g}", cause, advice, grave=True)


def gradient(facts: StepFacts) -> Finding | None:
    """The gradient norm is far above what clipping allows, so that the update's direction is one outlier's."""
    norm, clip = facts.row.get("policy/grad_norm", 0.0), facts.recipe.optimizer.clip_norm
    if norm <= LARGEST_GRADIENT * clip:
        return None
    cause = "a ratio or an advantage has run away, or the model is no longer what it was"
    advice = "Lower the learning rate, set algorithm.loss.dual_clip, or look at the largest advantages of the step"
    return Finding("gradient", f"the gradient norm is {norm:.2g}, and clip_norm {clip:g}", cause, advice)


def sudden_loss(facts: StepFacts) -> Finding | None:
    """Accuracy fell far below what the run had reached, or entropy far above where it began: the model is damaged.

    Accuracy must be below half of the best and lower by four standard errors, the largest that so many groups may have.
    """
    if not facts.history.trained:
        return None
    groups = len(facts.evidence.groups)
    cause = "an update was too large"
    advice = (
        "Go back to an earlier checkpoint (the last one from before this is kept) and lower the learning rate, or bound "
        "updates with algorithm.kl.coef"
    )
    best, now = facts.history.best.get("accuracy"), facts.row.get("accuracy")
    if best is not None and now is not None and groups and now < min(best / 2, best - SURE * sqrt(0.25 / groups)):
        what = f"accuracy fell from {best:.2f} to {now:.2f}"
        return Finding("sudden_loss", what, cause, advice, grave=True)
    first, entropy = facts.history.first.get("policy/entropy"), facts.row.get("policy/entropy")
    if first is not None and entropy is not None and entropy > 2 * first + 1:
        what = f"entropy rose from {first:.2f} to {entropy:.2f}: the model writes at random"
        return Finding("sudden_loss", what, cause, advice, grave=True)
    return None


def held_out_fall(facts: StepFacts) -> Finding | None:
    """Held-out accuracy is clearly below the run's first or best evaluation: their intervals do not overlap.

    It stands until the next evaluation. The more evaluations there are, the further apart the best and the worst of them
    lie by chance, so the gap must be one that so many comparisons do not explain. Below the first one it is grave.
    """
    if len(facts.held_out) < 2:
        return None
    *earlier, now = facts.held_out
    first, best, count = earlier[0], max(earlier, key=lambda result: result.accuracy), len(earlier)
    below_first = _clearly_below(now, first, comparisons=count)
    if not below_first and not _clearly_below(now, best, comparisons=count * (count + 1) // 2):
        return None
    was = first if below_first else best
    start = "before training" if was.step == 0 else f"at step {was.step}"
    what = f"held-out accuracy fell from {was.text} {start} to {now.text} at step {now.step}"
    causes = ["the learning rate is too high", "the reward pays something else than the evaluation asks for"]
    rl = now.step > facts.recipe.warm_start.steps
    lower = "optimizer.lr" if rl else "warm_start.optimizer.lr"
    if rl and facts.recipe.schedule.name != "synchronous":
        causes.append(f"the episodes are stale (schedule: {facts.recipe.schedule.name})")
        lower += " or schedule.max_staleness"
    advice = f"Lower {lower} and read the episodes in the report; {_best_checkpoint(facts, best)}"
    return Finding("held_out_fall", what, ", or ".join(causes), advice, grave=below_first)


def _clearly_below(now: HeldOutResult, was: HeldOutResult, comparisons: int) -> bool:
    """True if two intervals do not overlap, and the gap is larger than chance makes the largest of so many."""
    error = hypot(was.accuracy - was.low, now.high - now.accuracy) / Z95
    errors = NormalDist().inv_cdf(1 - BY_CHANCE / comparisons)
    return now.high < was.low and was.accuracy - now.accuracy > errors * error


def _best_checkpoint(facts: StepFacts, best: HeldOutResult) -> str:
    """Where the model of the best evaluation is."""
    if best.step == 0:
        return "nothing trained so far was better than the model before training"
    if facts.recipe.checkpoint.best == "eval/accuracy":
        return f"the checkpoint of step {best.step} is kept as the best (checkpoint.best)"
    return f"the best was step {best.step}, and checkpoint.best: eval/accuracy would keep its checkpoint"


def held_out(facts: StepFacts) -> Finding | None:
    """Accuracy rose on training tasks, to above that on held-out ones, which did not rise.

    Training accuracy is sampled, held-out accuracy often greedy: only if training is above the held-out interval is there
    anything that was learned by heart.
    """
    first, now = facts.history.held_out, facts.row.get("eval/accuracy")
    before, recent = facts.history.first.get("accuracy"), facts.recent("accuracy")
    if first is None or now is None or before is None or not recent or now - first > NO_GAIN:
        return None
    trained = sum(recent) / len(recent)
    limit = facts.held_out[-1].high if facts.held_out else now
    if trained - before <= LEARNED or trained <= limit:
        return None
    rose = f"training accuracy rose from {before:.2f} to {trained:.2f}"
    what = f"held-out accuracy went from {first:.2f} to {now:.2f} while {rose}"
    cause = "the model learns the training tasks by heart, or they are easier than those held out"
    advice = "Train on more tasks, stop earlier (checkpoint.best: eval/accuracy), or hold it with algorithm.kl.coef"
    return Finding("held_out", what, cause, advice)


def entropy_collapse(facts: StepFacts) -> Finding | None:
    """Entropy is below a twentieth of where RL began while answers are still wrong: nothing new is tried."""
    first, recent = facts.history.first.get("policy/entropy"), facts.recent("policy/entropy")
    accuracy = facts.recent("accuracy")
    if first is None or len(recent) < 3 or (accuracy and sum(accuracy) / len(accuracy) > 0.9):
        return None
    mean = sum(recent) / len(recent)
    if mean >= COLLAPSED * first:
        return None
    right = f" with accuracy {accuracy[-1]:.2f}" if accuracy else ""
    cause = "the policy has become nearly deterministic before the tasks are learned"
    advice = "Lower the learning rate, raise algorithm.loss.clip_high or entropy_coef, or hold it with algorithm.kl.coef"
    return Finding("entropy_collapse", f"entropy fell from {first:.2g} to {mean:.2g}{right}", cause, advice)


def mismatch(facts: StepFacts) -> Finding | None:
    """The engine sampled from another distribution than the learner trains.

    ``mismatch/relative`` is in the row where float32 is computed on the CPU, where only rounding may part them; it compares
    log-probs of the whole policy, so that top-p and top-k are no excuse. Elsewhere the KL is bounded.
    """
    row, native = facts.row, facts.recipe.rollout.engine.name in ("native", "process")
    relative, kl = row.get("mismatch/relative"), row.get("mismatch/kl", 0.0)
    if row.get("staleness/max"):
        return None  # the policy itself has moved since; how far the correction bears is another rule's
    if relative is not None and native and relative > ROUNDING:
        what = (
            f"engine and learner DISAGREE: the log-prob of a sampled token differs by {row['mismatch/max']:.1e}, which is "
            f"{relative:.1e} of the logits' scale, and float32 on a CPU explains {ROUNDING:.0e}"
        )
        cause = "the engine does not compute the distribution that is trained, so ratios and gradients are wrong"
        advice = "No setting should cause this: keep the run directory and report it; until then set algorithm.correction"
        return Finding("mismatch", what, cause, advice, grave=True)
    if relative is None and kl > LARGEST_KL:
        what = f"engine and learner DISAGREE: their KL is {kl:.1e}, and rounding explains about {LARGEST_KL:.0e}"
        cause = "the engine does not compute the distribution that is trained, so ratios are wrong by as much"
        return Finding("mismatch", what, cause, "Set algorithm.correction.weights: token, and report it if KL stays high")
    return None


def large_ratio(facts: StepFacts) -> Finding | None:
    """A token became a hundred times likelier within the step: later updates train what the policy no longer is."""
    found = facts.row.get("policy/ratio_max", 1.0)
    if found <= LARGEST_RATIO:
        return None
    what = f"within one step a token became {found:.2g} times likelier than when it was sampled"
    cause = "several updates on the same episodes, with steps too large for them"
    advice = "Lower the learning rate, batch.epochs_per_step or batch.updates_per_epoch, or set algorithm.loss.dual_clip"
    return Finding("large_ratio", what, cause, advice)


def weightless(facts: StepFacts) -> Finding | None:
    """The correction of the mismatch leaves the weight of less than a tenth of the tokens."""
    share = facts.row.get("correction/effective_share", 1.0)
    if share >= SMALLEST_SHARE:
        return None
    what = f"algorithm.correction leaves {100 * share:.1f} % of the tokens' weight"
    cause = "engine and learner are so far apart that few tokens decide the update"
    advice = "Look at mismatch/kl and mismatch/max: a smaller correction would only hide that the engine samples otherwise"
    return Finding("weightless", what, cause, advice)


def stale(facts: StepFacts) -> Finding | None:
    """What older weights wrote hardly bears on those that are trained: few tokens carry the whole weight of a step."""
    row = facts.row
    share, oldest = row.get("mismatch/effective_share", 1.0), row.get("staleness/max", 0.0)
    if not oldest or share >= FRESH_SHARE:
        return None
    what = (
        f"of what is trained, up to {oldest:g} updates old, {100 * share:.0f} % are left in effect (effective sample size)"
    )
    cause = "the policy has moved far from the weights that wrote it, so that few tokens decide the update"
    advice = "Lower schedule.max_staleness or the learning rate, or use schedule: synchronous"
    return Finding("stale", what, cause, advice)


def blind(facts: StepFacts) -> Finding | None:
    """The model answers as well with media blanked as with them: it does not look, or they do not matter."""
    for found in facts.sight:
        if found.shown > 0 and found.shown <= found.blanked:
            what = (
                f"{found.measure} on {found.tasks} held-out tasks is {found.shown:.2f}, and {found.blanked:.2f} with "
                f"{BLANKED.get(found.kind, found.kind)} ({found.same} answers are the same)"
            )
            cause = "the tasks can be guessed from the text, or the model does not use what it is shown"
            advice = "Compare with guessing; check that the media show what is asked, and train the tower (model.freeze)"
            return Finding("blind", what, cause, advice)
    return None
