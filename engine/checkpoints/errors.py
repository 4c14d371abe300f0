"""The error of this package."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded. The message names the file and the tensor, what was found, and the remedy."""
