"""What a plan's step will look like: who works when. Pure: no torch."""

__all__: list[str] = []  # `gradwire simulate` and the planner are the interface
