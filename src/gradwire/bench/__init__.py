"""Jobs, methods and the matrix runner behind `gradwire bench` and `gradwire demo`."""
