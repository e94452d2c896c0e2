"""The README's table: one row for each network that people have, from the results of other benchmarks.

    python -m benchmarks readme                # from results/many_nodes, results/far and results/readme.json
    python -m benchmarks readme --data DIR     # predict the row of GPUs again, too

DIR has the profiles and codec times published with ByteComp, as `python -m benchmarks figures` reads them. The table stands
between two comments of README.md, `MARKS`.
"""

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, between, write
from benchmarks.markdown import table
from benchmarks.sleeping_cells import milliseconds
from benchmarks.testbeds import Bed, Papers, fp32, step_ms
from gradwire.core.files import write_whole
from gradwire.planner.joint import joint

__all__ = ["MARKS", "in_readme", "networks", "predicted", "row_of", "run"]

README = Path(__file__).parents[1] / "README.md"
GPUS = RESULTS / "readme.json"
MARKS = ("<!-- networks: made by `python -m benchmarks readme` -->", "<!-- end of networks -->")
COLUMNS = ("what you have", "link", "DDP", "gradwire, exact", "gradwire, 4 bits", "gradwire")
METHODS = ("auto, exact", "4 bits", "auto")
SHOWN = (
    ("2 machines", "100 Mb/s", "many_nodes/2-transformer-100mbit.json"),
    ("2 machines", "1 Gb/s", "many_nodes/2-transformer-1000mbit.json"),
    ("4 machines", "100 Mb/s", "many_nodes/4-transformer-100mbit.json"),
    ("4 machines", "500 Mb/s", "many_nodes/4-transformer-500mbit.json"),
    ("4 machines", "no limit", "many_nodes/4-transformer-unlimited.json"),
    ("16 machines", "100 Mb/s", "many_nodes/16-transformer-100mbit.json"),
    ("2 sites, a machine each, 50 ms apart", "100 Mb/s", "far/2-100-50.json"),
)
"""What is called what, and the file of results in benchmarks/results."""
GPU_ALGORITHM, GPU_BED, GPU_MODEL = "EF-SignSGD", Bed(2, 1200.0, 25.0), "bert"


def run(arguments: list[str]) -> int:
    """Write the README's table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme")
    parser.add_argument("--data", type=Path, help="folder of published profiles: predict the row of GPUs again")
    options = parser.parse_args(arguments)
    if options.data is not None:
        write(GPUS, predicted(Papers(options.data)))
    block = networks()
    print(block)
    write_whole(README, in_readme(README.read_text(), block))
    return 0


def networks() -> str:
    """The table, from the results."""
    rows = [row_of(what, link, json.loads((RESULTS / name).read_text())["methods"]) for what, link, name in SHOWN]
    return "\n".join(table(COLUMNS, [*rows, gpu_row(json.loads(GPUS.read_text()))], left=2))


def row_of(what: str, link: str, methods: Mapping[str, Any]) -> list[str]:
    """One row: DDP's step, and how many times longer it is than that of each method that was measured.

    >>> auto = {"step_ms": 50.0, "decided": [{"chosen": "QSGD(bits=4, block=128) in 9 buckets"}]}
    >>> row_of("4 machines", "1 Gb/s", {"DDP": {"step_ms": 1200.0}, "auto": auto})
    ['4 machines', '1 Gb/s', '1,200 ms', '-', '-', '24.0x (4 bits)']
    """
    ddp_ms = methods["DDP"]["step_ms"]
    cells = [f"{ddp_ms / methods[name]['step_ms']:.1f}x" if name in methods else "-" for name in METHODS]
    found = re.search(r"bits=(\d)", methods["auto"]["decided"][-1]["chosen"])
    sent = f"{found[1]} bits" if found else "uncompressed"
    return [what, link, f"{milliseconds(ddp_ms)} ms", *cells[:-1], f"{cells[-1]} ({sent})"]


def predicted(papers: Papers) -> dict[str, float]:
    """Steps of BERT-base on two machines of eight V100s, in ms: DDP's, and those of joint plans without and with compression."""
    profile = papers.profile(GPU_MODEL)
    plain = papers.job(profile, GPU_BED, GPU_ALGORITHM, lambda option: not option.compresses)
    coded = papers.job(profile, GPU_BED, GPU_ALGORITHM)
    steps = {"ddp_ms": step_ms(plain, fp32(plain)), "exact_ms": step_ms(plain, joint(plain)), "ms": step_ms(coded, joint(coded))}
    return {name: round(value, 2) for name, value in steps.items()}


def gpu_row(steps: Mapping[str, float]) -> list[str]:
    """The row of GPUs, whose steps are predicted."""
    ddp_ms = steps["ddp_ms"]
    times = f"{ddp_ms / steps['exact_ms']:.1f}x", "-", f"{ddp_ms / steps['ms']:.1f}x ({GPU_ALGORITHM})"
    return ["2 machines of 8 GPUs, **predicted**", "25 Gb/s", f"{ddp_ms:.0f} ms", *times]


def in_readme(text: str, block: str) -> str:
    """The README with the block between its marks.

    >>> in_readme("a\\n" + "\\nold\\n".join(MARKS) + "\\nb", "new") == "a\\n" + "\\nnew\\n".join(MARKS) + "\\nb"
    True
    """
    return between(text, *MARKS, f"\n{block}\n")
