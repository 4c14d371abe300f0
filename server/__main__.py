"""``python -m server serve``."""

import sys

from server.commands.cli import main

sys.exit(main())
