"""The table of rules. A new one is a function of the facts with a docstring, a line here, and a test.

A rule that fires hides those whose findings it explains: "no answer was found" makes "nothing was paid" needless.
"""

from collections.abc import Callable
from dataclasses import dataclass

from sensorium.record.findings import Finding
from sensorium.trainer.health import learning_rules, pay_rules, process_rules
from sensorium.trainer.health.facts import StepFacts


@dataclass(frozen=True)
class Rule:
    """A rule and the rules that need not be told where it fires."""

    judge: Callable[[StepFacts], Finding | None]
    hides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What its metric and its finding are called."""
        return self.judge.__name__


RULES = (
    Rule(pay_rules.failed_episodes),
    Rule(pay_rules.rows_without_answer),
    Rule(pay_rules.nothing_scored, hides=("missing_term",)),
    Rule(pay_rules.missing_term),
    Rule(pay_rules.no_update),
    Rule(learning_rules.learning_rate, hides=("no_answer", "never_paid", "no_variance", "constant_term")),
    Rule(learning_rules.sudden_loss, hides=("no_answer", "never_paid", "no_variance", "constant_term")),
    Rule(pay_rules.no_answer, hides=("never_paid", "no_variance", "constant_term")),
    Rule(pay_rules.never_paid, hides=("no_variance", "constant_term")),
    Rule(pay_rules.no_variance, hides=("constant_term",)),
    Rule(pay_rules.constant_term),
    Rule(pay_rules.truncated),
    Rule(pay_rules.no_memory),
    Rule(pay_rules.bad_rows),
    Rule(learning_rules.gradient),
    Rule(learning_rules.held_out_fall),
    Rule(learning_rules.held_out),
    Rule(learning_rules.entropy_collapse),
    Rule(learning_rules.large_ratio),
    Rule(learning_rules.mismatch),
    Rule(learning_rules.stale, hides=("weightless",)),
    Rule(learning_rules.weightless),
    Rule(learning_rules.blind),
    Rule(process_rules.lost_processes),
    Rule(process_rules.slower_computing),
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
