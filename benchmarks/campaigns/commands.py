"""Implements --matrix, --papers, --predict and --what of `gradwire bench`, which finds these functions in the
repository."""

import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from benchmarks.campaigns.ceiling import ceiling_methods, ceiling_tables
from benchmarks.campaigns.matrix import LINKS, NODES, MatrixRequest, run_matrix
from benchmarks.campaigns.matrix_checks import verdict_lines
from benchmarks.campaigns.matrix_tables import terminal_tables
from benchmarks.campaigns.papers_cells import papers_table, papers_verdict
from benchmarks.campaigns.papers_plans import SHARED_SPECS
from benchmarks.campaigns.papers_run import LINKS as PAPERS_LINKS
from benchmarks.campaigns.papers_run import SHAPES, PapersRequest, run_papers
from benchmarks.campaigns.phases import phases_methods, phases_tables
from benchmarks.campaigns.predict import PredictRequest, predictable, run_predict
from benchmarks.campaigns.predictions import prediction_table, summary
from benchmarks.campaigns.schemes_runner import run_schemes, schemes_tables, verdict
from gradwire.bench.names import parse_spec, split_names
from gradwire.bench.progress import ProgressView
from gradwire.bench.runner import BenchRequest, emulation_problem
from gradwire.bench.table import FULL_WIDTH

__all__ = ["METHODS", "TABLES", "bench_matrix", "bench_options", "bench_papers", "bench_predictions", "predictable"]

MATRIX_WIDTH = 260
METHODS = {"ceiling": ceiling_methods, "phases": phases_methods}
"""The measured methods of the bench, by the value of --what."""
TABLES = {"ceiling": ceiling_tables, "phases": phases_tables}
"""Functions from a run to its tables with their results in words, by the value of --what."""


def bench_predictions(request: BenchRequest, specs: list[str], json: Path | None) -> None:
    """Profile, predict and measure; print the predictions next to the measurements."""
    asked = PredictRequest(request, [parse_spec(each) for each in specs])
    run = run_predict(asked, emulation_problem(), ProgressView(Console(stderr=True)), json)
    Console(width=FULL_WIDTH).print(prediction_table(run))
    typer.echo(summary(run))
    failures = [
        f"{cell.job}, {cell.link}, {cell.method}: {cell.failure}" for cell in run.cells if cell.failure is not None
    ]
    for failure in failures:
        typer.echo(f"FAILED: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def bench_matrix(
    jobs: list[str], links: str | None, nodes: int | None, loss_steps: int, seed: int, out: Path, again: bool
) -> None:
    """Measure the cells that are missing; print all that were asked for, and what they show."""
    request = MatrixRequest(
        folder=out,
        jobs=jobs,
        links=split_names(links) if links is not None else LINKS,
        nodes=NODES if nodes is None else (nodes,),
        loss_steps=loss_steps,
        seed=seed,
        again=again,
    )
    say = partial(typer.echo, err=True)
    cells, failures = run_matrix(request, emulation_problem(), ProgressView(Console(stderr=True)), say)
    console = Console() if sys.stdout.isatty() else Console(width=MATRIX_WIDTH)
    for table in terminal_tables(cells):
        console.print(table)
    console.print(f"Ranks share {os.cpu_count()} cores.")
    for line in verdict_lines(cells):
        typer.echo(line)
    for failure in failures:
        typer.echo(f"FAILED, and its cell is not kept: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def bench_papers(
    jobs: list[str],
    links: str | None,
    shapes: Sequence[tuple[int, int]] | None,
    sizes: Mapping[str, Any],
    specs: list[str] | None,
    out: Path,
) -> None:
    """Measure the cells that are missing; print all that were asked for, and the bounds. sizes: fields of `PapersRequest`."""
    request = PapersRequest(
        folder=out,
        specs=[parse_spec(each) for each in specs or SHARED_SPECS],
        jobs=jobs,
        links=split_names(links) if links is not None else PAPERS_LINKS,
        shapes=shapes or SHAPES,
        **sizes,
    )
    cells = run_papers(request, emulation_problem(), ProgressView(Console(stderr=True)), partial(typer.echo, err=True))
    console = Console() if sys.stdout.isatty() else Console(width=MATRIX_WIDTH)
    for cell in cells:
        console.print(papers_table(cell))
    for line in papers_verdict(cells):
        typer.echo(line)
    failures = [failure for cell in cells for failure in cell.failures]
    for failure in failures:
        typer.echo(f"FAILED: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


def bench_options(links: list[str], nodes: int, ranks_per_node: int, json: Path | None) -> None:
    """Measure schemes over each link; with several links the file gets the link's name before its suffix."""
    watch = ProgressView(Console(stderr=True))
    console = Console() if sys.stdout.isatty() else Console(width=FULL_WIDTH)
    for link in links:
        run = run_schemes(link, nodes, ranks_per_node, emulation_problem(), watch)
        for table in schemes_tables(run):
            console.print(table)
        console.print(verdict(run))
        if json is not None:
            run.save(json if len(links) == 1 else json.with_stem(f"{json.stem}-{link}"))
        for problem in run.measured.problems:
            typer.echo(f"Note: {problem}")
