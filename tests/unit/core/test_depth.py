"""The depth chosen from measured step times: the choice, the trials, and stability."""

import itertools

import pytest
from control_support import Deployment
from hypothesis import given
from hypothesis import strategies as st

from afd.control import messages as m
from afd.control.depths import FIRST_PAUSE_S, LONGEST_PAUSE_S, DepthPolicy, DepthTuner
from afd.control.messages import BucketSteps, Work
from afd.depth import (
    AUTO,
    GAIN,
    ROWS_PER_EXPERT,
    bucket_of,
    choose,
    depth_of,
    prompt_depth,
    worth_trying,
)
from afd.metrics.decode_steps import DecodeSteps, Timed

seconds = st.floats(1e-4, 10.0)
tables = st.dictionaries(st.integers(1, 3), seconds, min_size=1)
targets = st.none() | seconds


@given(st.integers(1, 2**20), st.integers(1, 512), st.integers(1, 16), st.integers(1, 3))
def test_prompts_are_split_only_if_experts_keep_enough_rows(rows, experts, top_k, most):
    depth = prompt_depth(rows, experts, top_k, most)
    assert 1 <= depth <= most
    assert depth == 1 or rows / depth * top_k / experts >= ROWS_PER_EXPERT
    assert depth == most or rows / (depth + 1) * top_k / experts < ROWS_PER_EXPERT


@given(st.data(), tables, targets)
def test_the_choice_is_never_slower_and_misses_the_target_only_if_all_do(data, step_s, target):
    current = data.draw(st.sampled_from(sorted(step_s)))
    found = choose(current, step_s, target)
    best = min(step_s.values())
    assert step_s[found.depth] <= step_s[current]
    assert step_s[found.depth] * (1 - GAIN) <= best
    if target is not None and best <= target:
        assert step_s[found.depth] <= target
    # With the same times, the choice never returns to a greater depth.
    again = choose(found.depth, step_s, target).depth
    assert again <= found.depth and step_s[again] <= step_s[found.depth]


@given(tables, targets, st.lists(st.floats(0.995, 1.005), min_size=12, max_size=12))
def test_noise_below_the_gain_does_not_make_the_depth_flap(step_s, target, noise):
    """With 1 % noise per round, the depth increases at most once."""
    if target is not None and any(abs(s / target - 1) < 0.03 for s in step_s.values()):
        target = None  # close to the target, noise may change the choice
    depth, path = min(step_s), []
    for factors in zip(*[iter(noise)] * 3, strict=True):
        noisy = {d: s * factors[d - 1] for d, s in step_s.items()}
        depth = choose(depth, noisy, target).depth
        path.append(depth)
    deeper = sum(b > a for a, b in itertools.pairwise([min(step_s), *path]))
    assert deeper <= 1, path


def test_choice_says_why():
    assert choose(3, {1: 0.010, 3: 0.012}, None).reason == "steps are 17% shorter"
    assert choose(3, {2: 0.0495, 3: 0.0505}, 0.05) == choose(3, {2: 0.0495, 3: 0.0505}, 0.05)
    assert choose(2, {2: 0.0505, 3: 0.0495}, 0.05).depth == 3  # 2 % is enough to meet the target
    assert choose(2, {2: 0.0505, 3: 0.0495}, None).depth == 2
    assert choose(3, {2: 0.05, 3: 0.05}, None).reason == "as short with fewer micro-batches"
    assert choose(1, {1: 0.05}, None).reason == "no other depth is 3% shorter"


@pytest.mark.parametrize(
    "current,other,waited,worth",
    [
        (2, 3, [0.4, 0.1], True),
        (2, 3, [0.4, 0.02], False),  # one side is already busy all the time
        (2, 3, [], True),  # nothing was timed
        (3, 2, [0.0], True),
    ],
)
def test_a_deeper_split_is_tried_where_both_sides_wait(current, other, waited, worth):
    assert worth_trying(current, other, waited) is worth


def test_buckets():
    assert [bucket_of(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
    assert [depth_of([(8, 1), (64, 2)], n, 3) for n in (5, 33, 4, 65)] == [1, 2, 3, 3]


def test_steps_are_timed_from_their_start_to_the_next_start():
    steps = DecodeSteps()
    steps.begin(100, 3, 0.0, decode=False)  # prefill steps are not timed
    steps.begin(5, 2, 1.0, decode=True)
    steps.begin(5, 2, 1.5, decode=True)
    steps.begin(100, 3, 1.75, decode=False)
    steps.begin(5, 2, 4.0, decode=True)
    steps.pause()
    steps.begin(5, 2, 9.0, decode=True)
    assert steps.totals() == {(8, 2): Timed(2, 0.75)}


AUTO_DEPTH = DepthPolicy(auto=True)


class Served:
    """A deployment that always runs decode steps at the depth that the tuner chose.

    step_s: rows -> depth -> seconds of a step. It reports every 0.5 s, as heartbeats do.
    """

    def __init__(self, step_s, policy=AUTO_DEPTH, deepest=3, waits=0.5):
        self.step_s, self.deepest, self.waits = step_s, deepest, waits
        self.tuner = DepthTuner(policy)
        self.totals, self.busy, self.now = {}, 0.0, 1000.0
        self.at: list[int] = []

    def run(self, seconds, rows=64):
        end = self.now + seconds
        while self.now < end:
            depth = min(depth_of(self.tuner.depths, rows, 3), self.deepest)
            self.at.append(depth)
            step_s = self.step_s[rows][depth]
            steps, spent = self.totals.get((rows, depth), (0, 0.0))
            count = int(0.5 / step_s)
            self.totals[rows, depth] = steps + count, spent + count * step_s
            self.busy += 0.5
            self.now += 0.5
            work = Work(
                self.busy * (1 - self.waits),
                self.busy * self.waits,
                tuple(BucketSteps(r, d, *t) for (r, d), t in self.totals.items()),
            )
            self.tuner.note("attention-0", 7, work, self.now, 3)
        return depth_of(self.tuner.depths, rows, 3)


TIMES = {64: {1: 0.020, 2: 0.013, 3: 0.012}, 8: {1: 0.004, 2: 0.005, 3: 0.006}}


def test_every_bucket_converges_to_its_shortest_steps():
    served = Served(TIMES)
    assert served.run(10) == 3
    assert served.run(10, rows=8) == 1
    assert served.tuner.depths == ((8, 1), (64, 3))
    assert set(served.at[:16]) == {1, 2, 3}


def test_other_depths_are_tried_rarely_while_times_are_stable():
    served = Served(TIMES)
    served.run(3600)
    elsewhere = sum(depth != 3 for depth in served.at) / len(served.at)
    assert 0 < elsewhere < 0.02
    served.at.clear()
    served.run(2 * LONGEST_PAUSE_S)
    assert 0 < sum(depth != 3 for depth in served.at) <= 2 * 2 * 4


def test_steps_that_become_longer_are_measured_again():
    served = Served({64: dict(TIMES[64])})
    served.run(1200)
    served.step_s[64] = {1: 0.020, 2: 0.022, 3: 0.024}
    assert served.run(20) == 1


def test_missing_the_target_triggers_a_new_measurement():
    served = Served({64: {1: 0.020, 2: 0.020, 3: 0.020}}, DepthPolicy(True, 0.021))
    assert served.run(600) == 1  # depth 1 is equally fast
    served.step_s[64] = {1: 0.022, 2: 0.0215, 3: 0.0209}
    assert served.run(20) == 3


def test_a_deeper_split_is_not_tried_where_a_side_never_waits():
    served = Served({64: {1: 0.020, 2: 0.013, 3: 0.012}}, waits=0.01)
    served.tuner.adopt(((64, 1),), served.now)
    assert served.run(100) == 1
    assert set(served.at) == {1}


def test_a_depth_with_too_few_rows_is_skipped():
    served = Served(TIMES, deepest=2)
    assert served.run(20) == 2
    assert served.run(20) == 2


def test_a_bucket_without_steps_does_not_block_the_others():
    served = Served(TIMES)
    served.run(1.5)
    assert served.run(30, rows=8) == 1
    assert served.run(FIRST_PAUSE_S + 20) == 3


def test_the_control_plane_tells_all_members_and_the_operator_may_decide():
    deployment = Deployment(depth=AUTO_DEPTH)
    deployment.join(b"a", "attention", 0)
    deployment.join(b"f", "ffn", 0)
    totals: dict[int, int] = {}

    def run(reports):
        for _ in range(reports):
            members = deployment.registry.members
            depth = members.depth or depth_of(members.depths, 64, 3)
            totals[depth] = totals.get(depth, 0) + 10  # a step takes ``depth`` seconds
            work = Work(steps=tuple(BucketSteps(64, d, n, n * d) for d, n in totals.items()))
            deployment.say(b"a", m.Heartbeat("starting", members.version, work=work))
            deployment.clock.sleep(0.5)

    run(20)
    told = [x.depths for x in deployment.inbox[b"f"] if isinstance(x, m.Members)]
    told = [*itertools.chain.from_iterable(dict.fromkeys(told))]
    assert told == [(64, 3), (64, 1), (64, 2)]
    assert deployment.registry.members.depths == ((64, 1),)
    assert deployment.say(b"op", m.SetDepth(2)).depth == 2
    deployment.clock.sleep(2 * LONGEST_PAUSE_S)
    run(20)
    assert deployment.registry.members.depths == ((64, 1),)
    assert deployment.say(b"op", m.SetDepth(AUTO)).depth == AUTO
    run(4)
    assert deployment.registry.members.depths != ((64, 1),)  # depths are tried again
