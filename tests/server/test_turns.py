"""Turn-taking between prefill and decode, and the channel between threads."""

import threading

from server.orchestrator.bounded_queue import BoundedQueue
from server.orchestrator.turns import Turns


def started(target) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def test_chunks_follow_each_other_while_nothing_decodes():
    turns = Turns()
    for _ in range(5):
        assert turns.take()
        turns.dispatched()


def step(turns: Turns) -> None:
    turns.stepping()
    turns.stepped()


def take_in_thread(turns: Turns) -> tuple[threading.Thread, threading.Event]:
    taken = threading.Event()
    return started(lambda: turns.take() and taken.set()), taken


def test_one_chunk_between_two_steps():
    turns = Turns()
    step(turns)
    assert turns.take()
    turns.dispatched()
    thread, taken = take_in_thread(turns)
    assert not taken.is_set()
    step(turns)
    assert taken.wait(10)
    thread.join(10)


def test_a_chunk_that_overlaps_a_step_uses_up_the_turn_after_it():
    turns = Turns()
    step(turns)
    turns.take()
    turns.stepping()
    turns.dispatched()
    turns.stepped()
    thread, taken = take_in_thread(turns)
    assert not taken.is_set()
    step(turns)
    assert taken.wait(10)
    thread.join(10)


def test_no_chunk_begins_while_a_step_is_dispatched():
    turns = Turns()
    step(turns)
    turns.stepping()
    thread, taken = take_in_thread(turns)
    assert not taken.is_set()
    turns.stepped()
    assert taken.wait(10)
    thread.join(10)


def test_one_chunk_before_the_first_step_of_a_sequence_that_is_expected():
    turns = Turns()
    turns.take()
    turns.dispatched()
    turns.expect()
    thread, taken = take_in_thread(turns)
    assert not taken.is_set()
    turns.idle()
    assert taken.wait(10)
    thread.join(10)


def test_idle_and_stop_let_the_prefill_thread_go():
    turns = Turns()
    step(turns)
    turns.take()
    turns.dispatched()
    answers = []
    thread = started(lambda: answers.append(turns.take()))
    turns.idle()
    thread.join(10)
    turns.dispatched()
    step(turns)
    turns.take()
    turns.dispatched()
    thread = started(lambda: answers.append(turns.take()))
    turns.stop()
    thread.join(10)
    assert answers == [True, False]


def test_channel_keeps_order_and_its_bound():
    channel = BoundedQueue(2)
    assert channel.put(1) and channel.put(2)
    passed = threading.Event()
    thread = started(lambda: channel.put(4) and passed.set())
    assert channel.put(3, force=True)
    assert not passed.is_set()
    assert [channel.get(), channel.get(), channel.get()] == [1, 2, 3]
    assert passed.wait(10)
    thread.join(10)
    assert channel.get() == 4


def test_a_closed_channel_gives_what_it_has_and_takes_nothing():
    channel = BoundedQueue(1)
    channel.put(1)
    answers = []
    thread = started(lambda: answers.append(channel.put(2)))
    channel.close()
    thread.join(10)
    assert answers == [False]
    assert channel.put(3) is False
    assert (channel.get(), channel.get()) == (1, None)
