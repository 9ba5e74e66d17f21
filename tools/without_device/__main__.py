"""The facts of one model's kernels as JSON, ours and the incumbent's.

``python -m tools.without_device MODEL FILE``
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path

from tools.without_device.pretend import pretend, pretend_attention, pretend_for_triton


def main() -> None:
    """Write the facts of a model; ``--only`` one side, ``--quick`` without compiling kernels."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", choices=("ours", "incumbent"))
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    pretend()
    pretend_for_triton()
    kept = pretend_attention()
    from tools.without_device.facts import graph_facts
    from tools.without_device.incumbent import incumbent_graphs
    from tools.without_device.ours import our_graphs

    found = {}
    for side, graphs in (("ours", our_graphs), ("incumbent", incumbent_graphs)):
        if chosen.only in (None, side):
            found[side] = [graph_facts(g, compiled=not chosen.quick).data() for g in graphs(chosen.model)]
    chosen.file.write_text(json.dumps(found, indent=1))
    del kept


if __name__ == "__main__":
    main()
