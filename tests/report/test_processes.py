"""A run's page says which processes there were, who waited for whom, how old episodes were and who was replaced."""

from sensorium.report.charts import Axis
from sensorium.report.page import processes_section

AXIS = Axis(1.0, 4.0)
CLUSTER = {"learners": 2, "engines": 2, "environments": 1, "rewards": 0, "placement": "ray"}


def rows(**metrics: list[float]) -> list[dict[str, float]]:
    names = {name.replace("__", "/"): values for name, values in metrics.items()}
    return [
        {"step": i + 1, "time/step_s": 2.0} | {name: values[i] for name, values in names.items()}
        for i in range(len(next(iter(names.values()))))
    ]


def test_processes_waits_ages_and_losses_are_told() -> None:
    recipe = {
        "cluster": CLUSTER,
        "rollout": {"engine": {"name": "vllm"}},
        "schedule": {"name": "asynchronous", "max_staleness": 2},
    }
    page = processes_section(
        recipe,
        rows(
            wait__learner_for_episodes_s=[1.0, 0.5, 0.5, 0.0],
            wait__engine_for_learner_s=[0.0, 0.0, 0.0, 1.0],
            staleness__mean=[0.0, 1.0, 1.5, 2.0],
            staleness__max=[0.0, 1.0, 2.0, 2.0],
            staleness__share_0=[1.0, 0.0, 0.0, 0.0],
            staleness__share_1=[0.0, 1.0, 0.5, 0.0],
            mismatch__effective_share=[1.0, 1.0, 0.9, 0.9],
            engine__replaced=[0.0, 1.0, 1.0, 1.0],
            engine__sampled_again=[0.0, 3.0, 3.0, 0.0],
        ),
        AXIS,
    )
    assert (
        "The driver, 2 learner ranks, 2 engines (vllm), 1 environment worker, placed by Ray. Schedule: asynchronous."
        in page
    )
    assert "learner for episodes 25.0 %, learner for scores 0.0 %, engines for the learner 12.5 %" in page
    assert "Age of what was trained on, in updates" in page
    assert "Share of the tokens that counts, in effect" in page
    assert '<th scope="row">tokens 1 update old</th><td>37.5 %</td>' in page
    assert '<th scope="row">engines replaced</th><td>1, at step 2</td>' in page
    assert '<th scope="row">responses sampled again</th><td>3, at step 2</td>' in page


def test_counts_that_begin_anew_after_a_resume_add_up() -> None:
    page = processes_section({"cluster": {"rewards": 2}}, rows(worker__reward_replaced=[1.0, 2.0, 1.0, 1.0]), AXIS)
    assert "<td>3, at steps 1, 2, 3</td>" in page


def test_a_run_that_lost_nobody_says_so_and_one_of_one_process_says_nothing() -> None:
    quiet = rows(worker__environment_replaced=[0.0, 0.0], worker__rolled_again=[0.0, 0.0])
    assert "replaced or done again</th><td>nothing</td>" in processes_section({"cluster": {"environments": 2}}, quiet, AXIS)
    alone = rows(wait__learner_for_episodes_s=[1.0, 1.0])
    assert processes_section({"cluster": {"learners": 1}, "schedule": {"name": "synchronous"}}, alone, AXIS) == ""
    assert "The driver alone. Schedule: one step off." in processes_section({"schedule": "one_step_off"}, alone, AXIS)
