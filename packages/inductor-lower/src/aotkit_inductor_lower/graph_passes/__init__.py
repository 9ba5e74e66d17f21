"""Passes over the FX graph before lowering. One file per pass, run in a fixed order on a copy of the graph."""

from .runner import FX_PASSES, FxPass, pass_names, run_fx_passes

__all__ = ["FX_PASSES", "FxPass", "pass_names", "run_fx_passes"]
