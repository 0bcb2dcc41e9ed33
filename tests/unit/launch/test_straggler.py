"""`afd ctl why-slow`: the member and the cause, for faults in made-up measurements with noise."""

import random
from dataclasses import replace

import pytest

from afd_launch.member_pages import Mean, Page, Work, parsed, works
from afd_launch.straggler import Cause, find
from afd_launch.top import explain, table

CAUSES: tuple[Cause, ...] = ("processor", "accelerator", "wire", "imbalance")


def healthy(draw: random.Random, attention: int, ffn: int) -> list[Work]:
    """Members that differ by up to 8 percent in everything."""

    def near(value: float) -> float:
        return value * draw.uniform(0.92, 1.08)

    def one(role: str, index: int, stage_s: float, peers: list[str]) -> Work:
        wire = {peer: Mean(500, 500 * near(0.0003)) for peer in peers}
        return Work(
            f"{role}-{index}", role, stage=Mean(500, 500 * near(stage_s)), wire=wire,
            load=near(40.0), waited=(waited := draw.uniform(0.0, 0.05)), queued=waited * stage_s,
        )  # fmt: skip

    names = [f"attention-{i}" for i in range(attention)], [f"ffn-{j}" for j in range(ffn)]
    return [
        *(one("attention", i, 0.002, names[1]) for i in range(attention)),
        *(one("ffn", j, 0.003, names[0]) for j in range(ffn)),
    ]


def slowed(draw: random.Random, all_works: list[Work], cause: Cause) -> tuple[list[Work], str]:
    """Gives one member a fault; returns the members and the name of the one to blame."""
    number = draw.randrange(len(all_works))
    work = all_works[number]
    factor = draw.uniform(1.6, 4.0)
    stage = Mean(work.stage.count, work.stage.total * factor)
    if cause == "processor":
        # Without a core, messages are also read late.
        wire = {p: Mean(m.count, m.total * factor) for p, m in work.wire.items()}
        queued = (stage.seconds - all_works[number].stage.seconds) * draw.uniform(0.8, 2.0)
        work = replace(work, stage=stage, wire=wire, waited=draw.uniform(0.3, 0.8), queued=queued)
    elif cause == "accelerator":
        work = replace(work, stage=stage)
    elif cause == "imbalance":
        work = replace(work, stage=stage, load=work.load * factor * draw.uniform(0.9, 1.1))
    else:
        peer = draw.choice(sorted(work.wire))
        late = Mean(500, 500 * draw.uniform(0.002, 0.02))
        work = replace(work, wire={**work.wire, peer: late})
    return [*all_works[:number], work, *all_works[number + 1 :]], work.member


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("seed", range(20))
def test_it_names_the_member_and_the_cause(cause: Cause, seed: int) -> None:
    draw = random.Random(f"{cause}{seed}")
    members = healthy(draw, draw.randint(2, 6), draw.randint(2, 6))
    members, blamed = slowed(draw, members, cause)
    found = find(members)
    assert found is not None
    assert (found.member, found.cause) == (blamed, cause), str(found)
    assert found.remedy in explain(members) and blamed in explain(members)


@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("seed", range(20))
def test_a_host_without_a_free_core_hides_no_cause(cause: Cause, seed: int) -> None:
    """Every thread waits for a core, about as long as it runs; only one member has a fault."""
    draw = random.Random(f"busy{cause}{seed}")
    members, blamed = slowed(draw, healthy(draw, 2, 2), cause)
    busy = [
        replace(w, waited=0.5, queued=w.queued + 0.0025 * draw.uniform(0.9, 1.1)) for w in members
    ]
    found = find(busy)
    assert found is not None and (found.member, found.cause) == (blamed, cause), str(found)


def test_more_rows_on_a_busy_host_are_no_lack_of_cores() -> None:
    """Twice the rows take twice the time and wait twice as long for a core, as all do there."""
    members = [
        Work(f"ffn-{j}", "ffn", stage=Mean(100, 100 * s), load=rows, waited=0.5, queued=s)
        for j, s, rows in ((0, 0.004, 64.0), (1, 0.002, 32.0), (2, 0.002, 31.0))
    ]
    found = find(members)
    assert found is not None and (found.member, found.cause) == ("ffn-0", "imbalance")
    starved = [replace(members[0], stage=Mean(100, 2.0), queued=0.02), *members[1:]]
    found = find(starved)
    assert found is not None and (found.member, found.cause) == ("ffn-0", "processor")


def test_a_sender_whose_messages_are_late_everywhere_is_named() -> None:
    members = healthy(random.Random(3), 2, 2)
    slow = [
        replace(w, wire={**w.wire, "ffn-1": Mean(500, 500 * 0.02)}) if w.role == "attention" else w
        for w in members
    ]
    found = find(slow)
    assert found is not None and (found.member, found.cause) == ("ffn-1", "wire")
    assert "at every peer" in str(found)


def test_one_late_link_blames_its_receiver() -> None:
    """The sender's other messages are late too, but by far less."""
    members = healthy(random.Random(3), 2, 2)
    late = {"attention-0": 0.02, "attention-1": 0.001}
    slow = [
        replace(w, wire={**w.wire, "ffn-1": Mean(500, 500 * late[w.member])})
        if w.member in late
        else w
        for w in members
    ]
    found = find(slow)
    assert found is not None and (found.member, found.cause) == ("attention-0", "wire")


def test_a_wait_for_a_core_outside_the_stage_is_found() -> None:
    """The thread of an attention instance also runs vLLM's scheduler, which no stage contains."""
    members = healthy(random.Random(4), 2, 2)
    slow = [replace(members[0], waited=0.8, queued=0.015), *members[1:]]
    found = find(slow)
    assert found is not None and (found.member, found.cause) == ("attention-0", "processor")
    assert "80% of its time" in str(found)


@pytest.mark.parametrize("seed", range(20))
def test_healthy_members_do_not_stand_out(seed: int) -> None:
    members = healthy(random.Random(seed), 3, 3)
    assert find(members) is None
    text = explain(members)
    assert text.startswith("no member stands out") and "ffn: " in text


def test_a_member_that_gets_all_rows_is_an_imbalance() -> None:
    busy, idle = (
        Work(f"ffn-{j}", "ffn", stage=Mean(100, 100 * s), load=load)
        for j, s, load in ((0, 0.004, 64.0), (1, 0.001, 0.0))
    )
    found = find([busy, idle])
    assert found is not None and (found.member, found.cause) == ("ffn-0", "imbalance")
    assert "it computes all rows of experts" in str(found)


def test_a_member_alone_is_compared_with_nobody() -> None:
    assert find(healthy(random.Random(0), 1, 1)) is None


PAGE = """\
# TYPE afd_stage_seconds histogram
afd_stage_seconds_sum{{stage="ffn"}} {seconds}
afd_stage_seconds_count{{stage="ffn"}} {count}
afd_stage_seconds_sum{{stage="a2f"}} 9.0
afd_wire_seconds_sum{{path="inbound",peer="attention-0"}} 1.5
afd_wire_seconds_count{{path="inbound",peer="attention-0"}} 3
afd_step_thread_seconds_total{{state="running"}} {ran}
afd_step_thread_seconds_total{{state="waiting"}} 1.0
afd_expert_rows_total{{layer="1",expert="0"}} {rows}
afd_expert_rows_total{{layer="1",expert="1"}} 10
afd_bubble_seconds_total{{side="ffn"}} 1.0
"""


def page(moment: float, **values: float) -> Page:
    lines = PAGE.format(**values).splitlines()
    return Page("ffn-0", "ffn", "b", "ready", moment, parsed(lines))


def test_pages_become_work() -> None:
    before = {"ffn-0": page(0.0, seconds=1.0, count=10, ran=1.0, rows=0)}
    after = {"ffn-0": page(2.0, seconds=3.0, count=20, ran=4.0, rows=500)}
    (work,) = works(before, after)
    assert work.stage.seconds == pytest.approx(0.2)
    assert work.load == 50 and work.waited == 0 and work.host == "b"
    assert work.wire["attention-0"].count == 0
    (since_start,) = works({}, after)
    assert since_start.stage.count == 0, "without an earlier page nothing is known to have moved"


def test_a_restarted_member_counts_from_its_start() -> None:
    before = {"ffn-0": page(0.0, seconds=9.0, count=90, ran=9.0, rows=900)}
    after = {"ffn-0": page(2.0, seconds=3.0, count=20, ran=4.0, rows=500)}
    (work,) = works(before, after)
    assert work.stage.count == 20 and work.wire["attention-0"].seconds == pytest.approx(0.5)


def test_the_view_has_a_line_per_member() -> None:
    members, blamed = slowed(random.Random(1), healthy(random.Random(1), 2, 2), "accelerator")
    made = table(members, [*(w.member for w in members), "ffn-9"])
    assert made.row_count == 5 and blamed in str(made.caption)
    assert table([], ["ffn-0"]).row_count == 1
