"""Rules about the processes of a run: those that were lost, also where they were replaced and the run goes on."""

from sensorium.record.findings import Finding
from sensorium.report.processes import LOSSES
from sensorium.trainer.health.facts import StepFacts


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
    counts = ", ".join(f"{LOSSES[name]} {count:,.0f}" for name, count in losses.items())
    told = [f"{counts} since the run began"] * bool(counts) + fewer
    what = f"processes were lost ({'; '.join(told)})"
    cause = "they died or hung: the line that was printed when one was lost says how, with its last words"
    advice = (
        "What they had under way is done again, and nothing is trained twice. If more are lost, look at the memory of "
        "their machine: cluster.restarts of a kind are replaced in a run, after that the others go on alone"
    )
    return Finding("lost_processes", what, cause, advice)
