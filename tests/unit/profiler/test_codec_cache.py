"""Codecs' times are measured once on a machine, and a bad file costs a measurement at most."""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

from gradwire.core import QSGD, CodecCosts, Costs, ErrorFeedback, Identity, TopK
from gradwire.core.specs import Spec
from gradwire.kernels import reference
from gradwire.profiler import codecs
from gradwire.profiler.codecs import measure_codecs

SIZES = (2**12, 2**13)
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRADWIRE_CACHE_DIR", str(tmp_path / "new" / "cache"))
    return tmp_path / "new" / "cache"


def asked(specs: Sequence[Spec], sizes: Sequence[int] = SIZES) -> tuple[Costs, list[Spec]]:
    """The times, and the specs that were measured for them."""
    measured: list[Spec] = []

    def measure(missing: Sequence[Spec], *arguments: Any) -> Costs:
        measured.extend(missing)
        return measure_codecs(missing, *arguments)

    with mock.patch.object(codecs, "measure_codecs", measure):
        return codecs.cached_codecs(specs, CPU, sizes, 0.01), measured


def test_each_spec_is_measured_once(folder: Path) -> None:
    first, measured = asked([QSGD(bits=4), Identity()])
    assert measured == [QSGD(bits=4)] and [codec.spec for codec in first.codecs] == measured
    more, measured = asked([QSGD(bits=4), ErrorFeedback(QSGD(bits=2))])
    assert measured == [ErrorFeedback(QSGD(bits=2))]
    again, measured = asked([ErrorFeedback(QSGD(bits=2)), QSGD(bits=4)])
    assert measured == [] and again == more and again.codecs[0] == first.codecs[0]
    assert len(list(folder.iterdir())) == 1
    assert asked([QSGD(bits=4)], sizes=(2**12, 2**14))[1] == [QSGD(bits=4)], "times of other sizes"


def test_other_kernels_are_measured_anew(folder: Path) -> None:
    assert asked([QSGD(bits=4)])[1] == [QSGD(bits=4)]
    codecs._key.cache_clear()
    with mock.patch.object(codecs, "kernels_for", lambda device: reference):
        assert asked([QSGD(bits=4)])[1] == [QSGD(bits=4)]
    codecs._key.cache_clear()
    assert asked([QSGD(bits=4)])[1] == [] and len(list(folder.iterdir())) == 2


def test_another_triton_is_measured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(codecs, "kernels_for", lambda device: SimpleNamespace(__name__="gradwire.kernels.triton"))
    keys = set()
    for version in ("3.4.0", "3.5.0"):
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=version))
        keys.add(codecs._key.__wrapped__(torch.device("cuda"), SIZES))
    assert len(keys) == 2


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 7}', b"\xff\x00"])
def test_a_damaged_file_is_measured_anew(folder: Path, content: bytes) -> None:
    asked([QSGD(bits=4)])
    (path,) = folder.iterdir()
    path.write_bytes(content)
    assert asked([QSGD(bits=4)])[1] == [QSGD(bits=4)]
    assert asked([QSGD(bits=4)])[1] == []


class Scaled(Spec, frozen=True):
    """A compressor that another program on this machine brought along."""

    id: ClassVar[str] = "scaled-elsewhere"


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_with_a_spec_that_this_program_lacks_is_measured_anew(folder: Path, inside: bool) -> None:
    asked([ErrorFeedback(QSGD(bits=4)) if inside else QSGD(bits=4)])
    (path,) = folder.iterdir()
    path.write_text(path.read_text().replace('"qsgd"', '"scaled-elsewhere"'))
    assert asked([QSGD(bits=4)])[1] == [QSGD(bits=4)]
    assert asked([QSGD(bits=4)])[1] == []


def test_specs_of_other_packages_are_not_written(folder: Path) -> None:
    """Other runs could not read the file."""
    points, own = ((4096, 5.0),), [QSGD(bits=4), ErrorFeedback(TopK(0.01, values=QSGD(bits=2)))]
    others = [Scaled(), ErrorFeedback(Scaled())]
    made = Costs(codecs=[CodecCosts(spec=spec, device="cpu", encode=points, decode=points) for spec in (*own, *others)])
    with mock.patch.object(codecs, "measure_codecs", lambda *_: made):
        assert codecs.cached_codecs([*own, *others], CPU, SIZES, 0.01) == made
    (path,) = folder.iterdir()
    assert [codec.spec for codec in Costs.load(path).codecs] == own


def test_without_a_folder_each_run_measures(folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("no folder")
    for _ in range(2):
        costs, measured = asked([QSGD(bits=4)])
        assert measured == [QSGD(bits=4)] and len(costs.codecs) == 1


@pytest.mark.parametrize(("base", "expected"), [("/some/cache", "/some/cache/gradwire"), ("relative", None), ("", None)])
def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, base: str, expected: str | None) -> None:
    monkeypatch.delenv("GRADWIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    assert codecs._folder() == (Path(expected) if expected else Path.home() / ".cache" / "gradwire")


def test_without_a_home_each_run_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("GRADWIRE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    costs, measured = asked([QSGD(bits=4)])
    assert measured == [QSGD(bits=4)] and len(costs.codecs) == 1


@pytest.fixture
def default_device() -> Iterator[None]:
    """Tensors without a device are on another one than the model's, as after torch.set_default_device("cuda")."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_gradients_are_drawn_on_the_cpu(default_device: None) -> None:
    assert not measure_codecs([Identity()], CPU, SIZES).codecs


def test_weighing_is_measured_apart_from_encodes() -> None:
    """Encodes of a rank are of some elements, and it weighs all of them."""
    inner = QSGD(bits=3, scale="ls", levels="lloyd")
    plain, weighted = measure_codecs([inner, ErrorFeedback(inner, weights=0.98)], CPU, [2**14, 2**16], seconds=0.01).codecs
    assert plain.weigh == () and [nbytes for nbytes, _ in weighted.weigh] == [2**14]
    assert all(us > 0 for curve in (weighted.encode, weighted.decode, weighted.weigh) for _, us in curve)


def test_encodes_take_cold_gradients_and_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a step, in which the codec comes back to a bucket when other memory went through the caches."""
    seen: list[tuple[int, int]] = []

    class Watched:
        """The spec's compressor, with the addresses of what it encodes."""

        def __init__(self, compressor: Any) -> None:
            self.decode, self._compressor = compressor.decode, compressor

        def encode(self, gradient: torch.Tensor, state: list[torch.Tensor], *arguments: Any) -> None:
            seen.append((gradient.data_ptr(), state[0].data_ptr()))
            self._compressor.encode(gradient, state, *arguments)

    usual = codecs.codec_on
    monkeypatch.setattr(codecs, "codec_on", lambda *how: Watched(usual(*how)))
    monkeypatch.setattr(codecs, "_BUFFER_BYTES", 2**20)
    spec = ErrorFeedback(QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98)
    measure_codecs([spec], CPU, [2**14, 2**16], seconds=1.0)
    for count, own in ((64, seen[:64]), (16, seen[-16:])):
        assert len({gradient for gradient, _ in own}) == len({state for _, state in own}) == count


def test_a_slow_codec_makes_few_states() -> None:
    """Without the compiled kernels an encode takes a hundred times as long."""
    encoded: list[float] = []

    class Slow:
        def __init__(self, compressor: Any) -> None:
            self.decode, self._compressor = compressor.decode, compressor

        def encode(self, *arguments: Any) -> None:
            encoded.append(time.sleep(0.01) or time.perf_counter())
            self._compressor.encode(*arguments)

    usual = codecs.codec_on
    with mock.patch.object(codecs, "codec_on", lambda *how: Slow(usual(*how))):
        measure_codecs([QSGD(bits=4)], CPU, SIZES, seconds=0.02)
    assert len(encoded) < 30, "64 states of each size would be 128"
