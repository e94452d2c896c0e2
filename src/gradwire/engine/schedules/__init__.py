"""The schedules, one a module: classes with the events of `base.Schedule`, which `factory` makes for a plan."""
