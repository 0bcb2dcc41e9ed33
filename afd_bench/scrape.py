"""Reads stage times between two moments from a gateway's /metrics."""

from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

STAGES = ("attention", "a2f", "ffn", "f2a")


@dataclass(frozen=True)
class StageTimes:
    """Totals over all instances.

    seconds, counts: time and number of observations per stage. bubbles: waiting seconds per side.
    """

    seconds: dict[str, float]
    counts: dict[str, float]
    bubbles: dict[str, float]

    def since(self, before: "StageTimes") -> "StageTimes":
        def less(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {key: value - then.get(key, 0.0) for key, value in now.items()}

        return StageTimes(
            less(self.seconds, before.seconds),
            less(self.counts, before.counts),
            less(self.bubbles, before.bubbles),
        )

    def mean_us(self, stage: str) -> float:
        """Returns the mean time of a stage per micro-batch and layer, in us."""
        count = self.counts.get(stage, 0.0)
        return 1e6 * self.seconds.get(stage, 0.0) / count if count else 0.0

    def bubble_us(self, side: str) -> float:
        """Returns the mean bubble of a side per micro-batch and layer, in us."""
        count = self.counts.get("attention" if side == "attention" else "ffn", 0.0)
        return 1e6 * self.bubbles.get(side, 0.0) / count if count else 0.0


def stage_times(exposition: str) -> StageTimes:
    """Sums ``afd_stage_seconds`` and ``afd_bubble_seconds`` over all instances."""
    seconds: dict[str, float] = {}
    counts: dict[str, float] = {}
    bubbles: dict[str, float] = {}
    wanted = {
        "afd_stage_seconds_sum": (seconds, "stage"),
        "afd_stage_seconds_count": (counts, "stage"),
        "afd_bubble_seconds_total": (bubbles, "side"),
    }
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name in wanted:
                totals, label = wanted[sample.name]
                key = sample.labels[label]
                totals[key] = totals.get(key, 0.0) + sample.value
    return StageTimes(seconds, counts, bubbles)
