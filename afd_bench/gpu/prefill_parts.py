"""Where the time of one layer of a step with prompts goes, on both sides of a 1A1F.

Made of the stage timestamps of steps that run eagerly (metrics.stage_every). Both sides take them
from the clock of their host, which is the same one, so no clocks have to be matched.
"""

import asyncio
import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from afd.errors import AfdError
from afd.metrics.step_trace import Span
from afd_bench.gpu.timeline import Step, fetch, join
from afd_bench.prefill import Prompts, time_prompts
from afd_bench.servers import Server
from afd_bench.workload import open_session

FEWEST_LAYERS = 3
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_ATTENTION = "attention-0"
_IDLE_US = 100_000.0


@dataclass(frozen=True)
class Parts:
    """Microseconds of one layer, summed over its micro-batches, and of the step around it.

    Means over all layers but the first one of a step, where nothing is awaited.

    launch: attention's host queues the attention half and the router. send: its GPU finishes them,
    and the rows are copied to the FFN. attention_waits: until the answer is here.
    experts: the FFN's host queues the experts, and its GPU finishes them. answer: the copy back.
    ffn_waits: until the next request is here.
    request_seen, answer_seen: from the end of a copy until a side that waited for it goes on; part
    of the waits.
    layer: from one layer to the next. outside: the rest of the step.
    """

    launch: float
    send: float
    attention_waits: float
    experts: float
    answer: float
    ffn_waits: float
    request_seen: float
    answer_seen: float
    layer: float
    outside: float


def parts_of(step: Step) -> Parts:
    """Returns the parts of a step with at least FEWEST_LAYERS layers and one FFN rank."""
    (theirs,) = step.ffn.values()
    mine, ffn = step.attention.spans, theirs.spans
    layers = sorted({span.layer for span in mine})
    starts = [min(s.started_ns for s in mine if s.layer == layer) for layer in layers]
    layer_ns = (starts[-1] - starts[1]) / (len(layers) - 2)
    requested = {(s.layer, s.micro_batch): s.copied_ns for s in mine}
    answered = {(s.layer, s.micro_batch): s.copied_ns for s in ffn}
    following = dict(itertools.pairwise(layers))
    came = {
        (following[layer], micro_batch): at
        for (layer, micro_batch), at in answered.items()
        if layer in following
    }  # the answer that a position begins with, by position

    def later(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
        """(the span before it, a span), of all layers but the first."""
        return [(a, b) for a, b in itertools.pairwise(spans) if b.layer != layers[0]]

    def mean_us(times_ns: Iterable[int]) -> float:
        return sum(times_ns) / (len(layers) - 1) / 1e3

    def seen(spans: Sequence[Span], at: dict[tuple[int, int], int]) -> float:
        found = ((a, b, at[b.layer, b.micro_batch]) for a, b in later(spans))
        return mean_us(b.started_ns - there for a, b, there in found if there > a.copied_ns)

    whole_ns = step.attention.ended_ns - step.attention.began_ns
    return Parts(
        launch=mean_us(b.done_ns - b.started_ns for _, b in later(mine)),
        send=mean_us(b.copied_ns - b.done_ns for _, b in later(mine)),
        attention_waits=mean_us(b.started_ns - a.copied_ns for a, b in later(mine)),
        experts=mean_us(b.done_ns - b.started_ns for _, b in later(ffn)),
        answer=mean_us(b.copied_ns - b.done_ns for _, b in later(ffn)),
        ffn_waits=mean_us(b.started_ns - a.copied_ns for a, b in later(ffn)),
        request_seen=seen(ffn, requested),
        answer_seen=seen(mine, came),
        layer=layer_ns / 1e3,
        outside=(whole_ns - len(layers) * layer_ns) / 1e3,
    )


def eager_steps(server: Server, depth: int, rows: int) -> list[Step]:
    """Returns the last eager steps of this depth with at least so many rows.

    Raises:
        AfdError: there is none.
    """
    found = [
        step
        for step in join(fetch(server), _ATTENTION, depth)
        if not step.attention.replayed and step.attention.rows >= rows
    ]
    if not found:
        raise AfdError(
            f"no step of depth {depth} had {rows} rows; choose longer prompts (--lengths)"
        )
    return found


def between_us(steps: Sequence[Step]) -> float:
    """Returns the median time between two steps; 0 if there are no two. Longer times than 100 ms
    are those without a request."""
    ordered = sorted((step.attention for step in steps), key=lambda own: own.began_ns)
    gaps = [(b.began_ns - a.ended_ns) / 1e3 for a, b in itertools.pairwise(ordered)]
    return statistics.median([gap for gap in gaps if gap < _IDLE_US] or [0.0])


def table(steps: Sequence[Step]) -> str:
    """Returns a line per part: the median of the steps in microseconds."""
    parts = [asdict(parts_of(step)) for step in steps]
    return "\n".join(
        f"  {name:16} {statistics.median(own[name] for own in parts):9.0f} us" for name in parts[0]
    )


async def print_parts(
    server: Server, depths: Sequence[int], length: int, rows: int, rounds: int
) -> None:
    """Sends prompts one after the other, and prints a table per depth: the parts of the steps that
    have at least ``rows`` rows.

    Raises:
        AfdError: the model has too few layers, or no step has so many rows.
    """
    prompts = Prompts()
    async with open_session() as session:
        for depth in depths:
            server.set_depth(depth)
            await asyncio.sleep(_PROPAGATION_S)
            times = [
                await time_prompts(session, server, [prompts.draw(length)])
                for _ in range(rounds + 1)
            ][1:]  # the first one warms up
            steps = await asyncio.to_thread(eager_steps, server, depth, rows)
            if len({span.layer for span in steps[0].attention.spans}) < FEWEST_LAYERS:
                raise AfdError(f"--parts needs {FEWEST_LAYERS} layers or more (--layers)")
            print(
                f"depth {depth}, prompts of {length} tokens: first token after"
                f" {1e3 * statistics.median(times):.1f} ms; {len(steps)} steps of {rows} rows or"
                f" more, {between_us(steps):.0f} us between two; of a layer and its step:\n"
                + table(steps),
                flush=True,
            )
