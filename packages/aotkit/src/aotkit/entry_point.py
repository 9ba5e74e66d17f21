"""What the ``torch_dynamo_backends`` entry point loads: only the backend function, under its public name."""

from .driver.process import collections_put_off, put_full_collections_off_while_tracing

with collections_put_off():  # what is imported here brings the next walk over all objects no closer
    from .backend import aotkit
    from .frontend.saving import torch_keeps, write_guards_readably

if torch_keeps():  # of a function whose first frame has no graph as well
    write_guards_readably()
put_full_collections_off_while_tracing()  # from the first graph on

__all__ = ["aotkit"]
