"""The schedules, one a module: classes with the events of `base.Schedule`, which `factory` makes for a plan."""

__all__: list[str] = []  # another package's schedule uses `base`; see docs/extending.md
