"""The figures of Cupcake's, ByteComp's and DeAR's papers, as far as the simulator can make them: docs/figures.md, docs/pictures.

    python -m benchmarks figures --data DIR [--out docs]

DIR has the profiles and codec times published with ByteComp (profiles/MODEL.json, v100-compressor-overheads.json), or the
environment variable GRADWIRE_DATA names it. What each number means is in `docs/figures.md`, which this writes.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.bars import draw_bars
from benchmarks.common import RESULTS, write
from benchmarks.figures_page import page
from benchmarks.papers.closed_forms import dear_us
from benchmarks.testbeds import (
    ALGORITHMS,
    SYSTEMS_OF,
    Bed,
    Papers,
    all_tensors,
    alone_ms,
    cupcake,
    free_step_ms,
    gathered,
    scaling,
    selected,
    step_ms,
)
from gradwire.core import Profile, TensorProfile
from gradwire.core.files import write_whole
from gradwire.errors import FormatError
from gradwire.plan.schemes import RESTRICTED
from gradwire.planner.drafts import Choice, Part, PlanningJob
from gradwire.planner.starts import by_own_tasks
from gradwire.report.pictures import Panel, draw_lines
from gradwire.sim.events import COMPUTE, INTER, INTRA

BYTECOMPS = ("Rand-k", "DGC", "EF-SignSGD")
"""The algorithms of ByteComp's evaluation."""
SCALING = "scaling factor (1 = perfect)"
NVLINK_GBPS, PCIE_GBPS = 1200.0, 100.0
"""Inside a node, as the papers give them."""


def wrapped(name: str) -> str:
    """Break a long name into two lines."""
    return name.replace("EF-", "EF-\n")


NAMES = [wrapped(name) for name in ALGORITHMS]


class Section(NamedTuple):
    """One figure: its rows and the published numbers. Values are text as shown."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


class Beds(NamedTuple):
    """The four testbeds, with the rates that were fitted."""

    cupcake_pcie: Bed
    cupcake_net: Bed
    nvlink: Bed
    pcie: Bed


def fitted(value_at: Callable[[float], float], target: float, low: float = 1.0, high: float = 200.0) -> float:
    """The rate at which a value that rises with it reaches the target."""
    for _ in range(20):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if value_at(middle) < target else (low, middle)
    return middle


def beds_of(papers: Papers) -> Beds:
    """Two rates are fitted, each to one published number of FP32."""
    small, bert = papers.profile("resnet50", 48.0), papers.profile("bert")
    pcie = fitted(lambda gbps: scaling(papers.job(small, Bed(1, gbps, gbps), "DGC"), "FP32"), 48 / (48 + 56))
    net = fitted(lambda gbps: scaling(papers.job(bert, Bed(8, NVLINK_GBPS, gbps), "DGC"), "FP32"), 0.51)
    return Beds(Bed(1, pcie, pcie), Bed(8, NVLINK_GBPS, 25.0), Bed(8, NVLINK_GBPS, net), Bed(8, PCIE_GBPS, 25.0))


def percent(factor: float) -> str:
    """Write the gain of a factor: 1.5 is +50 %."""
    return f"{100 * (factor - 1):+.0f} %"


def breakdown(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """Cupcake, Fig. 2a: every tensor compressed, ResNet-50 on one server."""
    profile = papers.profile("resnet50", 48.0)
    published = {"FP32": ("", "56 (fitted)"), "DGC": ("> 60", "< 10"), "EF-SignSGD": ("> 60", "< 10")}
    rows, bars = [], []
    for name in ("FP32", *ALGORITHMS):
        job = papers.job(profile, beds.cupcake_pcie, "DGC" if name == "FP32" else name)
        draft = SYSTEMS_OF["FP32"](job) if name == "FP32" else all_tensors(job, gathered(job))
        codec_ms = sum(job.program(part).busy[COMPUTE] for part in draft.parts) / 1e12
        step = step_ms(job, draft)
        exposed_ms = step - alone_ms(job) - codec_ms
        bars.append((alone_ms(job), codec_ms, exposed_ms))
        codec_told, exposed_told = published.get(name, ("", "< 10"))
        rows.append((name, f"{codec_ms:.0f}", codec_told, f"{abs(exposed_ms):.0f}", exposed_told, f"{step:.0f}"))
    kinds = ("forward and backward", "compression", "communication overhead")
    curves = dict(zip(kinds, zip(*bars, strict=True), strict=True))
    panel = Panel("", ["FP32", *NAMES], curves)
    draw_bars(pictures / "breakdown.png", "ResNet-50, 8 GPUs: every tensor compressed", [panel], "ms a step", True)
    columns = ("", "codec ms", "paper", "communication overhead ms", "paper", "step ms")
    return Section("breakdown", columns, rows)


def cupcake_scaling(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """Cupcake, Fig. 6 and 7."""
    published = {
        ("ResNet-50", "PCIe"): ("72", "130", "64"),
        ("BERT-base", "PCIe"): ("65", "106", "61"),
        ("ResNet-50", "25 Gb/s"): ("93", "", "79"),
        ("BERT-base", "25 Gb/s"): ("103", "", "58"),
    }
    systems = ("FP32", "GRACE", "HiPress", "Cupcake", "gradwire")
    profiles = {"ResNet-50": papers.profile("resnet50", 48.0), "BERT-base": papers.profile("bert")}
    rows, panels = [], []
    for where, bed in (("PCIe", beds.cupcake_pcie), ("25 Gb/s", beds.cupcake_net)):
        for model, profile in profiles.items():
            jobs = [papers.job(profile, bed, algorithm) for algorithm in ALGORITHMS]
            found = {system: [scaling(job, system) for job in jobs] for system in systems}
            panels.append(Panel(f"{model}, {'8' if bed.nodes == 1 else '64'} GPUs, {where}", NAMES, found))
            row = [f"{model}, {where}", f"{found['FP32'][0]:.2f}", f"{max(found['Cupcake']):.2f}"]
            for system, told in zip(("FP32", "GRACE", "HiPress"), published[model, where], strict=True):
                gain = max(ours / other for ours, other in zip(found["Cupcake"], found[system], strict=True))
                row += [percent(gain), told and f"+{told} %"]
            gain = max(ours / other for ours, other in zip(found["gradwire"], found["Cupcake"], strict=True))
            rows.append([*row, percent(gain)])
    draw_bars(pictures / "cupcake.png", "Every compressor under five planners", panels, SCALING)
    over = ("over FP32", "paper", "over GRACE", "paper", "over HiPress", "paper")
    return Section("cupcake", ("", "FP32", "Cupcake at best", *over, "gradwire over Cupcake"), rows)


def fusion_rules(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """Cupcake, Fig. 9: DGC with three rules of fusion."""
    rows, found = [], []
    profiles = {"ResNet-50": papers.profile("resnet50", 48.0), "BERT-base": papers.profile("bert")}
    for model, profile in profiles.items():
        job = papers.job(profile, beds.cupcake_pcie, "DGC")
        layers = scaling(job, "GRACE")
        each = [alone_ms(job) / step_ms(job, cupcake(job, rule)) for rule in ("bucket", "even", "fusion")]
        found.append([layers, *each])
        gains = (f"{each[2] / other:.3f}" for other in each[:2])
        rows.append((model, *(f"{value:.3f}" for value in [layers, *each]), *gains))
    labels = ("layer-wise", "bucket fusion", "even split", "Cupcake's best fusion")
    panel = Panel("", list(profiles), dict(zip(labels, zip(*found, strict=True), strict=True)))
    draw_bars(pictures / "fusion.png", "DGC on 8 GPUs over PCIe", [panel], SCALING)
    return Section("fusion", ("", *labels, "over bucket (paper: up to 1.12)", "over even (up to 1.18)"), rows)


def table_1(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """ByteComp, Table 1: HiPress on GPUs."""
    rows = []
    for model, bed, algorithm, fp32, gain in (
        ("bert", beds.nvlink, "EF-SignSGD", "0.51 (fitted)", "+8 %"),
        ("lstm", beds.pcie, "DGC", "0.46", "-6 %"),
    ):
        job = papers.job(papers.profile(model), bed, algorithm)
        plain, coded = scaling(job, "FP32"), scaling(job, "HiPress")
        rows.append((f"{model}, {algorithm}", f"{plain:.2f}", fp32, f"{coded:.2f}", percent(coded / plain), gain))
    return Section("table_1", ("", "FP32", "paper", "compressed on GPUs", "gain", "paper"), rows)


def benefit(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """ByteComp, Fig. 9: how many times its own time a codec on the GPU saves on the links, by the tensor's size."""
    elements = [2**power for power in range(14, 27, 2)]
    curves: dict[str, list[float]] = {}
    for algorithm in BYTECOMPS:
        for numel in elements:
            tensor = TensorProfile(name="tensor", shape=(numel,), dtype="float32", backward_us=0.0, forward_us=0.0)
            profile = Profile(model="a tensor", batch=1, device="V100", tensors=(tensor,))
            job = papers.job(profile, beds.nvlink, algorithm)
            coded = job.program(Part((0,), Choice(job.specs[0], gathered(job)))).busy
            plain = (job.program(Part((0,), choice)).busy for choice in job.plain)
            saved = min(busy[INTRA] + busy[INTER] for busy in plain) - coded[INTRA] - coded[INTER]
            curves.setdefault(algorithm, []).append(saved / coded[COMPUTE])
    mib = [numel * 4 / 2**20 for numel in elements]
    title = "64 GPUs, NVLink: what a codec on the GPU saves on the links"
    draw_lines(pictures / "benefit.png", title, [Panel("", mib, curves)], "MiB of the tensor", "time saved / time of the codec")
    rows = [(name, *(f"{value:.2f}" for value in values)) for name, values in curves.items()]
    return Section("benefit", ("saved / codec", *(f"{size:g} MiB" for size in mib)), rows)


def throughput(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """ByteComp, Fig. 11a, 12a, 12b: against the number of GPUs; gains at 64."""
    published = {"bert": ("", "54", "40"), "vgg16": ("269", "", "55"), "lstm": ("", "73", "77")}
    shown = {"bert": "EF-SignSGD", "vgg16": "EF-SignSGD", "lstm": "DGC"}
    rows, panels = [], []
    for model, bed, where in (("bert", beds.nvlink, "NVLink"), ("vgg16", beds.pcie, "PCIe"), ("lstm", beds.pcie, "PCIe")):
        profile = papers.profile(model)
        curves: dict[str, list[float]] = {}
        for nodes in (1, 2, 4, 8):
            job = papers.job(profile, bed._replace(nodes=nodes), shown[model])
            for system, value in with_bounds(papers, profile, bed._replace(nodes=nodes), job, shown[model]).items():
                curves.setdefault(system, []).append(value)
        panels.append(Panel(f"{model}, {where}, {shown[model]}", [8, 16, 32, 64], curves))
        for algorithm in BYTECOMPS:
            job = papers.job(profile, bed, algorithm)
            mine, joined = scaling(job, "ByteComp"), scaling(job, "gradwire")
            row = [f"{model}, {where}, {algorithm}"]
            for system, told in zip(("FP32", "GRACE", "HiPress"), published[model], strict=True):
                row += [percent(mine / scaling(job, system)), told and f"+{told} %"]
            rows.append([*row, percent(joined / mine)])
    draw_lines(pictures / "throughput.png", "Machines of 8 GPUs", panels, "GPUs", SCALING)
    over = ("over FP32", "paper", "over HiTopKComm", "paper", "over HiPress", "paper")
    return Section("throughput", ("ByteComp, 64 GPUs", *over, "gradwire over ByteComp"), rows)


def with_bounds(papers: Papers, profile: Profile, bed: Bed, job: PlanningJob, algorithm: str) -> dict[str, float]:
    """Scaling factors of all systems, and with codecs that cost nothing. HiTopKComm on one machine is GRACE."""
    systems = ("FP32", "GRACE", "HiPress", "ByteComp", "gradwire")
    found = {system.replace("GRACE", "HiTopKComm"): scaling(job, system) for system in systems}
    return {**found, "upper bound": alone_ms(job) / free_step_ms(papers, profile, bed, algorithm)}


def near_bound(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """ByteComp, Fig. 13: how much less throughput than with free codecs, 64 GPUs."""
    systems = ("FP32", "GRACE", "HiPress", "ByteComp", "gradwire")
    models = ("vgg16", "resnet50", "bert", "lstm")
    rows, panels = [], []
    for where, bed in (("NVLink", beds.nvlink), ("PCIe", beds.pcie)):
        curves: dict[str, list[float]] = {}
        for model in models:
            profile = papers.profile(model)
            below: dict[str, list[float]] = {system: [] for system in systems}
            for algorithm in BYTECOMPS:
                job = papers.job(profile, bed, algorithm)
                best = alone_ms(job) / free_step_ms(papers, profile, bed, algorithm)
                for system in systems:
                    below[system].append(100 * (1 - scaling(job, system) / best))
            for system, values in below.items():
                curves.setdefault(system.replace("GRACE", "HiTopKComm"), []).append(max(values))
            cells = [" / ".join(f"{value:.0f}" for value in below[system]) for system in systems]
            rows.append((f"{model}, {where}", *cells))
        panels.append(Panel(where, list(models), curves))
    draw_bars(pictures / "bound.png", "Worst of three algorithms, 64 GPUs", panels, "% below the upper bound")
    columns = ("% below, Rand-k / DGC / EF-SignSGD", "FP32", "HiTopKComm", "HiPress", "ByteComp", "gradwire")
    return Section("bound", columns, rows)


def restricted(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """ByteComp, Fig. 14: VGG16 with parts of the search space."""
    profile = papers.profile("vgg16")
    searches = ("all-compressed", "myopic", "inter-allgather", "inter-alltoall", "alltoall+alltoall", "full")
    rows, panels = [], []
    for where, bed, algorithms in (("NVLink", beds.nvlink, BYTECOMPS), ("PCIe", beds.pcie, BYTECOMPS[2:])):
        curves: dict[str, list[float]] = {search: [] for search in searches}
        for algorithm in algorithms:
            whole = papers.job(profile, bed, algorithm)
            for search in searches:
                if search == "myopic":
                    coded = [option.tasks for option in whole.options if option.compresses]
                    choices = [*whole.plain, *(whole.choices()[0]._replace(spec=whole.specs[0], option=o) for o in coded)]
                    job, draft = whole, by_own_tasks(whole, choices)
                else:
                    job = papers.job(profile, bed, algorithm, RESTRICTED.get(search, lambda option: True))
                    draft = selected(job)
                curves[search].append(alone_ms(job) / step_ms(job, draft))
            last = [curves[search][-1] for search in searches]
            rows.append((f"{where}, {algorithm}", *(f"{value:.3f}" for value in last)))
        panels.append(Panel(where, [wrapped(name) for name in algorithms], curves))
    draw_bars(pictures / "restricted.png", "VGG16 on 64 GPUs: ByteComp with parts of its options", panels, SCALING)
    return Section("restricted", ("", *searches), rows)


def dear_table(papers: Papers, beds: Beds, pictures: Path) -> Section:
    """DeAR, Table II: the compute time that S^max at 10 Gb/s implies, and what follows at 100 Gb/s."""
    rows = []
    for model, millions, at_10, at_100 in (
        ("ResNet-50", 25.6, 61.6, 64.0),
        ("Inception-v4", 42.7, 59.8, 64.0),
        ("BERT-base", 110.1, 25.5, 64.0),
        ("BERT-large", 336.2, 12.1, 51.8),
    ):

        def at(gbps: float, compute_ms: float, millions: float = millions) -> float:
            return speedup(compute_ms, millions, gbps)

        compute_ms = fitted(lambda ms, at=at: at(10.0, ms), at_10, 1.0, 10_000.0)  # type: ignore[misc]
        rate = fitted(lambda gbps, at=at, ms=compute_ms: at(gbps, ms), at_100) if at_100 < 64 else None  # type: ignore[misc]
        told = "" if rate is None else f"{rate:.0f}"
        rows.append((model, f"{at_10}", f"{compute_ms:.0f}", f"{at(100.0, compute_ms):.1f}", f"{at_100}", told))
    columns = ("", "S^max, 10 Gb/s", "compute ms", "S^max, 100 Gb/s, from these", "paper", "Gb/s that give the paper's")
    return Section("dear", columns, rows)


def speedup(compute_ms: float, millions: float, gbps: float) -> float:
    """Equation 6 on 64 GPUs: each half of an all-reduce takes size / rate; backward takes twice forward."""
    phase_ms = 32 * millions / gbps
    return 64 * compute_ms / dear_us(compute_ms / 3, 2 * compute_ms / 3, phase_ms, phase_ms)


SECTIONS = (breakdown, cupcake_scaling, fusion_rules, table_1, benefit, throughput, near_bound, restricted, dear_table)


def run(arguments: list[str]) -> int:
    """Simulate, draw, and write results/figures.json and the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks figures")
    parser.add_argument("--data", type=Path, default=os.environ.get("GRADWIRE_DATA"), help="default: $GRADWIRE_DATA")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args(arguments)
    if options.data is None or not (options.data / "profiles").is_dir():
        raise FormatError(
            f"--data is {options.data}: no folder with profiles, and the figures are made from ByteComp's. Name the folder that "
            "holds profiles/ and v100-compressor-overheads.json, or set GRADWIRE_DATA."
        )
    pictures = options.out / "pictures"
    pictures.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with console.status("fitting link rates") as status:
        papers = Papers(options.data)
        beds = beds_of(papers)
        found: dict[str, Any] = {}
        for make in SECTIONS:
            status.update(f"{make.__doc__}")
            section = make(papers, beds, pictures)
            found[section.name] = section._asdict()
    rates = {"cupcake_pcie_gbps": beds.cupcake_pcie.inter_gbps, "nvlink_inter_gbps": beds.nvlink.inter_gbps}
    write(RESULTS / "figures.json", {"fitted": rates, **found})
    write_whole(options.out / "figures.md", page(json.loads((RESULTS / "figures.json").read_text())))
    print(f"written to {options.out / 'figures.md'}")
    return 0
