"""A timeline as text, for `gradwire simulate`."""

from gradwire.sim.timeline import Timeline

__all__ = ["as_table"]


def as_table(timeline: Timeline) -> str:
    """What each resource did, then what the step is made of, as lines of text. docs/simulator.md says how to read them."""
    length = timeline.length_us
    lines = [f"{'resource':<12} {'busy ms':>10} {'of step':>8} {'exposed ms':>11}"]
    for resource in timeline.resources:
        share = 100 * resource.busy_us / length if length else 0.0
        lines.append(f"{resource.name:<12} {_ms(resource.busy_us):>10} {share:>6.1f} % {_ms(resource.exposed_us):>11}")
    steps = timeline.steps
    parts = (
        *([("optimizer", timeline.optimizer_us)] if timeline.optimizer_us else []),
        ("forward", timeline.forward_us),
        ("backward", timeline.backward_us),
        ("exposed communication", timeline.exposed_comm_us),
        ("exposed codec", timeline.exposed_codec_us),
        ("idle", timeline.idle_us),
    )
    lines.append("")
    mean = f", mean of {steps} steps" if steps > 1 else ""
    lines.append(f"step {_ms(timeline.step_us)} ms ({timeline.schedule}{mean})")
    lines += [f"  {name:<22} {_ms(us / steps):>10} ms" for name, us in parts]
    lines.append(f"Cupcake's communication overhead: {_ms(timeline.cupcake_comm_us / steps)} ms")
    lines.append(
        f"A rank sends {_mb(timeline.sent_bytes / steps)} MB a step; its intra link carries "
        f"{_mb(timeline.intra_bytes / steps)} MB, its node's inter link {_mb(timeline.inter_bytes / steps)} MB."
    )
    bubbles_us = sum(bubble.end_us - bubble.start_us for bubble in timeline.bubbles)
    lines.append(f"Bubbles on the links: {len(timeline.bubbles)}, {_ms(bubbles_us)} ms.")
    if not timeline.steady:
        lines.append(
            f"The steps did not settle within {timeline.simulated_steps}; all numbers are means of the later half."
        )
    return "\n".join(lines) + "\n"


def _ms(us: float) -> str:
    return f"{us / 1000:.3f}"


def _mb(size: float) -> str:
    return f"{size / 1e6:.3f}"
