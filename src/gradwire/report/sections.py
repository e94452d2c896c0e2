"""Makes the sections of a run's page. A section without data gives the reason."""

import statistics
from collections.abc import Iterator, Sequence

from gradwire.record import Interval, Rival, Run, TensorRecord
from gradwire.report.charts import STYLES, Bar, Curve, bars, line_chart
from gradwire.report.html import Element, counted, milliseconds, short, size, tag
from gradwire.report.modules import by_module
from gradwire.report.steps import Predicted, a_round, batches_of, step_figure, step_table

FINAL_STEPS = 10


def step_us(run: Run) -> float:
    """Return the median step without the warm-up, in microseconds. Of local steps: the median over exchanges of their mean."""
    return statistics.median(_lengths(run)) if run.steps else 0.0


def spread(run: Run) -> tuple[float, float]:
    """Return the 10th and the 90th percentile of the steps, in microseconds."""
    lengths = sorted(_lengths(run))
    return lengths[len(lengths) // 10], lengths[-1 - len(lengths) // 10]


def _lengths(run: Run) -> list[float]:
    records = list(zip(run.optimizer_steps, run.local_steps, run.steps, strict=True))
    lengths = [(last - local, step.step_us / local) for last, local, step in records]
    return [us for before, us in lengths if before >= lengths[0][0] + run.warmup_steps] or [us for _, us in lengths]


def sent_bytes(run: Run) -> float:
    """Return the payload bytes that one rank sends in a step; of local steps, the mean."""
    return run.wire_bytes / run.round_steps


def final_loss(losses: Sequence[float]) -> float:
    """Return the mean of the last FINAL_STEPS losses."""
    return statistics.fmean(losses[-FINAL_STEPS:])


def summary(run: Run) -> str:
    """Return the first line of the page and of the command."""
    if not run.steps:
        return "No step was recorded: the loop ended before its first step."
    sends = f"sends {size(sent_bytes(run))} per step and rank, for gradients of {size(run.gradient_bytes)}"
    rounds = ""
    if run.round_steps > 1:
        rounds = f" A{a_round(run)[1:]} takes {milliseconds(step_us(run) * run.round_steps)} and sends {size(run.wire_bytes)}."
    if not run.rivals:
        low, high = spread(run)
        return (
            f"{_a_step(run)} takes {milliseconds(step_us(run))} (median; most are between {milliseconds(low)} and "
            f"{milliseconds(high)}) and {sends}.{rounds}"
        )
    rival = run.rivals[0]
    speed = rival.speedup
    interval = f"95 % interval {speed.low:.2f} to {speed.high:.2f}"
    if speed.low > 1:
        speed_text = f"{speed.ratio:.2f} times as fast as {rival.name} ({interval})"
    elif speed.high < 1:
        speed_text = f"slower than {rival.name}, at {speed.ratio:.2f} times its speed ({interval})"
    else:
        speed_text = f"not measurably faster or slower than {rival.name} ({speed.ratio:.2f} times, {interval})"
    bytes_text = f"; {share(sent_bytes(run), rival.sent_bytes)} than {rival.name}" if rival.sent_bytes else ""
    return (
        f"gradwire is {speed_text}: {milliseconds(step_us(run))} a step instead of {milliseconds(rival.step_us)}. "
        f"It {sends}{bytes_text}.{rounds}"
    )


def _a_step(run: Run) -> str:
    return "A step" if run.round_steps == 1 else "A local step"


def share(nbytes: float, others: float) -> str:
    """Compare a number of bytes with another one, in words.

    >>> share(10, 80), share(10, 5), share(10, 10)
    ('8 times fewer bytes', '2 times more bytes', 'no fewer bytes')
    """
    if not nbytes or not others or abs(nbytes - others) < 0.005 * others:
        return "no fewer bytes"
    fewer, more = f"{short(others / nbytes)} times fewer bytes", f"{short(nbytes / others)} times more bytes"
    return fewer if nbytes < others else more


def decided(run: Run) -> list[str]:
    """Describe the plan: a line for each spec and scheme, the most bytes first."""
    groups: dict[tuple[str, str], list[int]] = {}
    for index, bucket in enumerate(run.plan.buckets):
        specs = sorted({repr(spec) for spec in bucket.specs if spec.encodes})
        way = " then ".join(dict.fromkeys(bucket.link_tasks))
        groups.setdefault((" and ".join(specs) or "uncompressed", way), []).append(index)
    rows = []
    for (spec, way), indices in groups.items():
        tensors = counted(sum(len(run.plan.buckets[index].tensors) for index in indices), "tensor")
        nbytes = sum(run.buckets[index].gradient_bytes for index in indices)
        rows.append((nbytes, f"{tensors} of {size(nbytes)} in {counted(len(indices), 'bucket')}: {spec}, by {way}."))
    return [line for _, line in sorted(rows, key=lambda row: -row[0])]


MOST_ROWS = 12
"""Number of rows of a list that are visible at once; the others fold out."""
SMOOTHED_PARTS = 30
"""A running mean covers this fraction of the steps: one part of SMOOTHED_PARTS."""


def section_facts(run: Run) -> Element:
    """Make the list of the most important numbers."""
    facts = {
        "step, median": milliseconds(step_us(run)) if run.steps else "none",
        "sent, a step and rank": size(sent_bytes(run)),
        "gradients": size(run.gradient_bytes),
        "extra memory": size(run.memory.residual_bytes + run.memory.payload_bytes + run.memory.weight_bytes),
        "steps": str(_count(run)),
        **({"local steps a round": str(run.round_steps)} if run.round_steps > 1 else {}),
        "ranks, nodes": f"{run.world_size}, {run.nodes}",
    }
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()), class_="facts")


def decision(run: Run, predicted: Predicted) -> Iterator[Element]:
    yield tag("p", f"The plan came from {run.decision.by}.")
    trains = "" if run.round_steps == 1 else f" Ranks train alone, and exchange what they learned once in {a_round(run)}."
    yield tag("p", f"The schedule is {run.plan.schedule!r}.{trains}")
    yield tag("ul", *(tag("li", line) for line in decided(run)))
    if run.decision.words:
        yield tag("pre", "\n".join(run.decision.words))
    if run.decision.alternatives:
        yield tag("h3", "Tried on the live job")
        yield bars([
            Bar(each.name + " (kept)" * each.kept, milliseconds(each.step_us),
                [("solid" if each.kept else "hatched", each.step_us)])
            for each in run.decision.alternatives
        ])  # fmt: skip
    if (predicted_times := run.plan.prediction) is not None:
        plain, least = milliseconds(predicted_times.baseline_step_us), milliseconds(predicted_times.lower_bound_us)
        bounds = f"{plain} with plain all-reduce, at least {least}"
        yield tag("p", f"The planner predicted {milliseconds(predicted_times.step_us)} per step ({bounds} with any plan).")


def speed(run: Run, predicted: Predicted) -> Iterator[Element]:
    if not run.steps:
        yield _left_out("No step was recorded, so there are no times.")
        return
    low, high = spread(run)
    between = f"{milliseconds(low)} and {milliseconds(high)}"
    takes = f"{_a_step(run)} takes {milliseconds(step_us(run))} (median); eight of ten steps take between {between}."
    yield tag("p", takes if run.round_steps == 1 else f"{takes} Times are the means of steps from one exchange to the next.")
    if not run.rivals:
        yield _left_out("No other method was measured in this run: use gradwire bench or gradwire demo to compare.")
    else:
        others = [Bar(each.name, milliseconds(each.step_us), [("hatched", each.step_us)]) for each in run.rivals]
        yield bars([Bar("this run", milliseconds(step_us(run)), [("solid", step_us(run))]), *others])
    for rival in run.rivals:
        yield tag("p", _saved(run, rival))
        if rival.again is not None:
            same = f"A/A: {rival.name} against itself in the same run is {_interval(rival.again)}."
            yield _left_out(f"{same} A ratio within this interval is noise.")
        else:
            yield _left_out(f"{rival.name} was not measured twice, so the noise of its ratio (A/A) is unknown.")
    lengths, exposed = (
        Curve(name, run.optimizer_steps, [us / 1e3 / local for us, local in zip(times, run.local_steps, strict=True)])
        for name, times in (
            ("step", [step.step_us for step in run.steps]),
            ("exposed exchange", [step.exposed_us for step in run.steps]),
        )
    )
    yield line_chart("Step time", "step", "ms", [lengths, exposed])


def one_step(run: Run, predicted: Predicted) -> Iterator[Element]:
    foreseen, measured = predicted.timeline, run.timeline if run.counts_local_steps else None
    batches = 1 if measured is None else batches_of(measured)
    if foreseen is not None or measured is not None:
        yield step_figure(foreseen, measured)
        yield step_table(foreseen, measured)
    if batches > 1:
        yield _left_out(
            f"A step has {batches} forwards and backwards, since gradients are accumulated. The measured times are their sums. "
            "The prediction has the forwards and backwards of the loop that was profiled, so there is no ratio."
        )
    elif foreseen is not None and measured is not None:
        ratio = foreseen.step_us / measured.step_us if measured.step_us else 0.0
        yield tag("p", f"Predicted over measured: {short(ratio)}.")
    if foreseen is None:
        yield _left_out(predicted.why_not)
    if measured is None:
        yield _left_out(f"The step has no measured timeline: {_why_not_measured(run)}.")


def _why_not_measured(run: Run) -> str:
    if run.timeline is not None:
        return f"gradwire 0.3 recorded it, and drew {a_round(run)} as one step. Record the run again"
    return "no whole step was recorded" if run.device == "cpu" else f"lanes on {run.device} queue work without waiting"


def loss(run: Run, predicted: Predicted) -> Iterator[Element]:
    numbers = zip(run.optimizer_steps, run.steps, strict=True)
    steps = [(at, step.end_s, step.loss) for at, step in numbers if step.loss is not None]
    if not steps:
        yield _left_out("No loss was logged. Call recording.log(loss=loss) in every step.")
        return
    values = [value for _, _, value in steps]
    rivals = [rival for rival in run.rivals if rival.loss]
    means = [f"this run {short(final_loss(values))}"]
    means += [f"{rival.name} {short(final_loss(rival.loss))}" for rival in rivals]
    yield tag("p", f"Mean loss of the last steps: {', '.join(means)}.")
    by_step = [Curve("this run", [at for at, _, _ in steps], _smooth(values))]
    by_time = [Curve("this run", [at for _, at, _ in steps], by_step[0].y)]
    drawn = rivals[: len(STYLES) - 1]
    for rival in drawn:
        smooth = _smooth(list(rival.loss))
        by_step.append(Curve(rival.name, [steps[0][0] + at for at in range(len(smooth))], smooth))
        by_time.append(Curve(rival.name, rival.end_s, smooth))
    yield tag(
        "div",
        line_chart("Loss against step", "step", "loss", by_step),
        line_chart("Loss against time", "seconds", "loss", by_time),
        class_="pair",
    )
    if others := [rival.name for rival in rivals[len(drawn) :]]:
        yield _left_out(f"Not drawn: {', '.join(others)}. A chart has at most {len(STYLES)} curves.")
    if len(values) >= SMOOTHED_PARTS:
        yield tag("p", f"Lines are running means over {len(values) // SMOOTHED_PARTS} steps.", class_="note")


def bytes_by_bucket(run: Run, predicted: Predicted) -> Iterator[Element]:
    """Draw the bytes that each bucket sends, next to the bytes of its gradients."""
    rows = []
    for index, (record, bucket) in enumerate(zip(run.buckets, run.plan.buckets, strict=True)):
        specs = sorted({repr(spec) for spec in bucket.specs})
        count = len(bucket.tensors)
        name = f"{index}: {bucket.tensors[0]}" + f" and {count - 1} more" * (count > 1)
        text = f"{size(record.wire_bytes)} of {size(record.gradient_bytes)}, {' and '.join(specs)}"
        text += f", {record.chunks} chunks" * (record.chunks > 1)
        parts = [("solid", record.inter_bytes), ("dotted", record.intra_bytes)]
        rows.append(Bar(name, text, parts, record.gradient_bytes))
    inter, intra = (size(sum(getattr(b, field) for b in run.buckets)) for field in ("inter_bytes", "intra_bytes"))
    yield tag("p", f"A rank sends {size(run.wire_bytes)} in {a_round(run)}: {inter} between nodes and {intra} inside its node.")
    patterns = {"solid": "between nodes", "dotted": "inside the node", "outline": "the gradients themselves"}
    keys = [tag("span", tag("i", class_=f"swatch {p}"), f" {name}", class_="key") for p, name in patterns.items()]
    yield tag("p", *keys)
    yield from _folded(rows, "buckets")


def errors(run: Run, predicted: Predicted) -> Iterator[Element]:
    """Draw the error of one encode of each tensor."""
    compressed = {name for b in run.plan.buckets for name in b.tensors if b.spec_of(name).encodes}
    if not compressed:
        yield _left_out("The plan compresses no tensor, so there is no error.")
        return
    measured = [tensor for tensor in run.tensors if tensor.error and tensor.name in compressed]
    if not measured:
        yield _left_out("No error was measured. Record with error_steps above 0. Specs that sum in rounds have no error.")
        return
    rows = []
    for tensor in sorted(measured, key=lambda each: -_mean_error(each)):
        bits = short(tensor.bits[-1][1]) if tensor.bits else "?"
        text = f"{short(100 * _mean_error(tensor))} %, {bits} bits per element"
        rows.append(Bar(tensor.name, text, [("hatched", _mean_error(tensor))]))
    yield tag(
        "p",
        "Relative l2 error of one encode of a rank's gradient, the mean over the measured steps. The error does not include "
        "residuals.",
    )
    yield from _folded(rows, "tensors")
    if without := len(compressed) - len(measured):
        yield _left_out(f"{without} compressed tensors were not measured: the run was short, or their spec sums in rounds.")


def encodes(run: Run, predicted: Predicted) -> Iterator[Element]:
    """Make a table of what encodes did to gradients, by bucket."""
    rows = []
    for index, (record, bucket) in enumerate(zip(run.buckets, run.plan.buckets, strict=True)):
        if record.sent_energy is not None:
            values = record.sent_energy, record.residual_norm or 0.0, record.error_norm or 0.0
            name = f"{index}: {bucket.tensors[0]}"
            rows.append(tag("tr", tag("th", name), *(tag("td", f"{value:.2f}") for value in values)))
    if not rows:
        yield _left_out("No encode was sampled: the plan compresses nothing, or the run was short.")
        return
    yield tag(
        "p",
        "One encode of a rank's gradient in the last samples, over the gradient: the energy of what was sent, the norm of the "
        "residual, and the norm of the error. A sent energy of 0.8 to 1.5 is usual.",
    )
    head = tag("tr", *(tag("th", name) for name in ("bucket", "sent energy", "residual", "error")))
    yield tag("table", tag("thead", head), tag("tbody", *rows[:MOST_ROWS]))
    if len(rows) > MOST_ROWS:
        every = tag("table", tag("thead", head), tag("tbody", *rows))
        yield tag("details", tag("summary", f"All {len(rows)} buckets"), every)


def bits(run: Run, predicted: Predicted) -> Iterator[Element]:
    known = [tensor for tensor in run.tensors if tensor.bits and tensor.numel]
    if not known:
        yield _left_out("The run has no bits by tensor.")
        return
    last = [(tensor.bits[-1][1], tensor.numel) for tensor in known]
    mean = sum(b * n for b, n in last) / sum(n for _, n in last)
    least, most = min(b for b, _ in last), max(b for b, _ in last)
    by_tensor = f"{short(least)} to {short(most)} by tensor"
    yield tag("p", f"At the end an element takes {short(mean)} bits on average ({by_tensor}).")
    changes = sorted({step for tensor in known for step, _ in tensor.bits})
    if len(changes) == 1:
        yield _left_out("The bits of no tensor changed during the run.")
        return
    end = max([changes[-1], *(step.step for step in run.steps)])
    at: list[float] = [changes[0], *(step for step in changes[1:] for _ in range(2)), end]
    means, lows, highs = [], [], []
    for step in changes:
        until = [([b for begin, b in tensor.bits if begin <= step], tensor.numel) for tensor in known]
        there = [(b[-1], n) for b, n in until if b]  # the others were not known yet
        means += [sum(b * n for b, n in there) / sum(n for _, n in there)] * 2
        lows += [min(b for b, _ in there)] * 2
        highs += [max(b for b, _ in there)] * 2
    curves = [Curve("mean over elements", at, means), Curve("most", at, highs), Curve("least", at, lows)]
    yield line_chart("Bits per element", "step" if run.round_steps == 1 else "exchange", "bits", curves)


def memory(run: Run, predicted: Predicted) -> Iterator[Element]:
    gradients, residuals, payloads = run.memory.gradient_bytes, run.memory.residual_bytes, run.memory.payload_bytes
    weights = run.memory.weight_bytes
    yield bars([
        Bar("buffers of gradients", size(gradients), [("solid", gradients)]),
        Bar("residuals and other state", size(residuals), [("hatched", residuals)]),
        Bar("payloads and partial sums", size(payloads), [("dotted", payloads)]),
        *([Bar("copies of weights", size(weights), [("solid", weights)])] if weights else []),
    ])  # fmt: skip


SECTIONS = {
    "What was decided and why": decision,
    "Speed and what it saved": speed,
    "One step": one_step,
    "Loss": loss,
    "Module by module": by_module,
    "Bytes by bucket": bytes_by_bucket,
    "Error by tensor": errors,
    "Encodes by bucket": encodes,
    "Bits over time": bits,
    "Memory of one rank": memory,
}


def made(run: Run) -> Element:
    """Write the origin of the numbers."""
    about = f"{run.model} on {run.device}, recorded by rank 0 on {run.made.host} at {run.made.date} by"
    return tag("p", f"{about} ", tag("code", run.made.command), class_="note")


def _saved(run: Run, rival: Rival) -> str:
    """Write the time and the bytes that the run saved against a rival."""
    count = _count(run)
    seconds = (rival.step_us - step_us(run)) * count / 1e6
    words = f"Against {rival.name}: {_interval(rival.speedup, ' times as fast')}. "
    words += f"Over {count} steps this run {'saved' if seconds >= 0 else 'cost'} {short(abs(seconds))} s"
    if rival.sent_bytes is None:
        return words + "."
    fewer = (rival.sent_bytes - sent_bytes(run)) * count
    what = "saved" if fewer >= 0 else "cost"
    return f"{words}, and {what} {size(abs(fewer))} per rank: {share(sent_bytes(run), rival.sent_bytes)}."


def _interval(speedup: Interval, what: str = "") -> str:
    return f"{speedup.ratio:.2f}{what} (95 % interval {speedup.low:.2f} to {speedup.high:.2f})"


def _count(run: Run) -> int:
    """Return the number of optimizer steps. The record of a long run skips steps."""
    return round(run.optimizer_steps[-1] - run.optimizer_steps[0] + run.local_steps[0]) if run.steps else 0


def _left_out(why: str) -> Element:
    return tag("p", why, class_="note")


def _folded(rows: list[Bar], what: str) -> Iterator[Element]:
    if len(rows) <= MOST_ROWS:
        yield bars(rows)
        return
    yield bars(rows[:MOST_ROWS])
    yield tag("details", tag("summary", f"All {len(rows)} {what}"), bars(rows))


def _mean_error(tensor: TensorRecord) -> float:
    return statistics.fmean(error for _, error in tensor.error)


def _smooth(values: list[float]) -> list[float]:
    """Return the running mean of the losses."""
    window = max(1, len(values) // SMOOTHED_PARTS)
    return [statistics.fmean(values[max(0, index + 1 - window) : index + 1]) for index in range(len(values))]
