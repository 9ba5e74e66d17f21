"""Version of aotkit-functionalize."""

__version__ = "0.1.0"
