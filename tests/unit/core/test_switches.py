"""Environment variables that are on or off."""

import sys

import pytest

from gradwire.core import Made
from gradwire.core.switches import RECORD_ARGUMENTS, SHARED_MEMORY, check_switches, switch
from gradwire.errors import FormatError
from gradwire.transport import tls


@pytest.mark.parametrize(("value", "shares"), [("", True), ("on", True), ("1", True), ("off", False), ("0", False)])
def test_a_switch_is_on_or_off(value: str, shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, value)
    monkeypatch.setenv(tls.SWITCH, value)
    assert switch(SHARED_MEMORY) is shares and tls._by_environment() is (shares and value != "")
    check_switches()


@pytest.mark.parametrize("value", ["OFF", "off ", "false", "2"])
def test_other_words_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED_MEMORY, value)
    with pytest.raises(FormatError, match=f"{SHARED_MEMORY} is {value!r}, which is neither on nor off. .* not at all for `on`"):
        check_switches()
    monkeypatch.setenv(tls.SWITCH, value)
    with pytest.raises(tls.TlsError, match=tls.SWITCH):
        tls._by_environment()


def test_records_keep_the_arguments_of_a_script_by_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--lr", "0.1"])
    for value, command in ("", "python train.py"), ("0", "python train.py"), ("on", "python train.py --lr 0.1"):
        monkeypatch.setenv(RECORD_ARGUMENTS, value)
        assert Made.now().command == command
    monkeypatch.setenv(RECORD_ARGUMENTS, "yes")
    with pytest.raises(FormatError, match=f"{RECORD_ARGUMENTS} is 'yes'"):
        Made.now()
