"""Specs as they are written in Python, for command lines: `ErrorFeedback(TopK(0.01))`."""

import ast
from typing import Any

import msgspec

from gradwire.core.checks import near, show
from gradwire.core.specs.base import Spec, installed_specs, registered_specs
from gradwire.errors import SpecError


def spec_from_text(text: str) -> Spec:
    """The spec whose repr this is, or an abbreviation of it with fields left out. Nothing is evaluated but literals.

    Raises SpecError naming what is wrong.

    >>> spec_from_text("ErrorFeedback(QSGD(bits=2))")
    ErrorFeedback(QSGD(bits=2, block=128, rounding='nearest'))
    >>> spec_from_text("Identity")
    Identity()
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{show(text)} is no spec: write one as in Python, such as QSGD(bits=4).") from error
    return _spec(tree, text)


def _spec(node: ast.expr, text: str) -> Spec:
    call = ast.Call(func=node, args=[], keywords=[]) if isinstance(node, ast.Name) else node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise SpecError(f"{show(text)} is no spec: write one as in Python, such as QSGD(bits=4).")
    name = call.func.id
    by_name = {cls.__name__: cls for cls in registered_specs().values()}
    if name not in by_name:
        by_name = {cls.__name__: cls for cls in installed_specs().values()}
    if name not in by_name:
        raise SpecError(
            f"there is no spec {show(name)}: it must be one of {', '.join(sorted(by_name))}{near(name, by_name)}."
        )
    cls, fields = by_name[name], msgspec.structs.fields(by_name[name])
    known = [field.name for field in fields]
    if len(call.args) > len(known):
        raise SpecError(f"{name} takes at most {len(known)} values ({', '.join(known)}), not {len(call.args)}.")
    values = dict(zip(known, (_value(argument, text) for argument in call.args), strict=False))
    for keyword in call.keywords:
        if keyword.arg not in known or keyword.arg in values:
            told = "is given twice" if keyword.arg in values else f"is not a field of {name}: it has {', '.join(known)}"
            raise SpecError(f"{keyword.arg} {told}.")
        values[keyword.arg] = _value(keyword.value, text)
    if missing := [field.name for field in fields if field.required and field.name not in values]:
        raise SpecError(f"{missing[0]} is missing in {name}(...): it has no default. Write {name}({missing[0]}=...).")
    return cls(**values)


def _value(node: ast.expr, text: str) -> Any:
    if isinstance(node, (ast.Call, ast.Name)):
        return _spec(node, text)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SpecError(
            f"{ast.unparse(node)} in {show(text)} is neither a number, a word in quotes nor a spec."
        ) from error
