"""The offline search: from a model's profile, a cluster and codec costs to the plan of all exchanges. Pure: no torch."""

from typing import TYPE_CHECKING, Any

from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import EVALUATIONS, joint
from gradwire.planner.listing import (
    choose_options,
    collective_rows,
    compressor_rows,
    options_json,
    options_table,
    rows_as_json,
    rows_as_text,
    schedule_rows,
    shape_note,
)
from gradwire.planner.methods import explain_plan, make_plan
from gradwire.planner.slow_node import PLAIN_DDP, plans_for_slow_node, steps_with_slow_node
from gradwire.planner.starts import ddp_draft
from gradwire.planner.sweep import (
    LABELS,
    SWEPT,
    SweepRow,
    check_some_may,
    clusters,
    read_nodes,
    read_rates,
    read_slower,
    sweep_json,
    sweep_methods,
    sweep_plan,
    sweep_table,
)
from gradwire.renames import new_spelling

__all__ = [
    "EVALUATIONS", "LABELS", "PLAIN_DDP", "SWEPT", "Limits", "PlanningJob", "SweepRow", "check_some_may", "choose_options",
    "clusters", "collective_rows", "compressor_rows", "ddp_draft", "explain_plan", "joint", "make_plan", "options_json",
    "options_table", "plans_for_slow_node", "read_nodes", "read_rates", "read_slower", "rows_as_json", "rows_as_text",
    "schedule_rows", "shape_note", "steps_with_slow_node", "sweep_json", "sweep_methods", "sweep_plan", "sweep_table",
]  # fmt: skip

if not TYPE_CHECKING:  # or each misspelt name would pass

    def __getattr__(name: str) -> Any:
        if spelling := new_spelling(__name__, name):
            raise ImportError(f"{__name__} has no {name!r}.{spelling}")  # `from` hides the words of an AttributeError
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
