"""What the ``torch_dynamo_backends`` entry point loads: only the backend function, under its public name."""

from .driver.process import collections_put_off

with collections_put_off():  # Dynamo's trace comes next, and would be walked over because of what was imported here
    from .backend import aotkit

__all__ = ["aotkit"]
