"""What a process does when it first needs a name of gradwire: each rank of a job does it at its start."""

import gc
import importlib
from types import ModuleType

import pytest

import gradwire as gw
from gradwire.compressors import compressor_for
from gradwire.core import as_schedule, entry_points


def test_no_garbage_is_collected_while_modules_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    collects, load = list[bool](), importlib.import_module

    def seen(name: str) -> ModuleType:
        collects.append(gc.isenabled())
        return load(name)

    monkeypatch.setattr(importlib, "import_module", seen)
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            assert gw.__getattr__("QSGD") is gw.QSGD
            assert gc.isenabled() == enabled
        finally:
            gc.enable()
    assert collects and not any(collects)


def test_what_gradwire_has_itself_needs_no_list_of_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def read() -> None:
        raise AssertionError("the entry points of all installed packages were read")

    monkeypatch.setattr(entry_points, "_groups", read)
    for kind in ("backward", "pipelined", "delayed", "local"):
        assert as_schedule(kind).word == as_schedule({"kind": kind}).word == kind
    for spec in (gw.QSGD(bits=4), gw.Identity(), gw.TopK(ratio=0.01), gw.ErrorFeedback(gw.QSGD(bits=2)), gw.PowerSGD(rank=2)):
        assert compressor_for(spec).spec == spec
