"""``preheat cache``: what the warmup cache holds.
"""

from __future__ import annotations

import sys
import time

from server.config.commands import ServeConfig
from server.errors import StartError
from server.start.warm_engine import (
    readable_errors,
)
from warmup import cache as warmup_cache
from warmup.plan import format_bytes
from warmup.report import format_table


def cache(config: ServeConfig, action: str) -> int:
    """Lists what the warmup cache holds, or removes what was used longest ago."""
    if config.warmup_cache is None:
        raise StartError("--warmup-cache off: there is no cache")
    root = config.warmup_cache
    with readable_errors():
        removed = warmup_cache.prune(root, warmup_cache.DEFAULT_LIMIT) if action == "prune" else []
        items = warmup_cache.list_cache(root)
    rows = [("folder", "for", "programs", "size", "last used")]
    for item in items:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.used))
        rows.append((item.path.name, item.label, str(item.programs), format_bytes(item.size), used))
    print(format_table(rows))
    if action == "prune":
        freed = format_bytes(sum(item.size for item in removed))
        print(f"removed {len(removed)} folders, {freed}; kept at most {format_bytes(warmup_cache.DEFAULT_LIMIT)}", file=sys.stderr)
    return 0
