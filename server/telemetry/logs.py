"""How log lines look: text for people, or one JSON object per line. Both go to standard error."""

from __future__ import annotations

import json
import logging
import sys
from typing import Literal

# What every record has; anything else was passed as `extra` and is logged as a field of its own.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """``{"time": ..., "level": ..., "logger": ..., "message": ...}`` and the record's extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure_logging(layout: Literal["text", "json"]) -> None:
    """Sets up the root logger of this process; called once, by a command."""
    handler = logging.StreamHandler(sys.stderr)
    if layout == "json":
        handler.setFormatter(JsonFormatter())
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for noisy in ("jax", "httpx", "huggingface_hub", "asyncio", "uvicorn"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
