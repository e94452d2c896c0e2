"""Jobs, methods and the runner of the matrix, for `gradwire bench` and `gradwire demo`."""

__all__: list[str] = []  # the commands are the interface
