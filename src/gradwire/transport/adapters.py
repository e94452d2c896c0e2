"""The speed of this machine's network adapters, as the kernel reports it."""

from pathlib import Path

SLOW_GBPS = 50.0
"""Between nodes with slower adapters, payloads of a GPU travel through the host's memory
(docs/decisions/053-payloads-through-the-host.md)."""


def adapter_gbps(system: Path = Path("/sys/class")) -> float | None:
    """Gb/s of the fastest adapter that is up, InfiniBand too; None where the kernel does not know the speed of one of them."""
    found = []
    for interface in sorted((system / "net").glob("*")):
        if not (interface / "device").exists():
            continue  # a bridge, a tunnel or loopback
        if _read(interface / "operstate") == "up":
            speed = _read(interface / "speed")
            if not speed.isdigit():
                return None
            found.append(int(speed) / 1000)
    for rate in (system / "infiniband").glob("*/ports/*/rate"):  # such as "100 Gb/sec (4X EDR)"
        if _read(rate.parent / "state").endswith("ACTIVE"):
            found.append(float(_read(rate).split()[0]))
    return max(found, default=None)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
