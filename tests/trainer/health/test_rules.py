"""Each rule fires on its case, says the cause, and keeps still on a healthy step."""

from dataclasses import replace
from typing import Any

import pytest

from sensorium.evaluation.summary import wilson
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import OF_THE_MACHINE, Finding, SightResult, repeatable
from sensorium.trainer.health.facts import Evidence, HeldOutResult, History, StepFacts, has_trained
from sensorium.trainer.health.rules import RULES, constant_term, examine
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user

HEALTHY = {
    "reward/mean": 0.5,
    "reward/exact": 0.5,
    "accuracy": 0.5,
    "groups/trained": 4,
    "groups/zero_variance": 1,
    "policy/grad_norm": 0.7,
    "policy/lr": 1e-5,
    "policy/entropy": 0.8,
    "mismatch/kl": 1e-10,
    "tasks/skipped_bad": 0,
}
SLOW = {
    "time/step_s": 9.0,
    "wait/learner_for_episodes_s": 7.0,
    "time/environment_mean_s": 0.6,
    "time/environment_episode_s": 4.0,
    "time/environments_busy": 0.4,
    "environment/places": 64,
}
FULL = {"time/environments_busy": 0.8}
NOTHING = HEALTHY | {"reward/mean": 0.0, "reward/exact": 0.0, "accuracy": 0.0, "groups/zero_variance": 4}


def recipe(**sections: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "r",
            "steps": 100,
            "model": {"path": "m"},
            "tasks": {"train": [{"source": "shapes"}]},
            "rewards": {"terms": [{"name": "exact"}]},
            "rollout": {"max_new_tokens": 3},
            **sections,
        }
    )


def episode(
    index: int, value: float | None, text: str = "<answer>7</answer>", reason: str = "", status: Status = Status.FINISHED
) -> Episode:
    said = Segment("model", (5, 6, 7), text=text, logprobs=(0.0,) * 3, name=f"e{index}")
    correct = None if value is None else value > 0
    thread, turn = Thread((Segment("environment", (1,)), said), (False, True)), Turn(0, (), said, 0, 1)
    failure = "the album is torn" if status == Status.FAILED else ""
    scores = (Score("exact", value, correct=correct, reason=reason),)
    return Episode(f"e{index}", "t", "g", index, (thread,), (turn,), status, failure, scores)


def cut_off(whole: Episode) -> Episode:
    """The same with its last response ended by its budget."""
    return replace(whole, status=Status.TRUNCATED, turns=(*whole.turns[:-1], replace(whole.turns[-1], cut=True)))


def group(*episodes: Episode, answer: Any = "7") -> Group:
    return Group("g", Task("t", (user("?"),), answer), episodes)


MIXED = group(*(episode(i, float(i % 2)) for i in range(8)))
ZEROS = group(*(episode(i, 0.0) for i in range(8)))


def facts(row: dict[str, float], *groups: Group, before: Any = (), step: int = 9, **more: Any) -> StepFacts:
    evidence = Evidence(
        groups or (MIXED,),
        more.pop("fates", {}),
        more.pop("unanswered", {}),
        more.pop("given_up", ()),
        more.pop("demonstrations", (0, 0, 0)),
        more.pop("answers", ({}, {})),
    )
    sections = more.pop("sections", {})
    return StepFacts(recipe(**sections), step, row, History(before), evidence, **more)


def evaluations(*right: int, of: int = 64) -> tuple[HeldOutResult, ...]:
    """Evaluations before the first step and after every third, by how many of the tasks were answered right."""
    return tuple(HeldOutResult(3 * i, count / of, *wilson(count, of)) for i, count in enumerate(right))


def found(given: StepFacts) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(given)}


def test_a_healthy_step_has_no_finding() -> None:
    assert not found(facts(HEALTHY, before=[HEALTHY] * 8))
    assert not found(facts(HEALTHY))


def test_a_judge_that_fails_is_not_taken_for_rows_without_an_answer() -> None:
    for reason in ("judge 'm' answered 3 times not as asked", "reward term 'remote': no server answered"):
        rules = found(facts(HEALTHY, group(*(episode(i, None, reason=reason) for i in range(4)), answer=None)))
        assert "rows_without_answer" not in rules
        assert reason in rules["nothing_scored"].cause


MEMORIES = {"tasks": {"train": [{"source": "shapes"}], "planner": "causal_history", "shuffle": False}}


PPO = {"algorithm": {"advantage": {"name": "masked_gae"}}}
SHORT = HEALTHY | {"episodes/truncated": 1.0, "value/mean": 0.4}
RAMBLING = SHORT | {"episodes/truncated": 7.0, "value/mean": 1.12}


CASES: dict[str, tuple[StepFacts, str]] = {
    "failed_episodes": (
        facts(HEALTHY, group(*(episode(i, None, status=Status.FAILED) for i in range(4)))),
        "4 of 4 episodes failed: the first: the album is torn",
    ),
    "rows_without_answer": (
        facts(HEALTHY, group(*(episode(i, None, reason="no answer") for i in range(4)), answer=None)),
        "1 of 1 tasks have no answer, and 'exact' cannot judge without one",
    ),
    "nothing_scored": (
        facts(HEALTHY, group(*(episode(i, None, reason="the judge is out") for i in range(4)))),
        "none of 4 episodes has a reward: 'exact' says: the judge is out",
    ),
    "missing_term": (
        facts(HEALTHY, group(*(episode(i, None if i else 1.0, reason="TypeError: no") for i in range(4)))),
        "the term 'exact' gave no score for 3 of 4 episodes: 'exact' says: TypeError: no",
    ),
    "no_update": (
        facts({"policy/skipped": 1}, fates={"e0": "dropped: no score for exact"}),
        "no update was made: the first episode was left out: dropped: no score for exact",
    ),
    "no_answer": (
        facts(NOTHING, group(*(episode(i, 0.0, "seven") for i in range(4))), unanswered={"exact": (4, 4)}),
        "<answer>…</answer>, and no response has that, such as “seven”",
    ),
    "never_paid": (facts(NOTHING, ZEROS, before=[NOTHING] * 2), "the reward of every episode was 0 for 3 steps"),
    "no_variance": (
        facts(
            HEALTHY | {"groups/zero_variance": 4, "accuracy": 1.0},
            group(*(episode(i, 1.0) for i in range(8))),
            before=[HEALTHY, HEALTHY | {"groups/zero_variance": 4}, HEALTHY | {"groups/zero_variance": 4}],
        ),
        "every answer is right",
    ),
    "constant_term": (
        facts(HEALTHY, group(*(episode(i, 0.5) for i in range(8))), before=[HEALTHY] * 6),
        "the term 'exact' has given 0.5 to every episode of 7 steps",
    ),
    "truncated": (
        facts(HEALTHY, group(*(cut_off(episode(i, float(i % 2))) for i in range(8)))),
        "reached rollout.max_new_tokens 3",
    ),
    "cut_for_value": (
        facts(RAMBLING, before=[SHORT] * 5, sections=PPO),
        "7 of 8 episodes were cut off (1 in the first step of RL), and the critic expects 1.12 where",
    ),
    "no_memory": (
        facts(HEALTHY, group(*(episode(i, 0.5, "a red square") for i in range(4))), sections=MEMORIES),
        "none of 4",
    ),
    "bad_rows": (facts(HEALTHY | {"tasks/skipped_bad": 5}), "rows were skipped 5 times to play 1 task"),
    "learning_rate": (facts(HEALTHY | {"policy/lr": 1e10}), "the learning rate is 1e+10"),
    "gradient": (facts(HEALTHY | {"policy/grad_norm": 4e8}), "the gradient norm is 4e+08"),
    "sudden_loss": (
        facts(HEALTHY | {"accuracy": 0.01}, *(MIXED,) * 64, before=[HEALTHY | {"accuracy": 0.8}] * 5),
        "accuracy fell from 0.80 to 0.01",
    ),
    "held_out_fall": (
        facts(HEALTHY, held_out=evaluations(39, 38, 30, 19), sections={"schedule": "asynchronous"}),
        "held-out accuracy fell from 60.9 % [48.7 to 71.9] before training to 29.7 % [19.9 to 41.8] at step 9",
    ),
    "held_out": (
        facts(
            HEALTHY | {"accuracy": 0.9, "eval/accuracy": 0.48},
            before=[HEALTHY | {"accuracy": 0.5, "eval/accuracy": 0.47}, *[HEALTHY | {"accuracy": 0.9}] * 5],
        ),
        "held-out accuracy went from 0.47 to 0.48 while training accuracy rose from 0.50 to 0.90",
    ),
    "entropy_collapse": (
        facts(HEALTHY | {"policy/entropy": 0.01}, before=[HEALTHY, *[HEALTHY | {"policy/entropy": 0.01}] * 5]),
        "entropy fell from 0.8 to 0.01 with accuracy 0.50",
    ),
    "answer_collapse": (
        facts(HEALTHY, answers=({"a": 116, "b": 12}, dict.fromkeys("abcd", 4))),
        "128 answers are of 1.4 kinds in effect, 91 % of them “a”; those known are of 4.0",
    ),
    "large_ratio": (facts(HEALTHY | {"policy/ratio_max": 4e8}), "a token became 4e+08 times likelier"),
    "stale": (facts(HEALTHY | {"mismatch/effective_share": 0.1, "staleness/max": 3.0}), "10 % are left in effect"),
    "weightless": (facts(HEALTHY | {"correction/effective_share": 0.02}), "leaves 2.0 % of the tokens' weight"),
    "mismatch": (facts(HEALTHY | {"mismatch/kl": 0.3}), "engine and learner DISAGREE: their KL is 3.0e-01"),
    "blind": (
        facts(HEALTHY, sight=(SightResult("picture", 32, 0.5, 0.5, 30),)),
        "accuracy on 32 held-out tasks is 0.50, and 0.50 with pictures blanked (30 answers are the same)",
    ),
    "lost_processes": (
        facts(
            HEALTHY | {"engine/replaced": 3.0, "engine/sampled_again": 4.0, "engine/ready": 1.0},
            before=[HEALTHY | {"engine/replaced": 2.0}, HEALTHY | {"engine/replaced": 1.0}],
            sections={"cluster": {"engines": 2}},
        ),
        "(engines replaced 5, responses sampled again 4 since the run began; 1 of 2 engines work)",
    ),
    "slower_computing": (
        facts(HEALTHY, given_up=("Triton is not installed.", "a kernel\nfailed")),
        "given up, so the run is slower than it could be: Triton is not installed; a kernel failed",
    ),
    "slow_phase": (facts(HEALTHY | SLOW), "environments (4 s an episode, 40 % busy) took most of 9.0 s"),
}


@pytest.mark.parametrize(
    ("changes", "sections", "way_out"),
    [
        ({}, {}, "schedule: asynchronous"),
        ({}, {"rollout": {"schedule": "lockstep"}}, "rollout.schedule: eager"),
        (FULL | {"time/environment_wait_max_s": 5.0}, {}, "rollout.environment_calls"),
        (FULL, {"schedule": "asynchronous"}, "schedule.max_staleness"),
        ({"wait/learner_for_scores_s": 6.0}, {}, "one_step_off"),
    ],
)
def test_what_limits_a_run_is_named_with_the_key_to_set(
    changes: dict[str, float], sections: dict[str, Any], way_out: str
) -> None:
    if "schedule" in sections:
        sections = sections | {"algorithm": {"correction": {"weights": "token"}}}
    (finding,) = examine(facts(HEALTHY | SLOW | changes, sections=sections))
    assert finding.rule == "slow_phase"
    assert way_out in finding.advice


@pytest.mark.parametrize(
    ("changes", "sections"),
    [
        ({"time/environment_mean_s": 0.01}, {}),  # sampling is slow
        ({"time/environment_episode_s": 2.0}, {}),  # as above, and environments take a part of it
        ({"time/environment_wait_max_s": 5.0}, {"schedule": "asynchronous"}),  # places are free most of the time
        ({"wait/learner_for_episodes_s": 3.0}, {}),  # the update is slow
        ({"time/step_s": 0.9, "wait/learner_for_episodes_s": 0.4}, {}),  # a step is short
    ],
)
def test_environments_that_do_not_limit_a_run_are_not_named(changes: dict[str, float], sections: dict[str, Any]) -> None:
    if "schedule" in sections:
        sections = sections | {"algorithm": {"correction": {"weights": "token"}}}
    assert examine(facts(HEALTHY | SLOW | changes, sections=sections)) == []


def test_every_rule_has_a_case_here_and_says_what_it_is() -> None:
    assert {rule.name for rule in RULES} == set(CASES)
    assert all(rule.judge.__doc__ for rule in RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_rule_fires_on_its_case_in_one_line_with_cause_and_advice(rule: str) -> None:
    given, words = CASES[rule]
    finding = found(given)[rule]
    assert finding.rule == rule
    assert words in finding.text
    assert "\n" not in finding.text
    assert finding.cause
    assert finding.advice


@pytest.mark.parametrize("rule", CASES)
def test_findings_that_equal_runs_share_come_from_what_equal_runs_share(rule: str) -> None:
    given, _ = CASES[rule]
    shared = replace(given, row=repeatable(given.row), evidence=replace(given.evidence, given_up=()))
    assert (rule in found(shared)) is (rule not in OF_THE_MACHINE)
    assert (f"health/{rule}" in repeatable({f"health/{rule}": 1.0})) is (rule not in OF_THE_MACHINE)


def test_findings_about_the_machine_hide_no_others() -> None:
    assert not any(rule.hides for rule in RULES if rule.name in OF_THE_MACHINE)


def test_processes_are_lost_when_a_count_grows_or_some_do_not_work() -> None:
    lost = {"worker/reward_replaced": 1.0, "worker/reward_ready": 2.0, "worker/environment_ready": 1.0}
    sections = {"cluster": {"rewards": 2, "environments": 1}}
    assert "lost_processes" in found(facts(HEALTHY | lost, before=[HEALTHY], sections=sections))
    assert "lost_processes" not in found(facts(HEALTHY | lost, before=[HEALTHY | lost], sections=sections))
    none_left = lost | {"worker/environment_ready": 0.0}
    finding = found(facts(HEALTHY | none_left, before=[HEALTHY | lost], sections=sections))["lost_processes"]
    assert "0 of 1 environment workers work" in finding.text
    assert not finding.grave


def test_without_a_comparison_within_groups_only_equal_rewards_of_all_episodes_are_no_variance() -> None:
    """A group of one never varies; with a critic its episode is compared with what was expected of it."""
    row = HEALTHY | {"groups/zero_variance": 4, "accuracy": 0.5}
    ones = [group(episode(i, float(i % 2))) for i in range(8)]
    for name, alarm in (("gae", False), ("reinforce_plus_plus", False), ("grpo", True)):
        given = {"algorithm": {"advantage": {"name": name}}, "batch": {"group_size": 2 if alarm else 1}}
        assert ("no_variance" in found(facts(row, *ones, before=[row] * 2, sections=given))) is alarm
    given = {"algorithm": {"advantage": {"name": "gae"}}, "batch": {"group_size": 1}}
    same = row | {"accuracy": 1.0, "reward/mean": 1.0}
    equal = facts(same, *(group(episode(i, 1.0)) for i in range(8)), before=[same] * 2, sections=given)
    assert "no_variance" in found(equal)


@pytest.mark.parametrize("rule", ["no_answer", "never_paid", "no_variance"])
def test_demonstrations_without_a_reward_are_named_as_the_cause(rule: str) -> None:
    row = NOTHING | ({"reward/mean": 0.1} if rule == "no_variance" else {})
    without = {"exact": (8, 8)} if rule == "no_answer" else {}
    for demonstrations, named in (((4, 4, 0), True), ((3, 4, 0), False), ((0, 0, 0), False), ((4, 4, 4), True)):
        given = facts(row, ZEROS, before=[row] * 2, unanswered=without, demonstrations=demonstrations)
        assert ("4 of 4" in found(given)[rule].text) is named
        assert ("rollout.max_turns" in found(given)[rule].text) is (demonstrations[2] > 0)


def test_who_asks_for_the_tag_already_is_not_told_to_ask_for_it() -> None:
    silent = [episode(i, 0.0, "seven") for i in range(4)]
    asked = Group("g", Task("t", (user("Answer in <answer>…</answer>."),), "7"), tuple(silent))
    for shown, begins in ((group(*silent), "Ask for the tag in the prompt"), (asked, "The prompt asks for the tag")):
        advice = found(facts(NOTHING, shown, unanswered={"exact": (4, 4)}))["no_answer"].advice
        assert advice.startswith(begins)
        assert "in a warm start" in advice


def test_answers_that_end_before_their_closing_tag_are_told_apart_from_those_in_another_form() -> None:
    budget = {"sections": {"rollout": {"max_new_tokens": 5}}}
    open_ended = [episode(i, 0.0, f"it is <answer>{i}") for i in range(5)]
    closed = [episode(i, 0.0, "<answer>seven</answer>") for i in range(5, 8)]

    def told(*episodes: Episode, looked_at: int) -> Finding:
        unanswered = {"exact": (looked_at, looked_at)}
        return found(facts(NOTHING, group(*episodes), unanswered=unanswered, **budget))["no_answer"]

    cut = told(*map(cut_off, open_ended), *closed, looked_at=4)
    assert "in any of 4 responses (it looked at 4 of 8), so" in cut.what
    assert "4 of them have <answer> and end before </answer>, such as “it is <answer>0”" in cut.cause
    assert "4 were cut off at rollout.max_new_tokens 5" in cut.cause
    assert cut.advice.startswith("Raise rollout.max_new_tokens, or show")
    ended = told(*open_ended, looked_at=5)
    assert "looked at" not in ended.what
    assert "cut off" not in ended.cause
    assert "max_new_tokens" not in ended.advice, "the model ended them itself"
    other_form = told(open_ended[0], *closed, looked_at=4)
    assert "is in another form than it reads, such as “<answer>seven</answer>”" in other_form.cause
    silent = [episode(i, 0.0, "seven") for i in range(3)]
    assert "no response has that" in told(*silent, open_ended[4], looked_at=4).cause


def test_what_another_finding_explains_is_not_told() -> None:
    flat = facts(NOTHING, ZEROS, before=[NOTHING] * 6, unanswered={"exact": (8, 8)})
    assert set(found(flat)) == {"no_answer"}
    assert set(found(replace(flat, evidence=Evidence((ZEROS,))))) == {"never_paid"}
    ruined = replace(flat, row=NOTHING | {"policy/lr": 10.0})
    assert set(found(ruined)) == {"learning_rate"}, "what such updates did is not the prompt's fault"


def test_a_term_that_settled_on_a_value_is_not_called_constant() -> None:
    right = group(*(episode(i, 1.0) for i in range(8)))
    learned = [HEALTHY] * 3 + [HEALTHY | {"reward/exact": 1.0}] * 8
    assert "constant_term" not in found(facts(HEALTHY | {"reward/exact": 1.0}, right, before=learned))


@pytest.mark.parametrize(("value", "told"), [(1.0, False), (0.0, True)])
def test_a_guard_that_has_nothing_to_prevent_is_not_called_constant(value: float, told: bool) -> None:
    row, alike = HEALTHY | {"reward/exact": value}, group(*(episode(i, value) for i in range(8)))
    guard = {"name": "token_length", "options": {"name": "exact"}}
    given = facts(row, alike, before=[row] * 6, sections={"rewards": {"terms": [guard]}})
    assert (constant_term(given) is not None) == told


def test_a_fall_of_held_out_accuracy_names_the_key_to_lower_and_the_checkpoint_that_is_kept() -> None:
    below_first = found(CASES["held_out_fall"][0])["held_out_fall"]
    assert below_first.grave
    assert "stale (schedule: asynchronous). Lower optimizer.lr or schedule.max_staleness" in below_first.text
    assert "nothing trained so far was better than the model before training" in below_first.text
    below_best = found(facts(HEALTHY, held_out=evaluations(20, 50, 24)))["held_out_fall"]
    assert not below_best.grave
    assert "from 78.1 % [66.6 to 86.5] at step 3 to 37.5 %" in below_best.text
    assert "stale" not in below_best.text
    assert "the checkpoint of step 3 is kept as the best (checkpoint.best)" in below_best.text
    warm = facts(HEALTHY, held_out=evaluations(50, 20), sections={"warm_start": {"steps": 3}})
    assert "Lower warm_start.optimizer.lr and" in found(warm)["held_out_fall"].text


def test_what_a_critics_own_value_did_is_not_laid_to_the_learning_rate() -> None:
    fallen = {"before": [SHORT] * 5, "held_out": evaluations(50, 0)}
    for row, sections, named in ((RAMBLING, {}, True), (RAMBLING | {"value/mean": 0.5}, {}, False), (SHORT, {}, False)):
        shown = found(facts(row, sections=PPO | sections, **fallen))
        assert ("overlong" in shown["held_out_fall"].advice) is named
        assert ("cut_for_value" in shown) is named
        assert ("optimizer.lr" in shown["held_out_fall"].advice) is not named
    masked = PPO | {"rollout": {"max_new_tokens": 3, "mask_truncated": True}}
    assert "rollout.mask_truncated" in found(facts(RAMBLING, before=[SHORT] * 5, sections=masked))["cut_for_value"].cause
    turns = PPO | {"rollout": {"max_turns": 5}}
    assert "gamma (1)" in found(facts(RAMBLING, before=[SHORT] * 5, sections=turns))["cut_for_value"].advice


def test_held_out_accuracy_that_varies_by_chance_has_not_fallen() -> None:
    overlapping, recovered = evaluations(39, 30), evaluations(39, 19, 36)
    best_and_worst_of_many = evaluations(*[38] * 20, 47, *[38] * 20, 29)
    assert best_and_worst_of_many[-1].high < best_and_worst_of_many[20].low, "by their intervals alone it would be a fall"
    for seen in ((), evaluations(39), overlapping, recovered, best_and_worst_of_many):
        assert not found(facts(HEALTHY, held_out=seen))


@pytest.mark.parametrize(("trained", "told"), [(0.26, False), (0.7, False), (0.75, True)])
def test_tasks_are_learned_by_heart_only_if_training_is_above_the_held_out_interval(trained: float, told: bool) -> None:
    before = [HEALTHY | {"accuracy": 0.09, "eval/accuracy": 39 / 64}, *[HEALTHY | {"accuracy": trained}] * 5]
    given = facts(
        HEALTHY | {"accuracy": trained, "eval/accuracy": 39 / 64}, before=before, held_out=evaluations(39, 39, 39)
    )
    assert ("held_out" in found(given)) == told


def test_entropy_may_fall_where_the_answers_are_right() -> None:
    sure = HEALTHY | {"policy/entropy": 0.01, "accuracy": 0.97}
    assert "entropy_collapse" not in found(facts(sure, before=[HEALTHY, *[sure] * 5]))


@pytest.mark.parametrize(
    ("given", "known", "collapsed"),
    [
        ({"yes": 128}, {"yes": 8, "no": 8}, False),  # two kinds of answers: one may be right for most of a step
        ({"a": 128}, {"a": 6, "b": 5, "c": 5}, False),
        ({"a": 128}, {"a": 13, "b": 1, "c": 1, "d": 1}, False),  # of which most are one
        ({"a": 64, "b": 64}, dict.fromkeys("abcd", 4), False),
        ({"a": 128}, dict.fromkeys("abcd", 4), True),
        ({"a": 63}, dict.fromkeys("abcd", 4), False),  # too few to say
        ({"a": 128}, dict.fromkeys("abcd", 3), False),
        (dict.fromkeys("abcdefghi", 14), {str(i): 1 for i in range(64)}, False),
        (dict.fromkeys("abcdefg", 18), {str(i): 1 for i in range(64)}, True),
    ],
)
def test_answers_collapse_only_where_those_known_are_of_many_kinds(
    given: dict[str, int], known: dict[str, int], collapsed: bool
) -> None:
    assert ("answer_collapse" in found(facts(HEALTHY, answers=(given, known)))) == collapsed


def test_entropy_that_leaps_is_a_sudden_loss() -> None:
    wild = facts(HEALTHY | {"policy/entropy": 5.6}, before=[HEALTHY])
    assert "the model writes at random" in found(wild)["sudden_loss"].text


def test_chance_in_few_groups_is_no_sudden_loss() -> None:
    unlucky = facts(HEALTHY | {"accuracy": 0.0}, *(MIXED,) * 4, before=[HEALTHY])
    assert "sudden_loss" not in found(unlucky)


def test_a_new_level_of_a_curriculum_is_no_sudden_loss() -> None:
    first, second = (HEALTHY | {"accuracy": 0.8, "planner/level": level} for level in (1.0, 2.0))
    for before in ([first] * 5, [*[first] * 4, second | {"accuracy": 0.02}]):
        given = facts(second | {"accuracy": 0.01}, *(MIXED,) * 64, before=before)
        assert "sudden_loss" not in found(given)
    assert "sudden_loss" in found(facts(second | {"accuracy": 0.01}, *(MIXED,) * 64, before=[first, *[second] * 4]))


def test_a_warm_start_without_demonstrations_says_so() -> None:
    lost = replace(episode(0, None, status=Status.FAILED), failure="task d1 has no demonstration to learn from")
    given = facts({"policy/skipped": 1}, group(lost), step=1, sections={"warm_start": {"steps": 3}})
    assert "task d1 has no demonstration to learn from" in found(given)["no_update"].text


def test_the_cause_of_no_pay_may_be_that_responses_are_cut() -> None:
    cut = group(*(cut_off(episode(i, 0.0)) for i in range(8)))
    assert "cut at rollout.max_new_tokens 3" in found(facts(NOTHING, cut, before=[NOTHING] * 3))["never_paid"].text


def test_a_step_trains_if_it_has_a_gradient_of_its_own() -> None:
    assert has_trained(HEALTHY)
    assert not has_trained({"policy/skipped": 1})
    assert not has_trained(HEALTHY | {"policy/grad_norm": 0.0})
    assert has_trained({"policy/grad_norm": 0.0, "value/loss": 0.3, "value/grad_norm": 0.1})
    assert not has_trained({"policy/grad_norm": 0.0, "value/loss": 0.0, "value/grad_norm": 0.0}), "nothing was ever paid"


def test_history_counts_idle_steps_but_not_where_everything_is_right() -> None:
    idle = HEALTHY | {"policy/grad_norm": 0.0}
    assert History([idle] * 3).idle == 3
    assert History([idle, HEALTHY, idle]).idle == 1
    assert History([HEALTHY, *[idle | {"accuracy": 1.0}] * 5]).idle == 0
    assert History([idle | {"accuracy": 1.0}] * 5).idle == 5


def test_history_is_the_same_from_rows_as_they_are_written() -> None:
    rows = [HEALTHY | {"step": i, "policy/loss": float("nan")} for i in range(12)]
    written = [{name: value for name, value in row.items() if name != "policy/loss"} for row in rows]
    assert vars(History(rows)) == vars(History(written))


def test_a_sight_check_of_rewards_does_not_call_them_accuracy() -> None:
    checked = facts(HEALTHY, sight=(SightResult("picture", 32, 0.5, 0.5, 30, "mean reward"),))
    assert "mean reward on 32 held-out tasks is 0.50, and 0.50 with pictures blanked" in found(checked)["blind"].text


def test_responses_that_may_not_end_are_not_to_be_taught_to() -> None:
    cut = group(*(cut_off(episode(i, float(i % 2))) for i in range(8)))
    endless = {"rollout": {"max_new_tokens": 3, "ignore_stop_tokens": True}}
    for sections, advised in (({}, "teach the model to end"), (endless, "rollout.ignore_stop_tokens: false")):
        assert advised in found(facts(HEALTHY, cut, sections=sections))["truncated"].advice


def test_one_memory_that_can_be_parsed_is_enough_and_other_planners_need_none() -> None:
    lists, text = '</think>{"description": ["red", "left"]}', '</think>{"description": "red"}'
    nothing, one, several = (
        group(*(episode(i, i / 4, written if i == 3 else "red") for i in range(4))) for written in ("red", text, lists)
    )
    assert "no_memory" in found(facts(HEALTHY, nothing, sections=MEMORIES))
    assert "no_memory" not in found(facts(HEALTHY, nothing))
    assert "no_memory" not in found(facts(HEALTHY, nothing, one, sections=MEMORIES))
    assert "no_memory" in found(facts(HEALTHY, several, sections=MEMORIES)), "a list is a memory of semantic rows only"
    semantic = replace(several, task=replace(several.task, metadata={"type": "semantic"}))
    assert "no_memory" not in found(facts(HEALTHY, semantic, sections=MEMORIES))
    cut = group(*(cut_off(episode(i, 0.5, "red")) for i in range(4)))
    assert "rollout.max_new_tokens 3" in found(facts(HEALTHY, cut, sections=MEMORIES))["no_memory"].advice
