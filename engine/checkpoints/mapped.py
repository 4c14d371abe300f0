"""Memory-mapped files."""

from __future__ import annotations

import mmap


def release_pages(data: mmap.mmap, begin: int, end: int) -> None:
    """Unmaps the pages of a file that hold these bytes. They stay in the page cache, and are mapped again when touched;
    mapped, they count as the process's resident memory."""
    if hasattr(mmap, "MADV_DONTNEED") and end > begin:
        begin -= begin % mmap.PAGESIZE
        data.madvise(mmap.MADV_DONTNEED, begin, end - begin)
