"""What a process does when it first needs a name of gradwire: each rank of a job does it at its start."""

import gc
import importlib
from types import ModuleType

import pytest

import gradwire as gw


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
