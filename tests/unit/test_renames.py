"""Old names raise errors with the new spellings, which exist, and the page of the move from 0.2 has all of them."""

import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

import benchmarks.__main__
import gradwire as gw
from gradwire.cli import main
from gradwire.exchange import Exchange
from gradwire.renames import RENAMED, has_renamed_keywords, old_words

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "move-from-0.2.md"
MODULES = ["gradwire.collectives", "gradwire.planner"]
FUNCTIONS = [place for place in RENAMED if place.startswith("gradwire.integrations.")]
COMMANDS = [place for place in RENAMED if place.startswith("gradwire ")]


def cases(places: list[str]) -> list[tuple[str, str, str]]:
    return [(place, old, new) for place in places for old, new in RENAMED[place].items()]


def resolves(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    return hasattr(gw if module == "gw" else importlib.import_module(module), attribute)


@pytest.mark.parametrize(("module", "old", "new"), cases(MODULES))
def test_an_import_of_a_moved_name_says_where_it_is(module: str, old: str, new: str) -> None:
    with pytest.raises(ImportError, match=re.escape(f"{new}:")):
        exec(f"from {module} import {old}")
    assert resolves(new)


@pytest.mark.parametrize("module", MODULES)
def test_other_names_that_a_module_lacks_are_as_in_any_module(module: str) -> None:
    assert not hasattr(importlib.import_module(module), "no_such_name")
    with pytest.raises(ImportError, match="cannot import name 'no_such_name'"):
        exec(f"from {module} import no_such_name")


@pytest.mark.parametrize(("place", "old", "new"), cases(["Exchange"]))
def test_an_old_method_of_an_exchange_says_the_new_one(place: str, old: str, new: str) -> None:
    exchange = Exchange.__new__(Exchange)
    with pytest.raises(AttributeError, match=re.escape(new)):
        getattr(exchange, old)
    method, keyword = re.match(r"(\w+)\((\w*)", new).groups()  # type: ignore[union-attr]
    assert not keyword or "=" not in new or keyword in inspect.signature(getattr(Exchange, method)).parameters


def test_other_attributes_that_an_exchange_lacks_have_no_new_spelling() -> None:
    with pytest.raises(AttributeError) as caught:
        _ = Exchange.__new__(Exchange).no_such_name  # type: ignore[attr-defined]
    assert str(caught.value) == "an exchange has no attribute 'no_such_name'."


@pytest.mark.parametrize(("place", "old", "new"), cases(FUNCTIONS))
def test_an_old_keyword_says_the_new_one(place: str, old: str, new: str) -> None:
    module, _, name = place.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    with pytest.raises(TypeError, match=f"{name}.*{old!r}.*it is {new}:"):
        function(**{old: gw.QSGD()})
    assert new in inspect.signature(function).parameters


def test_a_function_with_renamed_keywords_is_called_as_before() -> None:
    def compress(model: int, plan: int = 2) -> int:
        return model + plan

    compress.__module__ = "gradwire.integrations.fsdp2"
    assert has_renamed_keywords(compress)(1) == 3
    assert has_renamed_keywords(compress)(1, plan=4) == 5


@pytest.mark.parametrize(("place", "old", "new"), cases(COMMANDS))
def test_an_old_option_says_the_new_command(
    place: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [old] if old.startswith("--") else ["--methods", f"ddp,{old}:x" if old != "cupcake" else "ddp,cupcake"]
    monkeypatch.setattr(sys, "argv", [*place.split(), *given])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"has no {old}. Since release 0.3 it is {new}" in capsys.readouterr().err
    assert re.match(r"python -m benchmarks (\w+)", new)[1] in benchmarks.__main__.PARTS  # type: ignore[index]


def test_words_of_today_are_no_old_ones() -> None:
    assert old_words([]) == old_words(["plan", "--schedule", "pipelined", "--method=joint"]) == ""
    assert old_words(["simulate", "--what"]) == old_words(["--version"]) == ""
    assert old_words(["plan", "--methods=joint,cupcake"]).startswith("gradwire plan has no cupcake.")


def test_the_page_has_every_old_name() -> None:
    text = PAGE.read_text()
    assert [old for names in RENAMED.values() for old in names if not re.search(rf"{re.escape(old)}\b", text)] == []
