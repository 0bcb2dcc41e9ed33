"""The simulation of a load of requests.

All attention instances with work take part in a step. Each starts when its previous step has
ended, and the FFN waits for all of them. An idle instance joins a step if it receives a request
before the last of the other instances has started.
"""

from __future__ import annotations

import heapq
from collections import deque

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.batching import Batches
from afd_planner.simulate.failures import Window, attention_windows, ffn_windows, outages
from afd_planner.simulate.inputs import Sources, rest_times, step_input
from afd_planner.simulate.result import FailureImpact, RequestCounts, Result
from afd_planner.simulate.spec import Requests, Spec
from afd_planner.simulate.step import run_step
from afd_planner.simulate.tally import Latencies, Tally, level
from afd_planner.simulate.workload import make_workload


class Serving:
    """State of one run: instances, pending requests, failures to come."""

    def __init__(self, spec: Spec, load: Requests, sources: Sources, traced_steps: int) -> None:
        x = spec.attention.instances
        self._spec = spec
        self._load = load
        self._sources = sources
        self._traced_steps = traced_steps
        self._workload = make_workload(load, sources.rng)
        self._batches = Batches(load, self._workload, x)
        self._sent = np.full(self._workload.arrival.size, np.nan)  # max_concurrency may delay it
        self._unsent = deque(range(self._sent.size))
        self._queue: list[tuple[float, int]] = []  # a heap: (moment, request) of those to assign
        for _ in range(load.max_concurrency or self._sent.size):
            self._send(0.0)
        self._ready = np.zeros(x)  # end of each instance's last step
        self._down_until = np.zeros(x)
        self._ffn_from = -np.inf  # the FFN is busy, or waits for a dead instance, until then
        self._ffn_windows = ffn_windows(spec)
        self._deaths = attention_windows(spec)
        self._died: list[tuple[Window, int, int]] = []  # with requests and tokens to replay
        self._tally = Tally()
        self._step = 0
        self._stopped = False  # an FFN instance is lost for good

    def _send(self, now: float) -> None:
        """Sends the next request, at ``now`` if it arrived before."""
        if not self._unsent:
            return
        request = self._unsent.popleft()
        self._sent[request] = max(now, self._workload.arrival[request])
        queued = self._sent[request] + self._load.client_ms * 1e-3
        self._batches.ready_at[request] = queued
        heapq.heappush(self._queue, (queued, request))

    def run(self, seed: int) -> Result:
        """Runs until all requests have finished or ``max_steps`` is reached."""
        while self._step < self._load.max_steps and not self._stopped:
            start = self._next_start()
            if start is None:
                break
            self._run_step(start)
            self._step += 1
        return self._result(seed)

    def _next_start(self) -> Array | None:
        """Assigns arrived requests and returns when each instance starts the next step.

        The value is inf for an instance that does not take part. Returns None at the end of the
        simulation.
        """
        while True:
            start = self._batches.may_start(self._ready)
            begun = start[np.isfinite(start)]
            if begun.size:
                opens = float(begun.max())
            elif self._queue:
                opens = max(self._queue[0][0], float(self._down_until.min()))
                if np.isinf(opens):
                    return None  # all attention instances are lost for good
            else:
                return None
            if self._handle_next_death(np.where(np.isfinite(start), start, opens)):
                continue
            alive = self._down_until <= opens
            arrived = []
            while self._queue and self._queue[0][0] <= opens:
                arrived.append(heapq.heappop(self._queue)[1])
            if not arrived:
                return start
            for _ in range(self._batches.assign(arrived, alive)):
                self._send(opens)

    def _handle_next_death(self, begins: Array) -> bool:
        """Handles the first death before its instance's next step; returns whether one exists."""
        for window in self._deaths:
            if window.begin < begins[window.instance]:
                self._die(window)
                return True
        return False

    def _die(self, window: Window) -> None:
        batches = self._batches
        self._deaths.remove(window)
        lost = batches.die(window.instance, self._step, window.begin)
        known = window.begin + self._spec.detect_s
        if lost:  # it was active or about to be
            self._ffn_from = max(self._ffn_from, known)
        for request in lost:
            batches.ready_at[request] = max(known, batches.ready_at[request])
            heapq.heappush(self._queue, (float(batches.ready_at[request]), request))
        tokens = int((self._workload.prompt[lost] + batches.tokens[lost]).sum())
        self._down_until[window.instance] = self._ready[window.instance] = window.end
        self._died.append((window, len(lost), tokens))

    def _run_step(self, start: Array) -> None:
        work = self._batches.begin_step(self._step, start)
        who = np.flatnonzero(work.decode + work.prefill)
        mine = work.of(who)
        begin = start[who]
        dying = self._first_deaths(set(who.tolist()))
        place = {i: int(np.searchsorted(who, i)) for i in dying}
        given = step_input(
            self._sources,
            mine,
            begin,
            outages(self._ffn_windows, float(begin.min())),
            {place[i]: window.begin for i, window in dying.items()},
            self._ffn_from,
        )
        done = run_step(given, spans=self._step < self._traced_steps)
        if np.isinf(done.end).any():
            self._stopped = True
            return
        end = done.end + rest_times(self._sources, mine)
        for i, window in dying.items():
            if not end[place[i]] <= window.begin:
                end[place[i]] = np.nan
                self._die(window)
        self._ffn_from = max(self._ffn_from, done.ffn_end)
        alive = np.isfinite(end)
        if self._measured(begin).any():
            self._tally.add(self._step, who.tolist(), given, done, end, mine.tokens)
            # First tokens have no predecessor. For others, the previous step ended at ``begin``.
            self._tally.gaps((end - begin)[alive], (mine.tokens - mine.firsts)[alive])
        everywhere = np.full(start.size, np.nan)
        everywhere[who] = end
        for request in self._batches.end_step(self._step, everywhere):
            self._send(float(self._batches.finish[request]))
        self._ready[who[alive]] = end[alive]

    def _measured(self, moments: Array) -> NDArray[np.bool_]:
        """Returns which moments the result covers."""
        until = self._load.measure_until_s
        return (moments >= self._load.measure_from_s) & (moments < (until or np.inf))

    def _first_deaths(self, instances: set[int]) -> dict[int, Window]:
        """Returns the next death of each of these instances that has one."""
        return {w.instance: w for w in reversed(self._deaths) if w.instance in instances}

    def _result(self, seed: int) -> Result:
        batches, output = self._batches, self._workload.output
        gaps = np.array(batches.replay_gaps)
        self._tally.gaps(gaps, np.ones(gaps.size))
        finished = np.isfinite(batches.finish)
        measured = self._measured(self._sent)
        longer = measured & finished & (output > 1)
        begun = measured & np.isfinite(batches.first)
        since = self._load.measure_from_s or float(np.nanmin(self._sent))
        known = np.concatenate([batches.first, batches.finish, [since]])
        until = self._load.measure_until_s or float(np.nanmax(known))
        served = np.where(batches.refused, np.nan, self._sent)
        admitted = measured & np.isfinite(batches.admitted)
        return self._tally.result(
            self._spec,
            seed,
            latencies=Latencies(
                (batches.finish - batches.first)[longer] / (output[longer] - 1),
                (batches.first - self._sent)[begun],
                (batches.finish - self._sent)[measured & finished],
                (batches.first - batches.seen)[begun],
                (batches.admitted - self._sent)[admitted],
                waiting=level(served, batches.admitted, since, until),
                running=level(batches.admitted, batches.finish, since, until),
            ),
            requests=RequestCounts(
                total=finished.size,
                finished=int(finished.sum()),
                unfinished=int((~finished & ~batches.refused).sum()),
                refused=int(batches.refused.sum()),
                replays=int(batches.replays.sum()),
                preemptions=int(batches.preemptions.sum()),
            ),
            failures=self._impacts(),
        )

    def _impacts(self) -> list[FailureImpact]:
        tally, detect_s = self._tally, self._spec.detect_s
        return [
            *(w.impact("ffn", tally, stalls_until=w.end) for w in self._ffn_windows),
            *(
                w.impact(
                    "attention",
                    tally,
                    stalls_until=w.begin + detect_s,
                    replayed=count,
                    tokens=tokens,
                )
                for w, count, tokens in self._died
            ),
        ]
