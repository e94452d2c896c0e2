"""What a profiling found, in lines of text."""

from gradwire.costs.codecs import time_at
from gradwire.profiler.profiling import Profiling

__all__ = ["described"]

_SHOWN_BYTES = 2**20


def described(found: Profiling) -> str:
    """The model's times, the links with how well a line fits them, and the codecs at 1 MiB of gradient."""
    profile = found.profile
    forward = sum(tensor.forward_us or 0.0 for tensor in profile.tensors)
    backward = sum(tensor.backward_us for tensor in profile.tensors)
    megabytes = sum(tensor.nbytes for tensor in profile.tensors) / 1e6
    lines = [
        f"{profile.model}: {len(profile.tensors)} tensors, {megabytes:.2f} MB of gradients, batch {profile.batch}, medians of "
        f"{profile.steps} steps on {profile.device}",
        f"  forward {_ms(forward)}, backward {_ms(backward)} ({_ms(profile.loaded_backward_us or 0.0)} beside exchanges), "
        f"optimizer {_ms(profile.optimizer_us or 0.0)}",
    ]
    for name, fit in found.fits.items():
        lines.append(
            f"{name}: {fit.alpha_us:.0f} us + {fit.us_per_byte * 1e3:.4f} us for each 1000 bytes that a rank holds "
            f"({len(fit.points)} times, R2 {fit.r2:.4f}, worst error {100 * fit.worst_relative_error:.0f} %)"
        )
    lines.append(f"cluster: {found.cluster.nodes} x {found.cluster.ranks_per_node} ranks")
    if found.cluster.launch_us is not None:
        lines.append(f"  each exchange takes {found.cluster.launch_us:.0f} us of the processor")
    links = {"intra": found.cluster.intra, "inter": found.cluster.inter, "allreduce": found.cluster.allreduce}
    lines += [f"  {name} {link.alpha_us:.0f} us, {link.gbps:.4g} Gb/s" for name, link in links.items() if link]
    for codec in found.costs.codecs:
        encode, decode = (time_at(points, _SHOWN_BYTES) for points in (codec.encode, codec.decode))
        lines.append(f"{codec.spec!r} on {codec.device}: 1 MiB encoded in {encode:.0f} us, decoded in {decode:.0f} us")
    return "\n".join(lines) + "\n"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"
