"""Rules about the processes of a run: those that were lost, also where the run goes on, and how this one computes."""

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


def slower_computing(facts: StepFacts) -> Finding | None:
    """A fast way to compute was given up in this process, since it disagrees with the reference or cannot run here."""
    reasons = [" ".join(reason.split()).rstrip(".") for reason in facts.evidence.given_up]
    if not reasons:
        return None
    counted = "a fast way to compute was" if len(reasons) == 1 else f"{len(reasons)} fast ways to compute were"
    what = f"{counted} given up, so the run is slower than it could be"
    advice = "What is computed is right, the slower way. If the reason is this machine, mend it; otherwise report it"
    return Finding("slower_computing", what, "; ".join(reasons), advice)
