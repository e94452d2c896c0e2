"""Keeps the codecs' times of this machine in a file of the user's cache folder, so that each spec is measured once.

The file is `codecs-<key>.json` in `$GRADWIRE_CACHE_DIR`, or else in the folder `gradwire` of `$XDG_CACHE_HOME` or `~/.cache`. Its
key is made of the processor or GPU, the versions of torch and gradwire, and the kernels' library, so other machines and other
kernels have files of their own. An unreadable file is measured anew; one that cannot be written costs each run that.
"""

import hashlib
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from gradwire._version import __version__
from gradwire.core import LIBRARY, Costs, Spec, make_folder, processor_name, write_whole
from gradwire.errors import FormatError
from gradwire.profiler.codecs import measure_codecs

_LOGGER = logging.getLogger("gradwire")


def cached_codecs(specs: Sequence[Spec], device: torch.device, sizes: Sequence[int], seconds: float) -> Costs:
    """Return the times of these specs on this machine. Specs that the file lacks are measured, for about `seconds` in all.

    sizes: bytes of gradient, as `measure_codecs` takes them. They are part of the key.
    """
    name, kept = f"codecs-{_key(device, tuple(sizes))}.json", Costs(codecs=())
    with suppress(OSError, FormatError, RuntimeError):
        kept = Costs.load(_folder() / name)
    kind = "cpu" if device.type == "cpu" else "gpu"
    known = {codec.spec for codec in kept.codecs if codec.device == kind}
    missing = [spec for spec in dict.fromkeys(specs) if spec.encodes and spec not in known]
    if not missing:
        return kept
    measured = measure_codecs(missing, device, sizes, seconds / (2 * len(sizes) * len(missing)))
    costs = Costs(codecs=(*kept.codecs, *measured.codecs), made=measured.made)
    try:
        write_whole(make_folder(_folder()) / name, costs.to_json())
    except (OSError, RuntimeError) as error:
        _LOGGER.debug("codecs' times are measured in each run: %s", error)
    return costs


def _folder() -> Path:
    """Return the folder of gradwire's caches for this user. Raises RuntimeError where the user has no home."""
    if own := os.environ.get("GRADWIRE_CACHE_DIR", ""):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "gradwire"


@cache
def _key(device: torch.device, sizes: tuple[int, ...]) -> str:
    name = processor_name() if device.type == "cpu" else torch.cuda.get_device_name(device)
    library = hashlib.sha256(LIBRARY.read_bytes()).hexdigest() if LIBRARY.exists() else "reference"
    simd = torch.backends.cpu.get_cpu_capability()
    text = repr((name, simd, torch.__version__, __version__, library, sizes))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
