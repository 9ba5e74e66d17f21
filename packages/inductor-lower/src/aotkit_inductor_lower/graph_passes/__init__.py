"""Passes over the FX graph before lowering. One file per pass, in the order of :mod:`..driver`."""
