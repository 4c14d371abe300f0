"""``preheat`` with an engine that is slow and can break, for tests of how a real process ends.

``TEST_STEP_SECONDS``: each decode step takes at least so long. ``TEST_EXHAUSTED``: a path; as soon as a file is
there, a decode step fails as XLA fails when the device's memory is used up.
"""

import os
import sys
import time
from pathlib import Path

import jax

from engine.jax_engine import JaxEngine
from server.commands.cli import main

STEP_SECONDS = float(os.environ.get("TEST_STEP_SECONDS", 0))
EXHAUSTED = Path(os.environ.get("TEST_EXHAUSTED", "/nowhere"))
generate = JaxEngine.generate


def slow_generate(self, rows):
    time.sleep(STEP_SECONDS)
    if EXHAUSTED.exists():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1 byte.")
    return generate(self, rows)


JaxEngine.generate = slow_generate

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
