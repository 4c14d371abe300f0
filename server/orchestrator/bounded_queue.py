"""A bounded queue between two threads that can be closed from either side."""

from __future__ import annotations

import collections
import threading
from typing import Generic, TypeVar

T = TypeVar("T")


class BoundedQueue(Generic[T]):
    """``put`` waits while ``capacity`` items are inside. Items that must never wait (the last word about a request, of
    which there are no more than requests) go in with ``force``."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._items: collections.deque[T] = collections.deque()
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._filled = threading.Condition(self._lock)
        self._closed = False

    def put(self, item: T, *, force: bool = False) -> bool:
        """False: the channel is closed and the item went nowhere."""
        with self._lock:
            while not force and not self._closed and len(self._items) >= self._capacity:
                self._room.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._filled.notify()
            return True

    def get(self) -> T | None:
        """The next item; `None` once the channel is closed and empty."""
        with self._lock:
            while not self._items and not self._closed:
                self._filled.wait()
            if not self._items:
                return None
            self._room.notify()
            return self._items.popleft()

    def close(self) -> None:
        """Nothing goes in any more; what is inside can still be taken out."""
        with self._lock:
            self._closed = True
            self._room.notify_all()
            self._filled.notify_all()
