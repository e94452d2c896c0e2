"""docs/growth.md: tables from the results of `python -m benchmarks growth`."""

from collections.abc import Mapping
from typing import Any

from benchmarks.growth_simulated import section
from benchmarks.markdown import table

HEAD = """# How the cost of a step grows

The time of a step beyond the floor, which is the same script without communication. A rank has one thread. All ranks share
{cores} cores of one machine and talk over loopback, with 4 bits and the schedule `backward`. Made on {date} ({cpu})
in {seconds} s by the command below; do not edit.

```
{command}
```

![How the cost of a step grows](pictures/growth.png)

- **beyond** is the median of the differences between a turn of steps with gradwire and the turn of the floor before it,
  and where 80 % of the differences lie.
- **CPU** is the CPU time of a rank beyond the floor's, all threads together.
- **messages** carry gradients: those that a rank sends in a step. **sockets** are the most that one lane of a rank has.
- **start** is the time of `gw.parallelize` on the slowest rank, after its import. All ranks have the same weights, so none are
  sent; `--unlike` prints the start with other ones.
- **threads** are those of a rank's process, torch's and gloo's too. **memory** is what a rank needs more from before
  `gw.parallelize` to after its first steps, with the gradients. Both are of the rank that has the most.
- **DDP** is torch's DistributedDataParallel, in turns with the others. Its start is the time of its constructor.
- "-" under **threads**: the row is from before this was measured, and its start has the import too. With more than 200 million
  elements on all ranks together there is no DDP, for which there is not enough memory.
- **slope** is the power of the first column with which a column grows: the slope of the line through the points'
  logarithms, by least squares. 1 is proportional.
"""
PARTS = {
    "tensors": ("Tensors", "2 ranks. Every tensor has 16 x 16 elements, so bytes grow with the tensors."),
    "elements": ("Elements", "2 ranks, 24 tensors of equal size."),
    "ranks": (
        "Ranks",
        "24 tensors of equal size, together {elements:,} elements. Up to 16 ranks each sends a message to each other rank for\n"
        "every piece and phase, and more ranks form a grid. All ranks share {cores} cores, so the step and the start take\n"
        "longer as there are more ranks for a core. The start grows faster than that, and most where the grid begins.",
    ),
}
COLUMNS = (
    "floor, ms", "step, ms", "beyond, ms", "CPU, ms", "a rank sends, MB", "messages", "sockets of a lane", "start, ms", "threads",
    "memory, MB", "DDP: step, ms", "DDP: start, ms",
)  # fmt: skip
COSTS = ("beyond_ms", "cpu_ms", "sent_mb", "messages", "sockets", "start_ms")
"""The costs that every point has."""
LATER = ("threads", "memory_mb", "ddp_step_ms", "ddp_start_ms")
"""Those that points from before 2026-11-30 lack."""


def page(result: Mapping[str, Any]) -> str:
    """The whole page, from results/growth.json."""
    text = HEAD.format(**result, **result["made"])
    for curve, points in result["curves"].items():
        title, words = PARTS[curve]
        slopes = result["slopes"][curve]
        rows = [[f"{point[curve]:,}", *_cells(point)] for point in points]
        told = [_power(slopes.get(cost)) for cost in (*COSTS, *LATER)]
        rows.append(["slope", "", "", *told])
        words = words.format(cores=result["cores"], elements=points[0]["elements"])
        text += f"\n## {title}\n\n{words}\n\n" + "\n".join(table([curve, *COLUMNS], rows, left=0)) + "\n"
    if "simulated" in result:
        text += section(**result["simulated"])
    faster = "\n".join(f"- {words}." for words in result["faster"])
    text += "\n## Does anything grow faster than it may?\n\n"
    return text + (
        f"Yes:\n\n{faster}\n"
        if faster
        else "CPU time does not: it grows at most as the bytes or the messages of a rank. With ranks the time of the step can\n"
        "grow faster, since here all ranks share the same cores. Where there is a grid, sockets and messages grow at most as\n"
        "the square root of the ranks, and the start as the ranks.\n"
    )


def _cells(point: Mapping[str, Any]) -> list[str]:
    low, high = point["spread_ms"]
    beyond = f"{point['beyond_ms']:.2f} ({low:.2f} to {high:.2f})"
    first = [f"{point['floor_ms']:.2f}", f"{point['step_ms']:.2f}", beyond, f"{point['cpu_ms']:.2f}"]
    last = ["-" if "sockets" not in point else f"{point[name]:,.0f}" for name in ("sockets", "start_ms")]
    later = [
        "-" if point.get(name) is None else f"{point[name]:,.{digits}f}"
        for name, digits in (("threads", 0), ("memory_mb", 0), ("ddp_step_ms", 2), ("ddp_start_ms", 0))
    ]
    return [*first, f"{point['sent_mb']:.2f}", f"{point['messages']:,}", *last, *later]


def _power(slope: float | None) -> str:
    return "-" if slope is None else f"{round(slope, 2) + 0.0:.2f}"  # no -0.00
