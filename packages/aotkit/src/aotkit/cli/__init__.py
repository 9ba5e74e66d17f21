"""The ``aotkit`` command."""
