"""Makes pages and pictures from results. matplotlib is imported when something is drawn."""

__all__: list[str] = []  # `gradwire report` is the interface
