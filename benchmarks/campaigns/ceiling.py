"""Measures the most that compression can bring: steps with fake compression (CGX, Fig. 1, Fig. 6, Table 8).

Fake compression sends the first part of its input and computes nothing, so a step with it costs as much as a perfect
codec of that ratio would. Compute is the limit where more ratio brings no faster step. The other methods show the cost
of a real codec: the same bytes with and without its work.
"""

from collections.abc import Iterator

from rich.table import Table

from benchmarks.campaigns.measuring import measure
from gradwire.bench.names import GRADWIRE_PREFIX
from gradwire.bench.results import BenchRun, Cell
from gradwire.bench.table import milliseconds
from gradwire.core.specs import QSGD, ElementRun, Truncate

__all__ = ["ceiling_methods", "ceiling_tables", "run"]

RATIOS = (1, 2, 4, 8, 16, 32, 100, 1000)
FEW = 10**9
"""A ratio at which one element of everything that is encoded together is left."""
NEAR = 1.05
"""A step within so many times that of `FEW` has nothing to gain from a higher ratio."""
CODEC = QSGD(bits=4)


def run(arguments: list[str]) -> int:
    """Measure, and print the tables."""
    return measure("ceiling", arguments, ceiling_methods(), ceiling_tables)


def ceiling_methods() -> list[str]:
    """The methods of the bench that `ceiling_tables` needs, in the order of its rows."""
    return ["floor", "ddp", *(_fake(ratio) for ratio in (*RATIOS, FEW)), _real(), _same_bytes()]


def ceiling_tables(run: BenchRun) -> Iterator[tuple[Table, str]]:
    """Yield the table of each job and link, and its result in words."""
    for job, link in dict.fromkeys((cell.job, cell.link) for cell in run.cells):
        cells = {cell.method: cell for cell in run.cells if (cell.job, cell.link) == (job, link)}
        table = Table(title=f"{job}, {link}, {run.nodes} nodes x {run.ranks_per_node} ranks: the ceiling", title_justify="left")
        for column in ("bytes", "MB sent", "step ms", "of linear scaling", "vs ddp"):
            table.add_column(column, justify="left" if column == "bytes" else "right")
        names = {"ddp": "plain DDP"} | {_fake(ratio): f"1/{ratio}" for ratio in RATIOS}
        names |= {_fake(FEW): "a few elements", _same_bytes(): "as 4 bits, nothing computed", _real(): "4 bits, computed"}
        for method, name in names.items():
            cell = cells[method]
            sent = "-" if cell.counted_bytes is None else f"{cell.counted_bytes / 1e6:.2f}"
            speedup = "-" if cell.speedup is None else f"{cell.speedup.ratio:.2f}x"
            table.add_row(name, sent, _median(cell), _share(cells["floor"], cell), speedup)
        yield table, _in_words(cells)


def _in_words(cells: dict[str, Cell]) -> str:
    medians = {method: cell.step.median_us for method, cell in cells.items() if cell.step is not None}
    if set(medians) != set(cells):
        return "Some of it failed; see above."
    least = medians[_fake(FEW)]
    enough = next((ratio for ratio in RATIOS if medians[_fake(ratio)] <= NEAR * least), None)
    bend = f"more than 1/{enough} brings nothing" if enough else f"even 1/{RATIOS[-1]} is felt"
    best = medians["ddp"] / least
    codec_ms = (medians[_real()] - medians[_same_bytes()]) / 1e3
    return (
        f"No compression can make a step more than {best:.2f} times as fast as plain DDP's here, and {bend}. "
        f"The work of the 4-bit codec costs {codec_ms:.1f} ms of a step ({100 * codec_ms * 1e3 / medians[_real()]:.1f} %)."
    )


def _fake(ratio: float) -> str:
    return f"{GRADWIRE_PREFIX}{Truncate(ratio, unsafe=True)!r}"


def _real() -> str:
    return f"{GRADWIRE_PREFIX}{CODEC!r}"


def _same_bytes() -> str:
    """Fake compression to the bytes of the real one, of a large float32 tensor."""
    numel = 2**20
    return _fake(round(4 * numel / CODEC.payload_bytes([ElementRun(numel, CODEC.bits)], 4), 4))


def _median(cell: Cell) -> str:
    return milliseconds(cell.step.median_us if cell.step else None)


def _share(floor: Cell, cell: Cell) -> str:
    if floor.step is None or cell.step is None:
        return "-"
    return f"{floor.step.median_us / cell.step.median_us:.0%}"
