"""Continuous batching on all attention instances: which requests run, and their progress.

Every instance with work takes part in every step, so a decoding request produces one token per step
and the step of its last token is known from that of its first one. The cost of simulating a step is
therefore proportional to the requests that start or finish in it, not to those that run.

The rules are those of vLLM's scheduler (vllm/v1/core/sched/scheduler.py, first come first served),
counted in tokens instead of blocks:

- An instance admits a request if the batch has a free place and the KV cache has room for its
  prompt and the tokens that it has produced.
- If the KV cache has no room for the next token of every request, the one admitted last is
  preempted: it gives back its cache, returns to the head of the queue and is computed again. No
  request is admitted in that step.
- Prompts are processed in order, in chunks that fit into the step besides the decode rows. The step
  that completes a prompt produces its first token.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from afd_planner.cost.interpolate import Array
from afd_planner.simulate.spec import Requests
from afd_planner.simulate.workload import Counts, Workload


@dataclass(frozen=True)
class Work:
    """Work of one step per attention instance, arrays [x].

    Attributes:
        decode: Decode rows.
        context: Mean context of the decode rows, tokens.
        prefill: Prompt rows.
        prefill_context: Mean tokens that a prompt row attends to.
        tokens: Tokens that the step produces.
        firsts: How many of them are the first token of their request.
    """

    decode: Counts
    context: Array
    prefill: Counts
    prefill_context: Array
    tokens: Counts
    firsts: Counts

    def of(self, instances: NDArray[np.intp]) -> Work:
        """Returns the work of ``instances`` only, in their order."""
        return Work(*(values[instances] for values in vars(self).values()))


class Batches:
    """State of all requests. Instances are numbered 0 to x - 1, requests as in the workload.

    Arrays over requests:
        ready_at: Seconds; arrival, or moment from which the request may be replayed.
        seen: Begin of the first step after it was ready, seconds; NaN until then. The scheduler
            looks at new requests between steps.
        admitted: Seconds at which it first entered a batch; NaN until then.
        first, finish: Seconds of the first and last token; NaN until then.
        tokens: Tokens produced before its instance last died.
        replays: How often it was replayed after its instance died.
        preemptions: How often it was preempted.
        refused: Whether it can never fit into the KV cache.
    Arrays over instances:
        outstanding: Requests assigned and not finished.
        running: Decoding requests.
    replay_gaps: Seconds that replayed and preempted requests waited for their next token, in any
        order.
    """

    def __init__(self, given: Requests, workload: Workload, instances: int) -> None:
        count = workload.arrival.size
        self._given = given
        self._prompt, self._output = workload.prompt, workload.output
        self.ready_at = workload.arrival.copy()
        self.first = np.full(count, np.nan)
        self.finish = np.full(count, np.nan)
        self.tokens = np.zeros(count, dtype=np.int64)
        self.replays = np.zeros(count, dtype=np.int64)
        self.preemptions = np.zeros(count, dtype=np.int64)
        self.seen = np.full(count, np.nan)
        self.admitted = np.full(count, np.nan)
        self.replay_gaps: list[float] = []
        self.refused = np.zeros(count, dtype=bool)
        self.outstanding = np.zeros(instances, dtype=np.int64)
        self.running = np.zeros(instances, dtype=np.int64)
        self._instance = np.full(count, -1)
        self._prompt_done = np.zeros(count, dtype=np.int64)
        self._first_step = np.full(count, -1)
        self._lost_at = np.full(count, np.nan)
        self._cached = np.zeros(instances, dtype=np.int64)  # context in the next step, decoding
        self._reserved = np.zeros(instances, dtype=np.int64)  # KV cache of unfinished prompts
        self._decoding: list[dict[int, None]] = [{} for _ in range(instances)]  # as admitted
        self._waiting: list[deque[int]] = [deque() for _ in range(instances)]
        self._unseen: list[deque[int]] = [deque() for _ in range(instances)]
        self._prefilling: list[deque[int]] = [deque() for _ in range(instances)]
        self._firsts: list[int] = []
        self._lasts: dict[int, list[int]] = defaultdict(list)

    def assign(self, requests: Sequence[int], alive: NDArray[np.bool_]) -> int:
        """Assigns each request to the live instance with the fewest requests, like the gateway.

        Requests that exceed the KV cache of an instance are refused. Returns how many.
        """
        refused = 0
        heap = [(int(self.outstanding[i]), int(i)) for i in np.flatnonzero(alive)]
        heapq.heapify(heap)
        for request in requests:
            if self._size(request) > self._kv_tokens:
                self.refused[request] = True
                refused += 1
                continue
            load, i = heap[0]
            heapq.heapreplace(heap, (load + 1, i))
            self.outstanding[i] += 1
            self._instance[request] = i
            self._waiting[i].append(request)
            self._unseen[i].append(request)
        return refused

    def may_start(self, ready: Array) -> Array:
        """Returns the moment at which each instance can start a step, [x] seconds.

        That is ``ready`` if the instance has started requests, later if its first request has not
        arrived yet, and inf if it has none.
        """
        start = np.where(self.outstanding > 0, ready, np.inf)
        for i in np.flatnonzero((self.outstanding > 0) & (self.running == 0)):
            if not self._prefilling[i]:
                start[i] = max(start[i], float(self.ready_at[self._waiting[i][0]]))
        return start

    def begin_step(self, step: int, start: Array) -> Work:
        """Admits arrived requests and returns the work of a step.

        ``start``: [x] seconds; inf if the instance does not take part.
        """
        taking_part = np.isfinite(start)
        prefill = np.zeros_like(self.running)
        attended = np.zeros(prefill.size)
        firsts = np.zeros_like(self.running)
        self._firsts = []
        short = self._cached + self._reserved > self._kv_tokens
        for i in np.flatnonzero(taking_part & short):
            self._preempt(int(i), step, float(start[i]))
        for i in np.flatnonzero(taking_part & (self.outstanding > self.running)):
            self._look(int(i), float(start[i]))
            if not short[i]:
                self._admit(int(i), float(start[i]))
            prefill[i], attended[i], firsts[i] = self._prefill(int(i))
            for _ in range(int(firsts[i])):
                self._make_first(self._prefilling[i].popleft(), step)
        if self._given.prefill == "elsewhere":  # the first token is an ordinary decode step
            for request in self._firsts:
                self._decode(request)
        decode = np.where(taking_part, self.running, 0)
        context = self._cached / np.maximum(self.running, 1)
        made = decode + firsts if self._given.prefill == "here" else decode
        prefill_context = attended / np.maximum(prefill, 1)
        return Work(decode, context, prefill, prefill_context, made, firsts)

    def end_step(self, step: int, end: Array) -> list[int]:
        """Records the tokens of a step and returns the requests that finished.

        Call :meth:`die` first for instances that died in the step.

        Args:
            end: [x] seconds; NaN if the instance made no tokens.
        """
        finished = []
        self._cached += np.where(np.isfinite(end), self.running, 0)
        for request in self._firsts:
            i = self._instance[request]
            if i < 0:
                continue  # its instance died in this step
            if np.isnan(self.first[request]):
                self.first[request] = end[i]
            else:
                self.replay_gaps.append(float(end[i] - self._lost_at[request]))
            if self._given.prefill == "here":
                self._decode(request)
                self._cached[i] += 1
        for request in self._lasts.pop(step, ()):
            i = self._instance[request]
            if i < 0 or self._first_step[request] < 0 or self._last_step(request) != step:
                continue  # it was replayed since
            self.finish[request] = end[i]
            self.running[i] -= 1
            self.outstanding[i] -= 1
            self._cached[i] -= self._size(request)
            del self._decoding[i][request]
            self._instance[request] = -1
            finished.append(request)
        return finished

    def die(self, instance: int, step: int, now: float) -> list[int]:
        """Removes an instance that died at ``now`` and returns its requests.

        The instance has not produced the tokens of ``step``. Its requests must be replayed with
        their prompt and the tokens produced so far.
        """
        lost = [int(r) for r in np.flatnonzero(self._instance == instance)]
        for request in lost:
            self._forget(request, step, now)
            self._instance[request] = -1
            self.replays[request] += 1
        self._waiting[instance].clear()
        self._unseen[instance].clear()
        self._prefilling[instance].clear()
        self._decoding[instance].clear()
        for per_instance in (self.outstanding, self.running, self._cached, self._reserved):
            per_instance[instance] = 0
        return lost

    def _look(self, i: int, start: float) -> None:
        """Notes the first step that begins with a request in the scheduler of instance ``i``."""
        unseen = self._unseen[i]
        while unseen and self.ready_at[unseen[0]] <= start:
            request = unseen.popleft()
            if np.isnan(self.seen[request]):
                self.seen[request] = start

    def _admit(self, i: int, start: float) -> None:
        waiting, queue = self._waiting[i], self._prefilling[i]
        free = self._kv_tokens - self._cached[i] - self._reserved[i]
        while waiting and self.ready_at[waiting[0]] <= start:
            request = waiting[0]
            size = self._known(request)
            in_batch = int(self.running[i]) + len(queue)
            if in_batch >= self._given.max_batch or size > free:
                return
            free -= size
            self._reserved[i] += size
            queue.append(waiting.popleft())
            if np.isnan(self.admitted[request]):
                self.admitted[request] = start

    def _prefill(self, i: int) -> tuple[int, float, int]:
        """Processes prompts in one step of instance ``i``.

        Returns the rows, the sum of the tokens that they attend to, and how many prompts are done.
        """
        budget = self._given.max_tokens - int(self.running[i])
        rows, attended, firsts = 0, 0.0, 0
        for request in self._prefilling[i]:
            if self._given.prefill == "here":
                done, whole = int(self._prompt_done[request]), self._known(request)
                chunk = min(budget, whole - done)
                self._prompt_done[request] += chunk
                budget -= chunk
                rows += chunk
                attended += chunk * (done + (chunk + 1) / 2)
                if done + chunk < whole:
                    break
            self._firsts.append(request)
            firsts += 1
        return rows, attended, firsts

    def _preempt(self, i: int, step: int, now: float) -> None:
        """Preempts the requests admitted last until the rest of instance ``i`` has room."""
        while self._cached[i] + self._reserved[i] > self._kv_tokens:
            if self._prefilling[i]:
                request = self._prefilling[i].pop()
                self._reserved[i] -= self._known(request)
            else:
                request, _ = self._decoding[i].popitem()
                self.running[i] -= 1
                self._cached[i] -= self._known(request) + step - int(self._first_step[request])
            self._forget(request, step, now)
            self.preemptions[request] += 1
            self._waiting[i].appendleft(request)

    def _forget(self, request: int, step: int, now: float) -> None:
        """Notes that a request has lost its KV cache before ``step``, whose token it lacks."""
        if self._first_step[request] >= 0:
            self.tokens[request] += max(0, step - int(self._first_step[request]))
        self._first_step[request] = -1
        self._lost_at[request] = now
        self._prompt_done[request] = 0

    def _make_first(self, request: int, step: int) -> None:
        self._first_step[request] = step
        self._lasts[self._last_step(request)].append(request)

    def _decode(self, request: int) -> None:
        i = self._instance[request]
        self.running[i] += 1
        self._decoding[i][request] = None
        self._cached[i] += self._known(request)
        self._reserved[i] -= self._known(request)

    def _last_step(self, request: int) -> int:
        left = int(self._output[request] - self.tokens[request])
        return int(self._first_step[request]) + left - 1

    def _known(self, request: int) -> int:
        """Tokens of the prompt and those produced before its KV cache was lost."""
        return int(self._prompt[request] + self.tokens[request])

    def _size(self, request: int) -> int:
        return int(self._prompt[request] + self._output[request])

    @property
    def _kv_tokens(self) -> float:
        return self._given.kv_tokens or np.inf
