"""Measure eager, Inductor and aotkit on real architectures, in one run; see `python -m tools.bench --help`."""
