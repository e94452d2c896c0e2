"""The version. It is written here and nowhere else: pyproject.toml and docs/conf.py read it."""

__all__ = ["__version__"]

__version__ = "0.3.0"
