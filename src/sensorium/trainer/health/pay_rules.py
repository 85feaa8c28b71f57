"""Rules about what is played and paid: episodes that fail, scores that are missing, rewards that teach nothing.

A rule is a pure function of a step's facts; it returns what is wrong, the likely cause and what to do, or None.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from sensorium.recipe.traits import estimator_traits
from sensorium.record.findings import Finding
from sensorium.report.terminal import visible
from sensorium.rewards.answer import tagged
from sensorium.trainer.health.facts import RECENT, StepFacts, lacks_answer, was_judged
from sensorium.vocabulary.episode import Episode, Status
from sensorium.vocabulary.memory import parse_facts, parse_memory
from sensorium.vocabulary.score import Score
from sensorium.vocabulary.task import Task

Rule = Callable[[StepFacts], Finding | None]
FAILED_SHARE = 0.1
IN_A_ROW = 3
"""Steps without pay or variance before it is said: one such step of few prompts may be chance."""
FEWEST = 4
"""Episodes that a claim about all of them must rest on."""
GUARDS = {
    "token_length": {"": 1.0},
    "overlong": {"": 0.0},
    "episodic_memory": {"/think": 0.0, "/format": 0.0},
}
"""Terms, by part, that take pay away from responses they are to prevent, and what they give where there is none."""


def no_update(facts: StepFacts) -> Finding | None:
    """The step made no update: nothing of what was played could be trained on."""
    if not facts.row.get("policy/skipped"):
        return None
    if facts.supervised:
        advice = "Give the rows a 'demonstration' (environments: a method demonstrate), or set warm_start.steps: 0"
        first = next((e.failure for e in facts.episodes if e.failure), "nothing was played")
        return Finding("no_update", "the warm start made no update", _brief(first), advice, grave=True)
    reason = next(iter(facts.evidence.fates.values()), "no group was left to train on")
    advice = f"Look at the episodes and their scores in episodes/step_{facts.step:06d}.jsonl"
    return Finding(
        "no_update", "no update was made", f"the first episode was left out: {_brief(reason)}", advice, grave=True
    )


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
        texts = [episode.response for _, episode in looked_at]
        what = f"'{name}' found no answer in any of {judged} responses{of_all}, so it pays none of them"
        if shown := _unrewarded_demonstrations(facts):
            return Finding("no_answer", what, *shown, grave=True)
        whole = [text for text in texts if tagged(text) is not None]
        unclosed = [episode for _, episode in looked_at if _lacks_closing_tag(episode.response)]
        if len(unclosed) >= len(texts) / 2 and len(unclosed) > len(whole):
            return _unclosed_answers(what, unclosed, facts)
        if not whole:
            cause = f"it reads what stands in <answer>…</answer>, and no response has that, such as {_quoted(texts[0])}"
            ask = "Ask for the tag in the prompt (option instruction of a source with columns), show it"
            if any(_asks_for_tag(task, episode) for task, episode in looked_at):
                ask = "The prompt asks for the tag, but this model does not write it yet. Show it"
            advice = (
                f"{ask} in a warm start, pay for it with the term 'format', or let '{name}' read whole responses (its "
                "option fallback: true)"
            )
            return Finding("no_answer", what, cause, advice, grave=True)
        cause = f"what stands in <answer>…</answer> is in another form than it reads, such as {_quoted(whole[0])}"
        return Finding("no_answer", what, cause, "Choose the term that reads such answers, or ask for its form", grave=True)
    return None


def _lacks_closing_tag(text: str) -> bool:
    """Whether an answer is begun and none is ended: ``The circle is <answer>re``."""
    return "<answer>" in text and tagged(text) is None


def _unclosed_answers(what: str, unclosed: Sequence[Episode], facts: StepFacts) -> Finding:
    """Responses that end within their answer: cut off by the budget, or ended so by the model."""
    count, cut, limit = len(unclosed), sum(map(_was_cut, unclosed)), facts.recipe.rollout.max_new_tokens
    cause = f"{count} of them have <answer> and end before </answer>, such as {_quoted(unclosed[0].response)}"
    advice = "Show the closing tag in a warm start, or pay for it with the term 'format'"
    if cut:
        cause += f"; {cut} were cut off at rollout.max_new_tokens {limit}"
        advice = _let_end(facts) or "Raise rollout.max_new_tokens, or show short answers with both tags in a warm start"
    return Finding("no_answer", what, cause, advice, grave=True)


def _asks_for_tag(task: Task, episode: Episode) -> bool:
    """Whether a prompt shows the tag that answers are read from."""
    shown = [*task.messages, *(message for turn in episode.turns for message in turn.observation)]
    return any("<answer>" in message.text for message in shown)


def never_paid(facts: StepFacts) -> Finding | None:
    """The reward of every episode was exactly 0 for several steps."""
    means, flat = facts.recent("reward/mean"), _flat(facts)
    totals = [e.reward for _, e in facts.played]
    if any(means[-IN_A_ROW:]) or len(means) < IN_A_ROW or any(totals) or not flat:
        return None
    texts = [episode.response for _, episode in facts.played]
    cut = sum(_was_cut(episode) for _, episode in facts.played)
    cause, advice = (
        f"no response was right, such as {_quoted(texts[0]) if texts else 'none'}",
        ("Begin with easier tasks, a warm start on demonstrations, or a term that pays for being nearly right"),
    )
    if cut > len(totals) / 2:
        cause = f"{cut} of {len(totals)} responses were cut at rollout.max_new_tokens {facts.recipe.rollout.max_new_tokens}"
        advice = _let_end(facts) or "Raise it, or teach the model to be brief"
    cause, advice = _unrewarded_demonstrations(facts) or (cause, advice)
    what = f"the reward of every episode was 0 for {_lasting(means, 0.0)} steps"
    return Finding("never_paid", what, cause, advice, grave=True)


def _unrewarded_demonstrations(facts: StepFacts) -> tuple[str, str] | None:
    """Cause and advice where the demonstrations of the tasks get no reward either: learning from them cannot help."""
    without, looked_at = facts.evidence.demonstrations
    if not looked_at or without < looked_at:
        return None
    cause = f"the demonstrations themselves get the reward 0 or are judged wrong ({without} of {looked_at} looked at)"
    return (
        cause,
        "Make demonstrations and reward terms agree, on the tag of the answer for one; sensorium validate plays both",
    )


def no_variance(facts: StepFacts) -> Finding | None:
    """For several steps the rewards that are compared were all the same, so that nothing can be learned from them.

    Most estimators compare the attempts of a group. Others, such as those with a critic, compare all episodes.
    """
    if not _flat(facts):
        return None
    rows = [*facts.history.rows, facts.row][-IN_A_ROW:]
    what = f"in every group all attempts were paid the same, for the last {len(rows)} steps"
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
        told = "" if entropy is None else f" (entropy {entropy:.2g})"
        cause = f"attempts at one task hardly differ{told}, or the reward does not tell them apart"
        advice = "Raise rollout.temperature or batch.group_size, or use a reward with more steps"
    return Finding("no_variance", what, cause, advice, grave=accuracy != 1.0)


def constant_term(facts: StepFacts) -> Finding | None:
    """A term gave one value to every episode since RL began: it tells nothing apart."""
    found: dict[str, float] = {}
    for name, (low, high) in facts.history.term_range.items():
        term = name.removeprefix("reward/")
        if low != high or facts.history.rl_steps < RECENT or _idle_guards(facts).get(term) == low:
            continue
        values = {s.value for _, e in facts.played for s in e.scores if s.name == term}
        weighted = any(s.weight for _, e in facts.played for s in e.scores if s.name == term)
        if values == {low} and weighted and facts.row.get(name) == low:
            found[term] = low
    if not found:
        return None
    told = ", ".join(f"the term '{term}' has given {value:g}" for term, value in found.items())
    what = f"{told} to every episode of {facts.history.rl_steps + 1} steps"
    cause = f"nothing that the model writes changes {'it' if len(found) == 1 else 'them'}"
    advice = "Check the term on a few responses by hand; a constant adds nothing to what is learned"
    return Finding("constant_term", what, cause, advice)


def _idle_guards(facts: StepFacts) -> dict[str, float]:
    """What terms of the recipe that only guard against something give, by score, where it does not happen."""
    return {
        f"{term.options.get('name', term.name)}{part}": value
        for term in facts.recipe.rewards.terms
        for part, value in GUARDS.get(term.name, {}).items()
    }


def truncated(facts: StepFacts) -> Finding | None:
    """More than half of the episodes end in a response that was cut off."""
    played = [episode for _, episode in facts.played]
    cut = sum(_was_cut(episode) for episode in played)
    if facts.supervised or cut <= len(played) / 2 or len(played) < FEWEST:
        return None
    limit = facts.recipe.rollout.max_new_tokens
    what = f"{cut} of {len(played)} episodes end in a response that was cut off"
    cause = f"it reached rollout.max_new_tokens {limit} before the model ended it"
    advice = _let_end(facts) or "Raise it, or teach the model to end (a warm start, the term overlong)"
    return Finding("truncated", what, cause, advice)


def _let_end(facts: StepFacts) -> str:
    """The way out where the recipe keeps the model from ending its responses."""
    ignored = facts.recipe.rollout.ignore_stop_tokens
    return "Set rollout.ignore_stop_tokens: false, so that the model may end its responses" if ignored else ""


def no_memory(facts: StepFacts) -> Finding | None:
    """No memory of the step could be parsed, so that later clips are shown a history without it."""
    played = facts.played
    if facts.supervised or facts.recipe.tasks.planner.name != "causal_history" or not played:
        return None
    if any(_has_memory(task, episode) for task, episode in played):
        return None
    what = f"none of {len(played)} responses has a memory that can be parsed, so the history has none of these clips"
    form = 'thoughts</think>{"description": "…"}'
    cause = f"a memory is written as {form}, and no response is, such as {_quoted(played[0][1].response)}"
    advice = "Ask for that form in the rows' text, or show it in a warm start"
    if cut := sum(_was_cut(episode) for _, episode in played):
        advice += f"; {cut} of them were cut off: raise rollout.max_new_tokens {facts.recipe.rollout.max_new_tokens}"
    return Finding("no_memory", what, cause, advice)


def _has_memory(task: Task, episode: Episode) -> bool:
    semantic = task.metadata.get("type") == "semantic"
    return (parse_facts if semantic else parse_memory)(episode.response) is not None


def bad_rows(facts: StepFacts) -> Finding | None:
    """More rows were skipped than played."""
    skipped = facts.row.get("tasks/skipped_bad", 0) + facts.row.get("tasks/skipped_long", 0)
    tasks = len(facts.evidence.groups)
    if skipped <= tasks:
        return None
    cause = "rows or their media are broken, or prompts too long (tasks.on_bad_row, tasks.on_long_prompt: skip)"
    advice = "Set both to refuse to hear which rows, and why"
    return Finding("bad_rows", f"{skipped:.0f} rows were skipped to play {tasks}", cause, advice)


def _flat(facts: StepFacts) -> bool:
    """True if for several steps no group told its members apart."""
    rows = [*facts.history.rows, facts.row][-IN_A_ROW:]
    return len(rows) == IN_A_ROW and all(
        (row.get("groups/trained", 0) > 0 and row.get("groups/zero_variance") == row["groups/trained"])
        or (row.get("groups/without_signal", 0) > 0 and not row.get("groups/trained"))
        for row in rows
    )


def _lasting(values: Sequence[float], value: float) -> str:
    count = next((i for i, one in enumerate(reversed(values)) if one != value), len(values))
    return f"{count}"


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
