"""Typed refusals. Each says what was asked, why it cannot be done, and what to do."""

from __future__ import annotations

__all__ = [
    "AliasingChangedError",
    "BackwardCompileError",
    "CallingConventionError",
    "DoubleBackwardError",
    "MetadataMismatchError",
    "PlanError",
    "SchemaError",
    "UnsupportedOverlapError",
    "WrapperError",
]


class WrapperError(RuntimeError):
    """Base of every error that this package raises."""


class PlanError(WrapperError):
    """The metadata (or a stored plan) does not describe a graph that can be wrapped."""


class CallingConventionError(WrapperError):
    """A list of inputs, outputs or gradients does not have the length that the graph was compiled for."""


class MetadataMismatchError(WrapperError):
    """Debug mode: a value at run time is not what the metadata says; names the value and the field."""


class AliasingChangedError(WrapperError):
    """Inputs share memory now in a way they did not when the graph was captured.

    Raised before anything runs, with the argument list untouched, so that a caller can capture again.
    """


class UnsupportedOverlapError(WrapperError):
    """Overlapping inputs, one of them mutated, that no synthetic base can stand for."""


class BackwardCompileError(WrapperError):
    """Compiling the backward at its first use failed; the cause is chained. The next backward tries again."""


class DoubleBackwardError(WrapperError):
    """A gradient that a compiled graph computed was differentiated again."""


class SchemaError(WrapperError):
    """A custom operator returned memory that its schema says it does not return."""
