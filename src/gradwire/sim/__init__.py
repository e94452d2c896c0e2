"""Prediction of a plan's step: when each resource works. Pure: no torch."""

from gradwire.sim.events import COMPUTE, INTER, INTRA, RESOURCES
from gradwire.sim.native import ReplayProgram, TooLongError, native_fusion
from gradwire.sim.replay import MOST_LINK_TASKS, NEVER, Replayed, Replayer, launch_key
from gradwire.sim.rules import Rules, as_ddp, changed_rules, device_of, rules_of
from gradwire.sim.simulator import FS_PER_US, LightPlan, Simulator, fs_of
from gradwire.sim.timeline import Event, Interval, Resource, Timeline, simulate, sums_of, union
from gradwire.sim.views import as_table, as_trace

__all__ = [
    "COMPUTE", "FS_PER_US", "INTER", "INTRA", "MOST_LINK_TASKS", "NEVER", "RESOURCES", "Event", "Interval", "LightPlan",
    "ReplayProgram", "Replayed", "Replayer", "Resource", "Rules", "Simulator", "Timeline", "TooLongError", "as_ddp", "as_table",
    "as_trace", "changed_rules", "device_of", "fs_of", "launch_key", "native_fusion", "rules_of", "simulate", "sums_of", "union",
]  # fmt: skip
