"""Block types of GGUF that are unpacked here: one module for each, or for several that are alike.

A type is a `BlockType` at the top of a module of this package; it is found here, so that nothing else has to list it.
``engine/checkpoints/dequantize.py`` takes those types that have none to the ``gguf`` package, which knows them all and
makes several passes over memory: a module is for a type that is worth being faster. Layouts are ggml's
(``ggml-common.h``), where ``d`` and ``m`` are float16, and ``q`` in 4 bits is 16 bytes of low nibbles first, then high ones.
"""

from __future__ import annotations

from engine.checkpoints.gguf_blocks.base import BlockType
from engine.discovery import declared, unique

__all__ = ["BLOCK_TYPES", "BlockType"]

BLOCK_TYPES = {block.type: block for block in unique(declared(__name__, BlockType), "type")}
