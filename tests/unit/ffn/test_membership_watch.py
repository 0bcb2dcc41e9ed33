"""Links are looked at after a change and, while a member cannot be reached, after each pause."""

import logging

import pytest

from ffn_worker.pool import membership
from ffn_worker.pool.membership import MembershipWatch


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(membership.time, "monotonic", lambda: now[0])
    return now


def test_a_change_is_news_once(clock: list[float]) -> None:
    watch = MembershipWatch()
    assert [watch.has_news(*seen) for seen in ((3, 1), (3, 1), (4, 1), (4, 2), (4, 2))] == [
        True, False, True, True, False,
    ]  # fmt: skip
    clock[0] += 3600
    assert not watch.has_news(4, 2)


def test_a_member_is_tried_again_and_each_reason_is_logged_once(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    watch = MembershipWatch()
    assert watch.has_news(1, 1)
    with caplog.at_level(logging.WARNING, logger="afd.ffn"):
        for reason in ("refused", "refused", "timed out"):
            watch.failed("attention-0", reason)
            assert not watch.has_news(1, 1), "the pause is not over"
            clock[0] += membership.RETRY_S
            assert watch.has_news(1, 1)
        watch.reached("attention-0")
        assert not watch.has_news(1, 1)
        watch.failed("attention-0", "timed out")
    said = [record.getMessage() for record in caplog.records]
    assert [text.split("; ")[0] for text in said] == [
        "cannot reach attention-0: refused",
        "cannot reach attention-0: timed out",
        "cannot reach attention-0: timed out",
    ]
