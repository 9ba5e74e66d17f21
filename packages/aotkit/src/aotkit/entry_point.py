"""What the ``torch_dynamo_backends`` entry point loads: only the backend function, under its public name."""

from .driver.process import collections_put_off, put_full_collections_off_while_tracing

with collections_put_off():  # what is imported here brings the next walk over all objects no closer
    from .backend import aotkit

put_full_collections_off_while_tracing()  # from the first graph on

__all__ = ["aotkit"]
