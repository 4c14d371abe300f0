"""Kinds of programs: one module for each, or for several that belong together.

A kind is a `Kind` at the top of a module of this package; it is found here, so that nothing else has to list it. It tells its
rows of the table of programs (``engine/table.py``) and how one of them is run once; ``kind.py`` says what a kind is,
``builder.py`` is what rows are described with. What a kind runs is in ``engine/functions.py``, or in its own module where
nobody else runs it.
"""

from __future__ import annotations

from engine.discovery import declared, unique
from engine.kinds.kind import Kind

__all__ = ["KINDS", "Kind"]

_FOUND = unique(declared(__name__, Kind), "name", "order")
KINDS = {kind.name: kind for kind in sorted(_FOUND, key=lambda kind: kind.order)}
