"""When an upstream is left out and taken back. Back-offs are worked out by hand: 1, 2, 4, ... at most 30 seconds."""

from __future__ import annotations

from server.proxy.ejection import Ejection


def failing(ejection, now):
    return [ejection.failed(now) for _ in range(3)]


def test_failures_in_a_row_eject():
    ejection = Ejection(after=3)
    assert [ejection.failed(0.0), ejection.failed(0.0)] == [False, False]
    ejection.answered(0.0)
    assert failing(ejection, 1.0) == [False, False, True]
    assert ejection.out(1.9) and not ejection.on_trial(1.9)
    assert not ejection.out(2.0) and ejection.on_trial(2.0)


def test_a_failed_trial_takes_twice_as_long_up_to_half_a_minute():
    ejection, now, waits = Ejection(after=3), 0.0, []
    failing(ejection, now)
    for _ in range(7):
        waits.append(ejection.until - now)
        now = ejection.until
        assert ejection.failed(now)  # a trial has one chance, not three
    assert waits == [1, 2, 4, 8, 16, 30, 30]
    assert ejection.count == 8


def test_an_answer_on_trial_admits():
    ejection = Ejection(after=1)
    ejection.failed(0.0)
    ejection.answered(1.0)
    assert not ejection.out(1.0) and not ejection.on_trial(1.0)


def test_calls_from_before_the_ejection_neither_admit_nor_count_again():
    ejection = Ejection(after=1)
    ejection.failed(0.0)
    ejection.answered(0.5)
    assert not ejection.failed(0.5)
    assert ejection.out(0.9) and ejection.count == 1


def test_who_fails_again_soon_waits_longer_and_after_a_minute_of_good_conduct_as_at_first():
    ejection = Ejection(after=1)
    ejection.failed(0.0)
    ejection.answered(1.0)
    ejection.failed(50.0)
    assert ejection.until == 52.0
    ejection.answered(60.0)
    ejection.failed(121.0)
    assert ejection.until == 122.0
