"""How the detokenize thread and the event loop of the streams meet: without a real loop, turn by turn."""

from server.grpc import streams
from server.grpc.streams import StreamSink, Waker
from server.orchestrator.request import Delta


class Loop:
    """An event loop that turns when the test says so."""

    def __init__(self):
        self.calls = []
        self.calls_from_outside = 0

    def call_soon_threadsafe(self, function):
        self.calls_from_outside += 1
        self.calls.append(function)

    def call_soon(self, function):
        self.calls.append(function)

    def turn(self):
        calls, self.calls = self.calls, []
        for function in calls:
            function()


def token(sink: StreamSink) -> None:
    sink.delta(Delta(0, "a", (97,)))


def test_streams_are_woken_together():
    loop = Loop()
    waker = Waker(loop)
    sinks = [StreamSink(waker, 1) for _ in range(5)]
    for sink in [*sinks, *sinks]:
        token(sink)
    assert loop.calls_from_outside == 1
    assert not any(sink.changed.is_set() for sink in sinks)
    loop.turn()
    assert all(sink.changed.is_set() for sink in sinks)
    assert [sink.take()[1][0].tokens for sink in sinks] == [[97, 97]] * 5
    assert not any(sink.changed.is_set() for sink in sinks)
    token(sinks[3])
    assert loop.calls_from_outside == 2
    loop.turn()
    assert [sink.changed.is_set() for sink in sinks] == [False, False, False, True, False]


def test_a_loop_that_is_behind_is_waited_for(monkeypatch):
    """After so many tokens that a stream could not take; once, and not if the loop had its turn (a slow client)."""
    loop = Loop()
    waker = Waker(loop)
    waits = []
    monkeypatch.setattr(waker._turned, "wait", lambda seconds: bool(waits.append(seconds)) or True)
    behind, slow = StreamSink(waker, 1), StreamSink(waker, 1)
    for _ in range(streams.MERGED_TOKENS - 1):
        token(behind)
    assert waits == []
    for _ in range(10):
        token(behind)
    assert waits == [streams.TURN_SECONDS]
    loop.turn()
    loop.turn()
    behind.take()
    monkeypatch.undo()
    token(slow)
    loop.turn()
    loop.turn()  # the loop has nothing left to do, and the stream has not taken: its client does not read
    for _ in range(10):
        token(slow)  # would wait for long if it waited
    assert waker._turned.is_set()


def test_a_loop_that_hangs_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(streams, "TURN_SECONDS", 0.0)
    waker = Waker(Loop())
    sink = StreamSink(waker, 1)
    for _ in range(streams.MERGED_TOKENS):
        token(sink)
    assert waker._turned.is_set()  # given up until the next call into the loop
