"""What Hugging Face's libraries need to be told before they take this backend by its name.

Neither ``transformers`` nor ``accelerate`` is a dependency: each is imported by the function that needs it.
"""

from __future__ import annotations

from typing import Any

from .options import Options

__all__ = ["accept_in_accelerate", "generation_settings"]

_NAME = "AOTKIT"


def accept_in_accelerate() -> None:
    """Make ``accelerate`` accept ``"aotkit"`` where it takes the name of a backend.

    After it, ``TrainingArguments(torch_compile_backend="aotkit")`` and ``Accelerator(dynamo_backend="aotkit")`` work in
    this process; calling this twice is harmless. accelerate has no place where a backend is registered: its names are
    an ``Enum``. So this gives that class ``_missing_``, the hook by which an ``Enum`` is asked about values that it
    does not have. Without it, ``model.compile(backend="aotkit")`` before the model is handed over does the same.
    """
    from accelerate.utils import DynamoBackend

    if _NAME in DynamoBackend:
        return
    names: Any = DynamoBackend
    member = str.__new__(names, _NAME)
    member._name_, member._value_ = _NAME, _NAME
    asked_before = names._missing_
    names._missing_ = classmethod(lambda _, value: member if value == _NAME else asked_before(value))
    # Python 3.11.0 to 3.11.3 copy a member by its name, which only those have that the class was made with.
    names.__reduce_ex__ = lambda self, protocol: (type(self), (self._value_,))


def generation_settings(**options: Any) -> dict[str, Any]:
    """Arguments for ``model.generate`` with which each step after the first is compiled by this backend.

        model.generate(tokens, max_new_tokens=100, **generation_settings())

    generate compiles only with a cache of a fixed size (``"static"``), by itself only on a GPU, and asks for the mode
    ``"reduce-overhead"``. ``options`` are fields of :class:`aotkit.Options`; ``cudagraphs=True`` brings that mode back.
    Raises :class:`aotkit.UnknownOption`.
    """
    from transformers import CompileConfig

    Options().patch(**options)  # raises now what would be raised from within the first step
    # torch.compile takes a mode or options, not both.
    config = CompileConfig(backend="aotkit", mode=None, options=options or None)  # type: ignore[arg-type]
    config._compile_all_devices = True  # type: ignore[assignment]
    return {"cache_implementation": "static", "compile_config": config}
