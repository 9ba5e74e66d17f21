"""``python -m aotkit_partition graph.json --strategy min-peak --report out.html``."""

from __future__ import annotations

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
