"""The engine: executes plans for models and decides nothing."""

__all__: list[str] = []  # `gradwire.parallelize` is the interface
