"""The papers' tables of search times and three more of their figures, in search and simulation: docs/search_times.md.

    python -m benchmarks search_times --data DIR [--only NAME ...] [--seconds 20] [--out docs]

DIR as for `python -m benchmarks figures`. --only: these parts alone; the others stay as they were measured. --seconds: how long
Cupcake's search may take in each of its forms. All parts take some 10 minutes of CPU time. What each number means is in
`docs/search_times.md`, which this writes.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from benchmarks.common import RESULTS, write
from benchmarks.figures import BYTECOMPS, Beds, Section, beds_of, fitted, percent
from benchmarks.papers.scaled import gpt2, resnet101
from benchmarks.papers.searches import PRUNINGS, best_fusion_over_rules, fusion_searches, offload_search, option_search
from benchmarks.search_times_page import search_times_page
from benchmarks.testbeds import SYSTEMS_OF, Bed, Papers, alone_ms, free_step_ms, gathered, scaling, step_ms
from gradwire.core import Costs, Profile
from gradwire.core.files import write_whole
from gradwire.errors import FormatError
from gradwire.planner import bytecomp
from gradwire.planner.drafts import Choice, Draft, Limits, PlanningJob
from gradwire.planner.starts import best_of, fused, layer_wise
from gradwire.report.pictures import Panel, draw_lines
from gradwire.sim.rules import Rules

CPU_SLOWER = 3.0
"""Codecs on the CPUs of one rank over codecs on its GPU: assumed, as the published number has no published meaning."""
CPU_WORKERS = 6
"""48 cores for 8 GPUs."""
RESNET = "ResNet-101 (scaled)"
SYSTEMS = ("FP32", "GRACE", "HiPress", "ByteComp", "gradwire")


class Bench(NamedTuple):
    """The settings that all parts share."""

    papers: Papers
    beds: Beds
    pictures: Path
    seconds: float

    def models(self) -> dict[str, Profile]:
        """ByteComp's models but UGATIT."""
        bert = self.papers.profile("bert")
        return {
            "VGG16": self.papers.profile("vgg16"),
            RESNET: resnet101(self.papers.profile("resnet50")),
            "BERT-base": bert,
            "GPT-2 (scaled)": gpt2(bert, self.gpt2_backward_us()),
            "LSTM": self.papers.profile("lstm"),
        }

    def gpt2_backward_us(self) -> float:
        """Fitted to the published scaling factor of FP32."""
        bert = self.papers.profile("bert")

        def at(backward_ms: float) -> float:
            return scaling(self.papers.job(gpt2(bert, 1e3 * backward_ms), self.beds.nvlink, "DGC"), "FP32")

        return 1e3 * fitted(at, 0.58, 5.0, 500.0)


def cupcake_table_1(bench: Bench) -> Section:
    """Cupcake, Table 1: search times."""
    told = {
        "ResNet-50": ("161", "2.8 s", "15 s", "2.2 h", "> 24 h"),
        RESNET: ("314", "6.6 s", "68 s", "9.4 h", "> 24 h"),
        "BERT-base": ("207", "4.2 s", "32 s", "> 24 h", "> 24 h"),
    }
    small = bench.papers.profile("resnet50", 48.0)
    profiles = dict(zip(told, (small, resnet101(small), bench.papers.profile("bert")), strict=True))
    rows: list[list[str]] = []
    for model, profile in profiles.items():
        job = bench.papers.job(profile, bench.beds.cupcake_pcie, "DGC")
        exact, *others = fusion_searches(job, Choice(job.specs[0], gathered(job)), bench.seconds)
        row = [model, f"{len(profile.tensors)} ({told[model][0]})", f"{exact.ms:.2f} ms"]
        for search, published in zip(others, told[model][1:], strict=True):
            if search.finished:
                row.append(f"{search.ms / 1e3:.2g} s")
            else:
                row.append(f"> {bench.seconds:g} s ({percent(search.over_best)})")
            row.append(published)
        rows.append(row)
    columns = ["DGC, 8 GPUs over PCIe", "tensors (paper)", "exact search"]
    for name in PRUNINGS:
        columns += [name, "paper"]
    return Section("cupcake_table_1", columns, rows)


def bytecomp_table_5(bench: Bench) -> Section:
    """ByteComp, Table 5: search times."""
    told = {"VGG16": (32, 7), "ResNet-101": (314, 179), "BERT-base": (207, 125), "GPT-2": (148, 99), "LSTM": (10, 1)}
    rows = []
    for model, profile in bench.models().items():
        tensors, published_ms = told[model.removesuffix(" (scaled)")]
        for algorithm in BYTECOMPS:
            found = option_search(bench.papers.job(profile, bench.beds.nvlink, algorithm))
            rows.append(
                (
                    f"{model}, {algorithm}",
                    f"{found.tensors} ({tensors})",
                    str(found.compressed),
                    f"{found.ms:.0f}",
                    f"{found.short_ms:.0f}",
                    str(published_ms),
                    percent(found.short_over_whole),
                    duration(found.brute_force_log10_s),
                )
            )
    columns = (
        "",
        "tensors (paper)",
        "compressed",
        "whole search ms",
        "one look ms",
        "paper ms",
        "one look's step",
        "brute force (paper: > 24 h)",
    )
    return Section("bytecomp_table_5", columns, rows)


def bytecomp_table_6(bench: Bench) -> Section:
    """ByteComp, Table 6: search times of the offload."""
    told = {
        "VGG16": ("11", "1 ms", "1 ms"),
        "ResNet-101": ("42", "14 ms", "> 24 h"),
        "BERT-base": ("54", "2 ms", "> 24 h"),
        "GPT-2": ("34", "1 ms", "7.6 h"),
        "LSTM": ("5", "1 ms", "1 ms"),
    }
    rows = []
    for model, profile in bench.models().items():
        tensors, ms, brute = told[model.removesuffix(" (scaled)")]
        for algorithm in BYTECOMPS:
            job = with_cpus(bench.papers.job(profile, bench.beds.nvlink, algorithm))
            found = offload_search(job, option_search(job).draft)
            rows.append(
                (
                    f"{model}, {algorithm}",
                    f"{found.tensors} ({tensors})",
                    str(found.groups),
                    f"{found.products:.2g}" if found.products > 99_999 else str(found.products),
                    "all" if found.exhaustive else "descent",
                    f"{found.ms:.1f} ms",
                    ms,
                    str(found.moved),
                    percent(found.gain),
                    duration(found.brute_force_log10_s),
                    brute,
                )
            )
    columns = (
        "",
        "compressed tensors (paper)",
        "groups",
        "products of counts",
        "tried",
        "search",
        "paper",
        "moved",
        "speed gained",
        "all subsets",
        "paper",
    )
    return Section("bytecomp_table_6", columns, rows)


def with_cpus(job: PlanningJob) -> PlanningJob:
    """The job with codecs on CPUs too, `CPU_SLOWER` times slower."""
    codecs = list(job.simulator.prices.costs.codecs)
    for codec in tuple(codecs):
        encode, decode = (tuple((nbytes, CPU_SLOWER * us) for nbytes, us in curve) for curve in (codec.encode, codec.decode))
        codecs.append(msgspec.structs.replace(codec, device="cpu", encode=encode, decode=decode))
    limits = Limits(exempt_vectors=False, devices=("gpu", "cpu"))
    rules = Rules(decode_calls="one", routing="ring", cpu_workers=CPU_WORKERS)
    return PlanningJob(job.profile, job.cluster, Costs(codecs=tuple(codecs)), job.specs, limits, rules, job.options)


def duration(log10_s: float) -> str:
    """So many seconds, by their logarithm, in the unit that fits."""
    year_s = 365.25 * 86400
    if log10_s > math.log10(1e6 * year_s):
        return f"10^{log10_s - math.log10(year_s):.0f} years"
    seconds = 10**log10_s
    for unit, length in (("years", year_s), ("h", 3600.0), ("s", 1.0)):
        if seconds >= length:
            return f"{seconds / length:.2g} {unit}"
    return f"{1e3 * seconds:.2g} ms"


def time_to_accuracy(bench: Bench) -> Section:
    """Cupcake, Fig. 8, and ByteComp, Fig. 15: seconds to the published accuracy."""
    beds, papers = bench.beds, bench.papers
    small, bert = papers.profile("resnet50", 48.0), papers.profile("bert")
    deep, deeper = resnet101(small), resnet101(papers.profile("resnet50"))
    pcie, network, signs = beds.cupcake_pcie, beds.nvlink, "EF-SignSGD"
    same = "almost the same"
    cases: tuple[tuple[str, Profile, Bed, str, str, dict[str, str], str], ...] = (
        ("Cupcake 8a, ResNet-50, 8 GPUs", small, pcie, "DGC", "Cupcake", {"FP32": "1.68", "HiPress": "1.30"}, "93.2, 93.6"),
        (f"Cupcake 8b, {RESNET}, 8 GPUs", deep, pcie, signs, "Cupcake", {"FP32": "1.32", "HiPress": "1.25"}, "76.7, 77.1"),
        ("Cupcake 8c, BERT-base, 8 GPUs", bert, pcie, "DGC", "Cupcake", {"FP32": "1.65"}, same),
        ("ByteComp 15a, BERT-base, 64 GPUs", bert, network, "DGC", "ByteComp", {"FP32": "1.55"}, same),
        (f"ByteComp 15b, {RESNET}, 64 GPUs", deeper, network, signs, "ByteComp", {"FP32": "1.23"}, "77.10, 77.18"),
    )
    rows = []
    for name, profile, bed, algorithm, system, published, accuracy in cases:
        job = papers.job(profile, bed, algorithm)
        step = {each: step_ms(job, SYSTEMS_OF[each](job)) for each in ("FP32", "HiPress", system, "gradwire")}
        row = [f"{name}, {algorithm}"]
        for rival in ("FP32", "HiPress"):
            row += [f"{step[rival] / step[system]:.2f}", published.get(rival, "")]
        rows.append([*row, f"{step['FP32'] / step['gradwire']:.2f}", accuracy])
    columns = ("", "over FP32", "paper", "over HiPress", "paper", "gradwire over FP32", "the paper's accuracy, FP32's")
    return Section("time_to_accuracy", columns, rows)


def cupcake_figure_9(bench: Bench) -> Section:
    """Cupcake, Fig. 9: the most that any fusion can gain over the two rules, for several links and two ways to count decodes."""
    papers, rate = bench.papers, bench.beds.cupcake_pcie.inter_gbps
    small = papers.profile("resnet50", 48.0)
    rows, rates = [], (rate / 4, rate, 4 * rate)
    for model, profile in (("ResNet-50", small), (RESNET, resnet101(small)), ("BERT-base", papers.profile("bert"))):
        for calls in ("one", "each"):
            row = [f"{model}, {'a decode call a bucket' if calls == 'one' else 'a decode call a payload'}"]
            for gbps in rates:
                job = papers.job(profile, Bed(1, gbps, gbps), "DGC", decode_calls=calls)
                gains = best_fusion_over_rules(job)
                row.append(f"{gains.over_bucket:.3f}, {gains.over_even:.3f}{'' if gains.proven else ' at least'}")
            rows.append(row)
    columns = (
        "best over bucket, over even split",
        *(f"{gbps:.1f} Gb/s" for gbps in rates),
        "paper, at most",
    )
    return Section("cupcake_figure_9", columns, [[*row, "1.12, 1.18"] for row in rows])


def fp32_alone(job: PlanningJob) -> Draft:
    """FP32 that fuses nothing, by the best uncompressed option."""
    found = best_of(job, (fused(job, layer_wise, plain)._replace(skew=skew) for plain in job.plain for skew in (0, 1)))
    assert found is not None, "there is no limit of memory"
    return found


def bytecomp_figure_15b(bench: Bench) -> Section:
    """ByteComp, Fig. 15b: ByteComp over FP32 that fuses, and over FP32 that sends every tensor alone, by latency."""
    profile = resnet101(bench.papers.profile("resnet50"))
    rows = []
    for intra_us, inter_us in ((0.0, 0.0), (2.0, 6.0), (10.0, 30.0), (20.0, 60.0)):
        job = bench.papers.job(profile, bench.beds.nvlink, "EF-SignSGD", latencies_us=(intra_us, inter_us))
        drafts = (SYSTEMS_OF["FP32"](job), fp32_alone(job), bytecomp.published(job).draft, SYSTEMS_OF["gradwire"](job))
        steps = [step_ms(job, draft) for draft in drafts]
        overs = (f"{steps[0] / steps[2]:.2f}", f"{steps[1] / steps[2]:.2f}")
        rows.append((f"{intra_us:g} and {inter_us:g} us", *(f"{ms:.0f}" for ms in steps), *overs, "1.23"))
    steps_of = ("FP32, fused ms", "FP32, alone ms", "ByteComp ms", "gradwire ms")
    columns = ("latency inside and between nodes", *steps_of, "ByteComp over fused", "over alone", "paper")
    return Section("bytecomp_figure_15b", columns, rows)


def bytecomp_scaled_models(bench: Bench) -> Section:
    """ByteComp, Fig. 11b and 12c: GPT-2 and ResNet-101, made by scaling, over FP32 that sends every tensor alone."""
    models = bench.models()
    told = {"GPT-2 (scaled)": ("0.58 (fitted)", "", "", "+33 %"), RESNET: ("0.70", "+20 %", "-54 %", "+24 %")}
    rows = []
    for model, bed, where in (("GPT-2 (scaled)", bench.beds.nvlink, "NVLink"), (RESNET, bench.beds.pcie, "PCIe")):
        for algorithm in BYTECOMPS:
            job = bench.papers.job(models[model], bed, algorithm)
            systems = (SYSTEMS_OF["FP32"], fp32_alone, SYSTEMS_OF["GRACE"], SYSTEMS_OF["HiPress"])
            plain, alone, gathering, selective = (step_ms(job, system(job)) for system in systems)
            whole, ms = step_ms(job, bytecomp.published(job).draft), alone_ms(job)
            values = (f"{ms / plain:.2f}, {ms / alone:.2f}", percent(alone / whole), percent(alone / gathering))
            shown = zip((*values, percent(selective / whole)), told[model], strict=True)
            rows.append([f"{model}, {where}, {algorithm}", *(cell for pair in shown for cell in pair)])
    overs = ("ByteComp over alone", "HiTopKComm over alone", "ByteComp over HiPress")
    columns = ["64 GPUs", "FP32: fused, alone"]
    columns += [each for over in ("paper", *overs) for each in ((over,) if over == "paper" else (over, "paper"))]
    return Section("bytecomp_scaled_models", columns, rows)


def bytecomp_figure_13(bench: Bench) -> Section:
    """ByteComp, Fig. 13: how far from the upper bound, over all jobs."""
    rows, panels = [], []
    for where, bed in (("NVLink", bench.beds.nvlink), ("PCIe", bench.beds.pcie)):
        below: dict[str, list[float]] = {system: [] for system in SYSTEMS}
        for profile in bench.models().values():
            for algorithm in BYTECOMPS:
                job = bench.papers.job(profile, bed, algorithm)
                bound = alone_ms(job) / free_step_ms(bench.papers, profile, bed, algorithm)
                for system in SYSTEMS:
                    below[system].append(100 * (1 - scaling(job, system) / bound))
        limits = (1, 2, 4, 8, 16, 32, 64)
        curves = {}
        for system, values in below.items():
            name = system.replace("GRACE", "HiTopKComm")
            curves[name] = [100 * share_within(values, limit) for limit in limits]
            ordered = sorted(values)
            row = (f"{ordered[len(ordered) // 2]:.0f}", f"{ordered[-1]:.0f}", f"{100 * share_within(values, 10):.0f} %")
            rows.append((f"{where}, {name}", *row, "100 %" if (where, system) == ("NVLink", "ByteComp") else ""))
        panels.append(Panel(f"{where}, 64 GPUs", limits, curves))
    title = f"{len(below['FP32'])} jobs: five models, three algorithms"
    draw_lines(bench.pictures / "distance.png", title, panels, "% below the upper bound", "% of the jobs, at most so far")
    columns = ("% below the upper bound", "median", "worst", "jobs within 10 %", "paper")
    return Section("bytecomp_figure_13", columns, rows)


def share_within(values: Sequence[float], limit: float) -> float:
    """The part of the values that are at most the limit."""
    return sum(value <= limit for value in values) / len(values)


EXPERIMENTS = (
    cupcake_table_1,
    bytecomp_table_5,
    bytecomp_table_6,
    time_to_accuracy,
    cupcake_figure_9,
    bytecomp_figure_15b,
    bytecomp_scaled_models,
    bytecomp_figure_13,
)


def run(arguments: list[str]) -> int:
    """Search, simulate, draw, and write results/search_times.json and the page."""
    names = [make.__name__ for make in EXPERIMENTS]
    parser = argparse.ArgumentParser(prog="python -m benchmarks search_times")
    parser.add_argument("--data", type=Path, default=os.environ.get("GRADWIRE_DATA"), help="default: $GRADWIRE_DATA")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "docs")
    options = parser.parse_args(arguments)
    if options.data is None or not (options.data / "profiles").is_dir():
        raise FormatError(
            f"--data is {options.data}: no folder with profiles, and the tables are made from ByteComp's. Name the folder "
            "that holds profiles/ and v100-compressor-overheads.json, or set GRADWIRE_DATA."
        )
    pictures, path = options.out / "pictures", RESULTS / "search_times.json"
    pictures.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    with Console(stderr=True).status("fitting link rates") as status:
        papers = Papers(options.data)
        beds = beds_of(papers)
        bench = Bench(papers, beds, pictures, options.seconds)
        found["fitted"] = {
            "cupcake_pcie_gbps": beds.cupcake_pcie.inter_gbps,
            "nvlink_inter_gbps": beds.nvlink.inter_gbps,
            "gpt2_backward_ms": bench.gpt2_backward_us() / 1e3,
        }
        for make in EXPERIMENTS:
            if make.__name__ in options.only:
                status.update(f"{make.__doc__}")
                found[make.__name__] = make(bench)._asdict()
                write(path, {name: part for name, part in found.items() if name != "made"}, quiet=True)
    if all(name in found for name in names):
        write_whole(options.out / "search_times.md", search_times_page(json.loads(path.read_text())))
        print(f"written to {options.out / 'search_times.md'}")
    return 0
