"""What judges cost: calls, answers from the cache, tokens, money and seconds, by model and by what they are for."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sensorium.recipe.judge_section import PriceSection


@dataclass
class JudgeCounts:
    """One model since the counts were last taken."""

    calls: int = 0
    cache_hits: int = 0
    retries: int = 0
    malformed: int = 0
    failures: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    longest_s: float = 0.0


class JudgeMeter:
    """Counts by model name, under the phase that is measured now: ``judge/MODEL/calls``, ``eval/judge/MODEL/calls``."""

    def __init__(self, prices: Mapping[str, PriceSection]) -> None:
        self._prices = prices
        self._phase = ""
        self._counts: dict[tuple[str, str], JudgeCounts] = defaultdict(JudgeCounts)

    def of(self, model: str) -> JudgeCounts:
        """The counts of a model."""
        return self._counts[self._phase, model]

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what is asked inside the block under ``name/judge/…``."""
        before, self._phase = self._phase, f"{name}/"
        try:
            yield
        finally:
            self._phase = before

    def take_metrics(self) -> dict[str, float]:
        """Rows for the metrics since the last call; names of models have '.' for '/'."""
        taken, self._counts = self._counts, defaultdict(JudgeCounts)
        row: dict[str, float] = {}
        for (phase, model), counted in sorted(taken.items()):
            name = f"{phase}judge/{model.replace('/', '.')}"
            price = self._prices.get(model, PriceSection())
            row[f"{name}/calls"] = counted.calls
            row[f"{name}/cache_hits"] = counted.cache_hits
            row[f"{name}/retries"] = counted.retries
            row[f"{name}/malformed"] = counted.malformed
            row[f"{name}/failures"] = counted.failures
            row[f"{name}/input_tokens"] = counted.input_tokens
            row[f"{name}/output_tokens"] = counted.output_tokens
            row[f"{name}/cost"] = (counted.input_tokens * price.input + counted.output_tokens * price.output) / 1e6
            if counted.calls:
                row[f"{name}/latency_mean_s"] = counted.seconds / counted.calls
                row[f"{name}/latency_max_s"] = counted.longest_s
        return row
