"""The health rules. Each is a pure function of a step's facts: what is wrong, the likely cause and what to do, or None.

The first line of a rule's docstring is its row on the page docs/reference/health.md.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, hypot, log, sqrt
from statistics import NormalDist

from sensorium.data.causal_history import parse_facts, parse_memory
from sensorium.evaluation.summary import Z95
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.report.terminal import visible
from sensorium.rewards.reward_term import tagged
from sensorium.runs.metrics import Finding
from sensorium.runs.run_directory import step_name
from sensorium.trainer.health.facts import LEVEL, RECENT, HeldOutResult, StepFacts, lacks_answer, was_judged
from sensorium.vocabulary.episode import Episode, Score, Status
from sensorium.vocabulary.metric_names import REPLACEMENTS
from sensorium.vocabulary.plain import counted
from sensorium.vocabulary.task import Task

LARGEST_RATE = 0.05
LARGEST_GRADIENT = 1e3
LARGEST_RATIO = 100.0
SMALLEST_SHARE = 0.1
FRESH_SHARE = 0.25  # effective share of a step's tokens below which stale episodes no longer bear on the new weights
COLLAPSED = 0.05
NO_GAIN, LEARNED = 0.02, 0.15  # held-out accuracy gained at most the first, training accuracy more than the second
BY_CHANCE = 0.01  # probability of a false alarm, divided by the number of comparisons
SURE = 4.0
ROUNDING = 1e-5  # largest difference of log-probs, by the logits' scale (at least 1), that float32 on a CPU explains
LARGEST_KL = 2e-2  # largest KL of engine and learner that bfloat16 or a GPU's kernels explain
BLANKED = {"picture": "pictures blanked", "video": "videos blanked", "sound": "sound muted"}
FAILED_SHARE = 0.1
LONG_STEP_S, SLOW_CALL_S, SLOW_BUSY_SHARE = 1.0, 0.05, 0.5  # below them no phase counts as slow
FULL_SHARE = 0.7  # of the environments' places: from there on, more places help
IN_A_ROW = 3  # steps without reward or variance before a warning: a single step of few prompts may be chance
# Fewest tasks and answers that a claim about their variety rests on, and fewest kinds of known answers in effect: of two
# or three, as yes and no, one may be right for most tasks of a step.
VARIED_TASKS, VARIED_ANSWERS, FEWEST_KINDS = 16, 64, 4
FEW_SHARE, MOST_KINDS = 0.4, 20  # kinds of answers given, of those known; more than 20 of these count as 20
GROWN_SHARE = 0.25  # of the episodes, by which more are cut off than in the first step of RL, for a trend
FEWEST = 4  # episodes that a claim about all of them must rest on
# Terms, by part, that lower the reward of responses they are to prevent, and their value for all other responses.
GUARDS = {
    "token_length": {"": 1.0},
    "overlong": {"": 0.0},
    "episodic_memory": {"/think": 0.0, "/format": 0.0},
}


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
    cause, advice = _cut_for_value(facts) or (cause, advice)
    best, now = facts.history.best.get("accuracy"), facts.row.get("accuracy")
    alike = facts.row.get(LEVEL) == facts.history.level
    if alike and best is not None and now is not None and groups and now < min(best / 2, best - SURE * sqrt(0.25 / groups)):
        what = f"accuracy fell from {best:.2f} to {now:.2f}"
        return Finding("sudden_loss", what, cause, advice, grave=True)
    first, entropy = facts.history.first.get("policy/entropy"), facts.row.get("policy/entropy")
    if first is not None and entropy is not None and entropy > 2 * first + 1:
        what = f"entropy rose from {first:.2f} to {entropy:.2f}: the model writes at random"
        return Finding("sudden_loss", what, cause, advice, grave=True)
    return None


def held_out_fall(facts: StepFacts) -> Finding | None:
    """Held-out accuracy is clearly below the run's first or best evaluation: their intervals do not overlap.

    It lasts until the next evaluation. The more evaluations there are, the further apart the best and the worst of them
    lie by chance, so the gap must exceed what so many comparisons explain. Below the first evaluation it is grave.
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
    causes = ["the learning rate is too high", "the reward favours something else than the evaluation asks for"]
    rl = now.step > facts.recipe.warm_start.steps
    lower = "optimizer.lr" if rl else "warm_start.optimizer.lr"
    if rl and facts.recipe.schedule.name != "synchronous":
        causes.append(f"the episodes are stale (schedule: {facts.recipe.schedule.name})")
        lower += " or schedule.max_staleness"
    if best.step == 0:
        where = "nothing trained so far was better than the model before training"
    elif facts.recipe.checkpoint.best == "eval/accuracy":
        where = f"the checkpoint of step {best.step} is kept as the best (checkpoint.best)"
    else:
        where = f"the best was step {best.step}, and checkpoint.best: eval/accuracy would keep its checkpoint"
    advice = f"Lower {lower} and read the episodes in the report; {where}"
    cause, advice = (_cut_for_value(facts) if rl else None) or (", or ".join(causes), advice)
    return Finding("held_out_fall", what, cause, advice, grave=below_first)


def _clearly_below(now: HeldOutResult, was: HeldOutResult, comparisons: int) -> bool:
    error = hypot(was.accuracy - was.low, now.high - now.accuracy) / Z95
    errors = NormalDist().inv_cdf(1 - BY_CHANCE / comparisons)
    return now.high < was.low and was.accuracy - now.accuracy > errors * error


def held_out(facts: StepFacts) -> Finding | None:
    """Accuracy rose on training tasks, to above that on held-out ones, which did not rise.

    Training accuracy is sampled, held-out accuracy often greedy, so training must be above the held-out interval. A
    curriculum trains on tasks of another difficulty, so nothing is compared.
    """
    if LEVEL in facts.row:
        return None
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


def answer_collapse(facts: StepFacts) -> Finding | None:
    """The answers given have collapsed to few different ones, where the known answers of the same tasks differ far more.

    Kinds are counted in effect, as exp(entropy): nine times A and once B are 1.4 kinds. Tasks with fewer than four kinds
    of known answers (yes and no) never fire.
    """
    given, known = facts.evidence.answers
    if facts.supervised or sum(known.values()) < VARIED_TASKS or sum(given.values()) < VARIED_ANSWERS:
        return None
    kinds, wanted = _kinds(given.values()), _kinds(known.values())
    if wanted < FEWEST_KINDS or kinds >= FEW_SHARE * min(wanted, MOST_KINDS):
        return None
    answer, count = max(given.items(), key=lambda item: item[1])
    share = f"{100 * count / sum(given.values()):.0f} % of them {_quoted(answer)}"
    what = f"{sum(given.values())} answers are of {kinds:.1f} kinds in effect, {share}; those known are of {wanted:.1f}"
    cause = (
        "the model gives the same answers whatever it is asked: a frequent answer that is sometimes right, or a collapse"
    )
    advice = (
        "Compare accuracy with the majority answer's share (eval), balance the answers of the tasks, lower the learning "
        "rate, or raise algorithm.loss.entropy_coef"
    )
    return Finding("answer_collapse", what, cause, advice)


def _kinds(counts: Iterable[int]) -> float:
    """The effective number of kinds: exp of the entropy of their shares."""
    several = [count for count in counts if count]
    return exp(-sum(count / sum(several) * log(count / sum(several)) for count in several))


def mismatch(facts: StepFacts) -> Finding | None:
    """The engine sampled from another distribution than the learner trains.

    ``mismatch/relative`` is in the row for float32 on the CPU, where only rounding may part them; it compares log-probs of
    the whole policy, without top-p and top-k. Elsewhere the KL is bounded.
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


def no_update(facts: StepFacts) -> Finding | None:
    """The step made no update: nothing of what was played could be trained on."""
    if not facts.row.get("policy/skipped"):
        return None
    if facts.supervised:
        advice = "Give the rows a 'demonstration' (environments: a method demonstrate), or set warm_start.steps: 0"
        first = next((e.failure for e in facts.episodes if e.failure), "nothing was played")
        return Finding("no_update", "the warm start made no update", _brief(first), advice, grave=True)
    reason = next(iter(facts.evidence.fates.values()), "no group was left to train on")
    cause = f"the first episode was left out: {_brief(reason)}"
    advice = f"Look at the episodes and their scores in episodes/{step_name(facts.step)}.jsonl"
    return Finding("no_update", "no update was made", cause, advice, grave=True)


def failed_episodes(facts: StepFacts) -> Finding | None:
    """More than a tenth of the episodes failed."""
    episodes = facts.episodes
    failed = [e for e in episodes if e.status in (Status.FAILED, Status.ABORTED)]
    if len(failed) <= FAILED_SHARE * len(episodes):
        return None
    what = f"{len(failed)} of {len(episodes)} episodes failed"
    advice = "Failed episodes are not trained on; mend the environment, the data or the limit that this names"
    return Finding("failed_episodes", what, f"the first: {_brief(failed[0].failure)}", advice, len(failed) == len(episodes))


def rows_without_answer(facts: StepFacts) -> Finding | None:
    """Tasks have no answer, and a term needs one."""
    lacking = {
        task.id: score.name for task, e in facts.played for score in e.scores if lacks_answer(task, score) and score.weight
    }
    if not lacking:
        return None
    tasks = len(facts.evidence.groups)
    what = f"{len(lacking)} of {tasks} tasks have no answer, and '{next(iter(lacking.values()))}' cannot judge without one"
    advice = "Give every row an 'answer' (with columns: columns.answer), or judge by a term that needs none"
    return Finding("rows_without_answer", what, f"the first is task {next(iter(lacking))}", advice, len(lacking) == tasks)


def nothing_scored(facts: StepFacts) -> Finding | None:
    """No episode has a total, since a term that carries weight is missing for each."""
    episodes = [e for _, e in facts.played if e.scores]
    if facts.supervised or not episodes or any(e.reward is not None for e in episodes):
        return None
    missing = [s for task, e in facts.played for s in e.scores if s.missing and s.weight and not lacks_answer(task, s)]
    if not missing:
        return None
    what = f"none of {len(episodes)} episodes has a reward"
    return Finding("nothing_scored", what, _why_missing(missing), "Mend the term, or take it out of rewards.terms", True)


def missing_term(facts: StepFacts) -> Finding | None:
    """A term gave no score for more than half of the episodes that it was asked about."""
    by_term: dict[str, list[list[Score]]] = {}
    for task, episode in facts.played:
        asked = {score.name for score in episode.scores if not lacks_answer(task, score)}
        for name in asked:
            by_term.setdefault(name, []).append([s for s in episode.scores if s.name == name and s.missing])
    for name, missing in by_term.items():
        without = [scores for scores in missing if scores]
        if len(without) > len(missing) / 2:
            share = "every one" if len(without) == len(missing) else f"{len(without)}"
            what = f"the term '{name}' gave no score for {share} of {len(missing)} episodes"
            advice = "Mend the term; episodes without a total are not trained on (rewards.on_missing)"
            return Finding("missing_term", what, _why_missing([s for scores in without for s in scores]), advice)
    return None


def no_answer(facts: StepFacts) -> Finding | None:
    """A term that compares answers found none in any response."""
    for name, (without, judged) in facts.evidence.unanswered.items():
        if without < judged or judged < FEWEST:
            continue
        looked_at = [(task, e) for task, e in facts.played if e.turns and was_judged(e, name)]
        of_all = f" (it looked at {judged} of {len(looked_at)})" if judged < len(looked_at) else ""
        looked_at = looked_at[:judged]
        what = f"'{name}' found no answer in any of {judged} responses{of_all}, so it gives each of them 0"
        cause, advice = _unrewarded_demonstrations(facts) or _unread_answers(name, looked_at, facts)
        return Finding("no_answer", what, cause, advice, grave=True)
    return None


def _unread_answers(term: str, looked_at: list[tuple[Task, Episode]], facts: StepFacts) -> tuple[str, str]:
    """Cause and advice by what the responses have instead of an answer that the term can read."""
    texts = [episode.response for _, episode in looked_at]
    whole = [text for text in texts if tagged(text) is not None]
    unclosed = [e for _, e in looked_at if "<answer>" in e.response and tagged(e.response) is None]
    if len(unclosed) >= len(texts) / 2 and len(unclosed) > len(whole):
        cause = f"{len(unclosed)} of them have <answer> and end before </answer>, such as {_quoted(unclosed[0].response)}"
        advice = "Show the closing tag in a warm start, or reward it with the term 'format'"
        if cut := sum(map(_was_cut, unclosed)):
            cause += f"; {cut} were cut off at rollout.max_new_tokens {facts.recipe.rollout.max_new_tokens}"
            advice = _let_end(facts) or "Raise rollout.max_new_tokens, or show short answers with both tags in a warm start"
        return cause, advice
    if whole:
        cause = f"the text in <answer>…</answer> is in another form than it reads, such as {_quoted(whole[0])}"
        return cause, "Choose the term that reads such answers, or ask for its form"
    cause = f"it reads the text in <answer>…</answer>, and no response has that, such as {_quoted(texts[0])}"
    prompts = [*(m for t, _ in looked_at for m in t.messages)]
    prompts += [message for _, e in looked_at for turn in e.turns for message in turn.observation]
    ask = "Ask for the tag in the prompt (option instruction of a source with columns), show it"
    if any("<answer>" in message.text for message in prompts):
        ask = "The prompt asks for the tag, but this model does not write it yet. Show it"
    return cause, (
        f"{ask} in a warm start, reward it with the term 'format', or let '{term}' read whole responses (its option "
        "fallback: true)"
    )


def never_paid(facts: StepFacts) -> Finding | None:
    """The reward of every episode was exactly 0 for several steps."""
    means, flat = facts.recent("reward/mean"), _flat(facts)
    totals = [e.reward for _, e in facts.played]
    if any(means[-IN_A_ROW:]) or len(means) < IN_A_ROW or any(totals) or not flat:
        return None
    texts = [episode.response for _, episode in facts.played]
    cut = sum(_was_cut(episode) for _, episode in facts.played)
    cause = f"no response was right, such as {_quoted(texts[0]) if texts else 'none'}"
    advice = "Begin with easier tasks, a warm start on demonstrations, or a term that rewards being nearly right"
    if cut > len(totals) / 2:
        cause = f"{cut} of {len(totals)} responses were cut at rollout.max_new_tokens {facts.recipe.rollout.max_new_tokens}"
        advice = _let_end(facts) or "Raise it, or teach the model to be brief"
    cause, advice = _unrewarded_demonstrations(facts) or (cause, advice)
    lasting = next((count for count, mean in enumerate(reversed(means)) if mean != 0.0), len(means))
    return Finding("never_paid", f"the reward of every episode was 0 for {lasting} steps", cause, advice, grave=True)


def _unrewarded_demonstrations(facts: StepFacts) -> tuple[str, str] | None:
    """Cause and advice where the demonstrations of the tasks get no reward either: learning from them cannot help."""
    without, looked_at, cut = facts.evidence.demonstrations
    if not looked_at or without < looked_at:
        return None
    if cut:
        needs = f"{cut} of {looked_at} demonstrations looked at need more turns than rollout.max_turns"
        return f"{needs} {facts.recipe.rollout.max_turns}, so no episode can end", "Raise it"
    cause = f"the demonstrations themselves get the reward 0 or are judged wrong ({without} of {looked_at} looked at)"
    advice = "Make demonstrations and reward terms agree, on the tag of the answer for one; sensorium validate plays both"
    return cause, advice


def no_variance(facts: StepFacts) -> Finding | None:
    """For several steps the rewards that are compared were all the same, so that nothing can be learned from them.

    Most estimators compare the attempts of a group. Others, such as those with a critic, compare all episodes.
    """
    if not _flat(facts):
        return None
    rows = [*facts.history.rows, facts.row][-IN_A_ROW:]
    what = f"in every group all attempts got the same reward, for the last {len(rows)} steps"
    if not estimator_traits(facts.recipe.algorithm.advantage.name).compares:
        if len({episode.reward for _, episode in facts.played} | {row.get("reward/mean") for row in rows}) > 1:
            return None
        what = f"all episodes got the same reward, for the last {len(rows)} steps"
    accuracy, entropy = facts.row.get("accuracy"), facts.row.get("policy/entropy")
    if accuracy == 1.0:
        cause, advice = "every answer is right", "Take harder tasks, or stop: these are learned"
    elif accuracy == 0.0:
        cause, advice = _unrewarded_demonstrations(facts) or (
            "no answer is right",
            "Take easier tasks, or begin with a warm start on demonstrations",
        )
    else:
        measured = "" if entropy is None else f" (entropy {entropy:.2g})"
        cause = f"attempts at one task hardly differ{measured}, or the reward does not distinguish them"
        advice = "Raise rollout.temperature or batch.group_size, or use a reward with more steps"
    return Finding("no_variance", what, cause, advice, grave=accuracy != 1.0)


def constant_term(facts: StepFacts) -> Finding | None:
    """A term gave one value to every episode since RL began: it tells nothing apart."""
    idle_guards = {
        f"{term.options.get('name', term.name)}{part}": value
        for term in facts.recipe.rewards.terms
        for part, value in GUARDS.get(term.name, {}).items()
    }
    found: dict[str, float] = {}
    for name, (low, high) in facts.history.term_range.items():
        term = name.removeprefix("reward/")
        if low != high or facts.history.rl_steps < RECENT or idle_guards.get(term) == low:
            continue
        scores = [s for _, e in facts.played for s in e.scores if s.name == term]
        if {s.value for s in scores} == {low} and any(s.weight for s in scores) and facts.row.get(name) == low:
            found[term] = low
    if not found:
        return None
    given = ", ".join(f"the term '{term}' has given {value:g}" for term, value in found.items())
    what = f"{given} to every episode of {facts.history.rl_steps + 1} steps"
    cause = f"nothing that the model writes changes {'it' if len(found) == 1 else 'them'}"
    advice = "Check the term on a few responses by hand; a constant adds nothing to what is learned"
    return Finding("constant_term", what, cause, advice)


def truncated(facts: StepFacts) -> Finding | None:
    """More than half of the episodes end in a response that was cut off, or a demonstration could not be sampled."""
    played = [episode for _, episode in facts.played]
    cut = sum(_was_cut(episode) for episode in played)
    rollout = facts.recipe.rollout
    limit = rollout.max_new_tokens
    if facts.supervised:
        short = sum(bool(e.info.get("out_of_turns")) for e in played)
        long = sum(any(len(turn.response.tokens) > limit for turn in e.turns) for e in played)
        if short:
            what = f"{short} of {len(played)} demonstrations are cut off before they end"
            return Finding(
                "truncated", what, f"they need more turns than rollout.max_turns {rollout.max_turns}", "Raise it"
            )
        what = f"{long} of {len(played)} demonstrations have a response that could not be sampled"
        cause = f"it is longer than rollout.max_new_tokens {limit}"
        return Finding("truncated", what, cause, "Raise it") if long else None
    if cut <= len(played) / 2 or len(played) < FEWEST:
        return None
    what = f"{cut} of {len(played)} episodes end in a response that was cut off"
    cause = f"it reached rollout.max_new_tokens {limit} before the model ended it"
    advice = _let_end(facts) or "Raise it, or teach the model to end (a warm start, the term overlong)"
    return Finding("truncated", what, cause, advice)


def _let_end(facts: StepFacts) -> str:
    ignored = facts.recipe.rollout.ignore_stop_tokens
    return "Set rollout.ignore_stop_tokens: false, so that the model may end its responses" if ignored else ""


def cut_for_value(facts: StepFacts) -> Finding | None:
    """Ever more episodes are cut off, and the critic expects more than episodes ever got: not to end gets its own value."""
    cause, advice = _cut_for_value(facts) or ("", "")
    if not cause:
        return None
    row, best = facts.row, facts.history.best["reward/mean"]
    cut = f"{row['episodes/truncated']:.0f} of {len(facts.episodes)} episodes were cut off"
    first = f"{facts.history.first['episodes/truncated']:.0f} in the first step of RL"
    what = f"{cut} ({first}), and the critic expects {row['value/mean']:.2f} where the best mean reward was {best:.2f}"
    return Finding("cut_for_value", what, cause, advice, grave=True)


def _cut_for_value(facts: StepFacts) -> tuple[str, str] | None:
    """Cause and advice where a critic's own value has taught the policy not to end."""
    row, first, recipe = facts.row, facts.history.first, facts.recipe
    cut, before = row.get("episodes/truncated"), first.get("episodes/truncated")
    value, best = row.get("value/mean"), facts.history.best.get("reward/mean")
    if cut is None or before is None or value is None or best is None:
        return None
    if cut - before < GROWN_SHARE * len(facts.episodes) or value <= max(best, row.get("reward/mean", best)):
        return None
    cause = "a truncated episode goes on in the critic's value of it (bootstrapping), so never to end earns that value"
    if recipe.rollout.mask_truncated:
        cause = "a truncated episode is not trained on (rollout.mask_truncated), so it avoids what a wrong answer costs"
    section, limit = recipe.algorithm.advantage, recipe.rollout.max_new_tokens
    discount = "gamma" if section.name in ("gae", "masked_gae") else "turn_gamma"
    lower = f"or lower algorithm.advantage.{discount} ({getattr(section, discount):g})"
    length = f"the reward term overlong (max_tokens: {limit}, buffer_tokens: 1)"
    turns = recipe.rollout.max_turns > 1
    return cause, f"Go back to an earlier checkpoint and {lower[3:] if turns else f'add {length}, {lower}'}"


def no_memory(facts: StepFacts) -> Finding | None:
    """No memory of the step could be parsed, so that later clips are shown a history without it."""
    played = facts.played
    if facts.supervised or facts.recipe.tasks.planner.name != "causal_history" or not played:
        return None
    parsers = [parse_facts if task.metadata.get("type") == "semantic" else parse_memory for task, _ in played]
    if any(parse(episode.response) is not None for parse, (_, episode) in zip(parsers, played, strict=True)):
        return None
    what = f"none of {len(played)} responses has a memory that can be parsed, so the history has none of these clips"
    form = 'thoughts</think>{"description": "…"}'
    cause = f"a memory is written as {form}, and no response is, such as {_quoted(played[0][1].response)}"
    advice = "Ask for that form in the rows' text, or show it in a warm start"
    if cut := sum(_was_cut(episode) for _, episode in played):
        advice += f"; {cut} of them were cut off: raise rollout.max_new_tokens {facts.recipe.rollout.max_new_tokens}"
    return Finding("no_memory", what, cause, advice)


def bad_rows(facts: StepFacts) -> Finding | None:
    """More rows were skipped than played."""
    skipped = facts.row.get("tasks/skipped_bad", 0) + facts.row.get("tasks/skipped_long", 0)
    tasks = len(facts.evidence.groups)
    if skipped <= tasks:
        return None
    cause = "rows or their media are broken, or prompts too long (tasks.on_bad_row, tasks.on_long_prompt: skip)"
    advice = "Set both to refuse, which names the rows and why"
    return Finding("bad_rows", f"rows were skipped {skipped:.0f} times to play {counted(tasks, 'task')}", cause, advice)


def _flat(facts: StepFacts) -> bool:
    """True if for several steps no group had members with different rewards."""
    rows = [*facts.history.rows, facts.row][-IN_A_ROW:]
    return len(rows) == IN_A_ROW and all(
        (row.get("groups/trained", 0) > 0 and row.get("groups/zero_variance") == row["groups/trained"])
        or (row.get("groups/without_signal", 0) > 0 and not row.get("groups/trained"))
        for row in rows
    )


def _was_cut(episode: Episode) -> bool:
    return bool(episode.turns) and episode.turns[-1].cut


def _why_missing(scores: Iterable[Score]) -> str:
    """The most common reason, with the term that gave it."""
    ((name, reason), _), *_ = Counter((score.name, score.reason) for score in scores).most_common(1)
    return f"'{name}' says: {_brief(reason) or 'nothing'}"


def _brief(text: str, limit: int = 240) -> str:
    line = visible(" ".join(text.split())).rstrip(".")
    return line if len(line) <= limit else f"{line[:limit]}…"


def _quoted(text: str) -> str:
    return f"“{_brief(text, 60)}”" if text.strip() else "an empty one"


def lost_processes(facts: StepFacts) -> Finding | None:
    """Engines or workers died or hung in this step, or fewer of them work than the recipe asks for."""
    losses = facts.history.losses_with(facts.row)
    section = facts.recipe.cluster
    wanted = {
        "engines": (facts.row.get("engine/ready"), section.engines),
        "environment workers": (facts.row.get("worker/environment_ready"), section.environments),
        "reward workers": (facts.row.get("worker/reward_ready"), section.rewards),
    }
    fewer = [
        f"{ready:.0f} of {count} {name} work"
        for name, (ready, count) in wanted.items()
        if ready is not None and ready < count
    ]
    if losses == facts.history.losses and not fewer:
        return None
    counts = ", ".join(f"{REPLACEMENTS[name]} {count:,.0f}" for name, count in losses.items())
    known = [f"{counts} since the run began"] * bool(counts) + fewer
    what = f"processes or servers were lost ({'; '.join(known)})"
    cause = "they died or hung: the line that was printed when one was lost says which and how"
    advice = "Their unfinished work is done again, nothing is trained twice. If more are, look at their machine's memory"
    if section.engines > 1 or section.environments or section.rewards:
        advice += "; cluster.restarts of a kind are replaced in a run, after that the others continue alone"
    return Finding("lost_processes", what, cause, advice)


def slower_computing(facts: StepFacts) -> Finding | None:
    """A fast way to compute was given up in this process, since it disagrees with the reference or cannot run here."""
    reasons = [" ".join(reason.split()).rstrip(".") for reason in facts.evidence.given_up]
    if not reasons:
        return None
    counted = "a fast way to compute was" if len(reasons) == 1 else f"{len(reasons)} fast ways to compute were"
    what = f"{counted} given up, so the run is slower than it could be"
    advice = "Results are right, but slower. If the reason is this machine, mend it; otherwise report it"
    return Finding("slower_computing", what, "; ".join(reasons), advice)


def slow_phase(facts: StepFacts) -> Finding | None:
    """For more than half of a step, engine and learner waited for environments or for scores."""
    row, rollout, schedule = facts.row, facts.recipe.rollout, facts.recipe.schedule.name
    half = max(LONG_STEP_S, row.get("time/step_s", 0.0)) / 2
    scores_s, episodes_s = row.get("wait/learner_for_scores_s", 0.0), row.get("wait/learner_for_episodes_s", 0.0)
    if scores_s > half:
        advice = "Score in parallel (judges, cluster.rewards), or beside the update: schedule: one_step_off or asynchronous"
        return Finding("slow_phase", f"scores took {scores_s:.1f} of {2 * half:.1f} s", "the reward terms are slow", advice)
    call_s, busy = row.get("time/environment_mean_s", 0.0), row.get("time/environments_busy", 0.0)
    if episodes_s <= half or call_s < SLOW_CALL_S:
        return None
    chain_s = row.get("time/environment_episode_s", 0.0)
    queue_s, places = row.get("time/environment_wait_max_s", 0.0), row.get("environment/places", 0.0)
    full = busy * row.get("time/step_s", 0.0) > FULL_SHARE * (2 * half if schedule == "asynchronous" else episodes_s)
    if rollout.schedule == "lockstep":
        cause, advice = "in lockstep all wait for the slowest of them", "Set rollout.schedule: eager (or auto)"
    elif full and places >= rollout.environment_calls and queue_s > call_s:
        cause = f"calls waited up to {queue_s:.1f} s for one of {rollout.environment_calls} places"
        advice = "Raise rollout.environment_calls, if the environments bear it"
    elif schedule == "asynchronous":
        if not full:
            return None
        cause, advice = "as many groups were played as may be", "Raise schedule.max_staleness or batch.group_size"
    elif chain_s < SLOW_BUSY_SHARE * episodes_s:
        return None
    else:
        cause, advice = "a step ends with its slowest episodes", "Set schedule: asynchronous, which plays on meanwhile"
    what = f"environments ({chain_s:.2g} s an episode, {100 * busy:.0f} % busy) took most of {2 * half:.1f} s"
    return Finding("slow_phase", what, cause, advice)


@dataclass(frozen=True)
class Rule:
    """A rule and the rules it hides: where no answer was found, "every reward was 0" is needless."""

    judge: Callable[[StepFacts], Finding | None]
    hides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of its metric and of its finding."""
        return self.judge.__name__


NO_REWARD = ("no_answer", "never_paid", "no_variance", "constant_term")
RULES = (
    Rule(failed_episodes),
    Rule(rows_without_answer),
    Rule(nothing_scored, hides=("missing_term",)),
    Rule(missing_term),
    Rule(no_update),
    Rule(learning_rate, hides=NO_REWARD),
    Rule(sudden_loss, hides=NO_REWARD),
    Rule(no_answer, hides=NO_REWARD[1:]),
    Rule(never_paid, hides=NO_REWARD[2:]),
    Rule(no_variance, hides=NO_REWARD[3:]),
    Rule(constant_term),
    Rule(cut_for_value, hides=("truncated",)),
    Rule(truncated),
    Rule(no_memory),
    Rule(bad_rows),
    Rule(gradient),
    Rule(held_out_fall),
    Rule(held_out),
    Rule(entropy_collapse),
    Rule(answer_collapse),
    Rule(large_ratio),
    Rule(mismatch),
    Rule(stale, hides=("weightless",)),
    Rule(weightless),
    Rule(blind),
    Rule(lost_processes),
    Rule(slower_computing),
    Rule(slow_phase),
)


def examine(facts: StepFacts) -> list[Finding]:
    """What is wrong with a step, in the table's order; what another finding explains is left out."""
    found: list[Finding] = []
    hidden: set[str] = set()
    for rule in RULES:
        finding = rule.judge(facts) if rule.name not in hidden else None
        if finding is not None:
            found.append(finding)
            hidden.update(rule.hides)
    return found
