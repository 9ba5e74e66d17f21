"""Training on several ranks, compiled, compared with eager mode: `python -m tools.ranks`."""
