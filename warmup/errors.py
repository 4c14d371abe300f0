"""The errors of warming up. The server shows their message without a traceback, so each says what was found and what
to do."""

from __future__ import annotations


class WarmupError(Exception):
    """The start cannot go on: a program failed, by name."""


class DonationLost(WarmupError):
    """A program does not write its donated argument in place, so every call would allocate that argument once more."""


class DoesNotFit(WarmupError):
    """Weights, KV pages, prefixes, temporaries and code are more than the memory budget."""


class CompiledWhileServing(RuntimeError):
    """Raised in the calling thread, before the compile, when the guard is strict and the server is ready."""
