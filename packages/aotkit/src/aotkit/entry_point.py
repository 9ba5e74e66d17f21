"""What the ``torch_dynamo_backends`` entry point loads: only the backend function, under its public name."""

from .backend import aotkit

__all__ = ["aotkit"]
