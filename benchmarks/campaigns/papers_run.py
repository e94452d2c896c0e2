"""The papers' systems on the same job over the same emulated links, predicted, then run: `python -m benchmarks side_by_side`.

A cell is one job on one cluster over one link, and one file. Each cell is profiled in a run of its own; the systems' plans and
predictions come from that profile alone. Then all systems train in turns in one set of processes. A cell that is there is not
measured again, except if a system failed in it; with `again` the turns of both runs count.
"""

import importlib.metadata
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.campaigns.papers_cells import PapersCell, SystemRow
from benchmarks.campaigns.papers_plans import CD_SGD_PERIOD, OWN_SPECS, PAPERS_SPECS, plans_of, systems_of
from benchmarks.campaigns.predict import profiled
from gradwire.bench.names import GRADWIRE_PREFIX, parse_spec
from gradwire.bench.progress import ProgressView
from gradwire.bench.results import Cell
from gradwire.bench.runner import BenchRequest, run_bench
from gradwire.core.checks import whole
from gradwire.core.files import make_folder
from gradwire.core.plan import Plan
from gradwire.core.provenance import Made
from gradwire.core.specs import Spec
from gradwire.errors import FormatError, TestbedError
from gradwire.sim.timeline import simulate

__all__ = ["LINKS", "SHAPES", "PapersRequest", "run_papers"]

SHAPES = ((4, 1), (2, 2))
"""Nodes and ranks of each."""
LINKS = ("100mbit", "200mbit", "500mbit")


@dataclass(frozen=True)
class PapersRequest:
    """The measurements to make. Raises FormatError, or an error of BenchRequest, for the first wrong value."""

    folder: Path
    specs: Sequence[Spec]
    jobs: Sequence[str] = ("transformer",)
    links: Sequence[str] = LINKS
    shapes: Sequence[tuple[int, int]] = SHAPES
    intra: str | None = None
    """The rate that the ranks of a node share, as in `BenchRequest`. Nodes of one rank have no such link."""
    compressors: Sequence[str] = ("",)
    """Words of PAPERS_SPECS, each of which makes a cell in which all systems have this compressor. Empty: they choose among
    `specs`."""
    steps: int = 30
    warmup_steps: int = 5
    turn_steps: int = 5
    profile_steps: int = 20
    seed: int = 0
    again: bool = False
    """Measure what has results already once more, and pool the runs."""

    def __post_init__(self) -> None:
        whole("profile_steps", self.profile_steps, "steps of each profiling", low=1)
        for name in ("steps", "turn_steps"):
            if getattr(self, name) % CD_SGD_PERIOD:
                raise FormatError(
                    f"{name} is {getattr(self, name)}, but CD-SGD sends everything in one of {CD_SGD_PERIOD} steps: parts of its "
                    f"period would make its times too long or too short. Use a multiple of {CD_SGD_PERIOD}."
                )
        if unknown := [word for word in self.compressors if word and word not in PAPERS_SPECS]:
            raise FormatError(f"there is no compressor {unknown[0]!r} of the papers. There are: {', '.join(PAPERS_SPECS)}.")
        if not self.specs:
            raise FormatError("there is no spec: GRACE and others have nothing to compress with. Name one by --spec.")
        for key in self.cells():
            self.bench(key, ["ddp"])

    def cells(self) -> Iterator["PapersKey"]:
        """The cells."""
        for nodes, ranks_per_node in self.shapes:
            for job in self.jobs:
                for link in self.links:
                    for compressor in self.compressors:
                        yield PapersKey(nodes, ranks_per_node, job, link, self.intra if ranks_per_node > 1 else None, compressor)

    def specs_of(self, key: "PapersKey") -> Sequence[Spec]:
        """The specs that the systems of a cell may use."""
        return [parse_spec(PAPERS_SPECS[key.compressor])] if key.compressor else self.specs

    def bench(self, key: "PapersKey", methods: Sequence[str]) -> BenchRequest:
        """The run of the bench that measures a cell."""
        return BenchRequest(
            jobs=[key.job],
            links=[key.link],
            methods=methods,
            nodes=key.nodes,
            ranks_per_node=key.ranks_per_node,
            intra=key.intra,
            steps=self.steps,
            warmup_steps=self.warmup_steps,
            turn_steps=self.turn_steps,
            alone_steps=0,
            seed=self.seed,
        )


class PapersKey(NamedTuple):
    """The name of a cell."""

    nodes: int
    ranks_per_node: int
    job: str
    link: str
    intra: str | None = None
    compressor: str = ""

    @property
    def file(self) -> str:
        inside = "" if self.intra is None else f"-intra-{self.intra}"
        compressor = self.compressor and f"-{self.compressor}"
        return f"{self.nodes}x{self.ranks_per_node}-{self.job}-{self.link}{inside}{compressor}.json"

    @property
    def systems(self) -> Sequence[str]:
        """The systems of the cell."""
        return systems_of(self.compressor)


def run_papers(request: PapersRequest, problem: str | None, watch: ProgressView, say: Callable[[str], None]) -> list[PapersCell]:
    """Measure the cells that are missing. Returns all that were asked for. `problem` is `emulation_problem()`.

    Raises TestbedError where no link can be emulated, or where a profiling fails, with what its ranks said.
    """
    if problem is not None:
        raise TestbedError(f"the papers' systems need links of known rates: {problem}. Run as root or allow user namespaces.")
    make_folder(request.folder)
    cells = {key: kept for key in request.cells() if (kept := _kept(request, key)) is not None}
    missing = [key for key in request.cells() if request.again or key not in cells or cells[key].steps < request.steps]
    for number, key in enumerate(missing, 1):
        say(f"{number} of {len(missing)}: {key.file.removesuffix('.json')}, {len(key.systems)} systems")
        cell, earlier = _measure(request, key, watch), cells.get(key)
        cells[key] = cell if earlier is None or cell.failures or not request.again else cell.pooled(earlier)
        cells[key].save(request.folder / key.file)
    return [cells[key] for key in request.cells()]


def _kept(request: PapersRequest, key: PapersKey) -> PapersCell | None:
    """Return an earlier result with this seed, these specs and turns, if no system failed."""
    path = request.folder / key.file
    cell = PapersCell.load(path) if path.exists() else None
    if cell is None or cell.failures:
        return None
    asked = request.seed, request.turn_steps, tuple(map(repr, request.specs_of(key)))
    return cell if (cell.seed, cell.turn_steps, cell.specs) == asked else None


def _measure(request: PapersRequest, key: PapersKey, watch: ProgressView) -> PapersCell:
    """Profile, plan, predict, then measure."""
    specs = request.specs_of(key)
    timed = [*specs, *(spec for spec in OWN_SPECS if spec not in specs)]
    with tempfile.TemporaryDirectory(prefix="gradwire-papers-") as name:
        folder, steps = Path(name), request.profile_steps
        found = profiled(request.bench(key, ["ddp"]), key.job, key.link, timed, steps, folder, watch)
        plans, methods = plans_of(found, specs, key.systems), {"DDP": "ddp"}
        for system, plan in plans.items():
            if system not in methods:
                path = folder / f"{system.replace(' ', '-')}.json"
                plan.save(path)
                methods[system] = f"{GRADWIRE_PREFIX}{path}"
        run = run_bench(request.bench(key, [methods[system] for system in plans]), None, watch)
    rows = []
    for system, plan in plans.items():
        cell = run.cell(key.job, key.link, methods[system])
        assert cell is not None
        timeline = simulate(plan, found.profile, found.cluster, found.costs)
        rows.append(_row(system, plan, timeline.step_us, timeline.sent_bytes / timeline.steps, cell, request.turn_steps))
    return PapersCell(
        made=Made.now(),
        torch=importlib.metadata.version("torch"),
        cores=os.cpu_count() or 1,
        job=key.job,
        link=key.link,
        nodes=key.nodes,
        ranks_per_node=key.ranks_per_node,
        intra=key.intra,
        compressor=key.compressor,
        steps=request.steps,
        turn_steps=request.turn_steps,
        profile_steps=request.profile_steps,
        seed=request.seed,
        specs=tuple(map(repr, specs)),
        fit=found.fit(key.job, key.link),
        rows=tuple(rows),
    )


def _row(system: str, plan: Plan, predicted_us: float, sent: float, cell: Cell, turn_steps: int) -> SystemRow:
    coded = [bucket for bucket in plan.buckets if bucket.main_spec.encodes]
    times = cell.step_us[slice(*cell.counted)]
    blocks = [float(np.mean(times[first : first + turn_steps])) for first in range(0, len(times), turn_steps)]
    return SystemRow(
        system=system,
        schedule=str(plan.schedule.__struct_config__.tag),
        buckets=len(plan.buckets),
        encoded=len(coded),
        specs=tuple(sorted({repr(bucket.main_spec) for bucket in coded})),
        bytes_per_rank=sent,
        predicted_us=predicted_us,
        blocks_us=tuple(blocks),
        failure=cell.failure,
    )
