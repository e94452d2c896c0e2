"""Jobs, methods and the matrix runner behind `gradwire bench` and `gradwire demo`."""

__all__: list[str] = []  # the commands are the interface
