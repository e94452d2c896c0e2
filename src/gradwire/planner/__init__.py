"""The offline search: from a model's profile, a cluster and codec costs to the plan of all exchanges. Pure: no torch."""

from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import EVALUATIONS, joint
from gradwire.planner.listing import (
    as_json,
    as_table,
    choose,
    collective_rows,
    compressor_rows,
    rows_as_json,
    rows_as_text,
    schedule_rows,
    shape_note,
)
from gradwire.planner.methods import explanation, make
from gradwire.planner.ranges import read_nodes, read_rates, read_slower
from gradwire.planner.slow_node import against, plans_against
from gradwire.planner.starts import ddp
from gradwire.planner.sweep import (
    LABELS,
    SWEPT,
    SweepRow,
    check_some_may,
    clusters,
    sweep_json,
    sweep_methods,
    sweep_plan,
    sweep_table,
)

__all__ = [
    "EVALUATIONS",
    "LABELS",
    "SWEPT",
    "Limits",
    "PlanningJob",
    "SweepRow",
    "against",
    "as_json",
    "as_table",
    "check_some_may",
    "choose",
    "clusters",
    "collective_rows",
    "compressor_rows",
    "ddp",
    "explanation",
    "joint",
    "make",
    "plans_against",
    "read_nodes",
    "read_rates",
    "read_slower",
    "rows_as_json",
    "rows_as_text",
    "schedule_rows",
    "shape_note",
    "sweep_json",
    "sweep_methods",
    "sweep_plan",
    "sweep_table",
]
