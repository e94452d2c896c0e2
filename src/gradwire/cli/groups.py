"""Options of the command line in groups: a parameter whose type is a NamedTuple becomes one option for each field."""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer takes it, with the fields of its groups in the place of the groups.

    >>> from typing import NamedTuple
    >>> class Size(NamedTuple):
    ...     nodes: int = 2
    >>> def train(job: str, size: Size) -> None:
    ...     print(job, size)
    >>> grouped(train)(job="mlp", nodes=4)
    mlp Size(nodes=4)
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if hasattr(kind, "_fields"):
            groups[parameter.name] = kind
            parameters += _fields(kind)
        else:
            parameters.append(parameter.replace(annotation=kind))

    @wraps(command)
    def spread(**given: Any) -> None:
        made = {name: kind(*[given.pop(field) for field in kind._fields]) for name, kind in groups.items()}
        command(**given, **made)

    spread.__dict__["__signature__"] = inspect.Signature(
        [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    )
    spread.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return spread


def _fields(group: Any) -> list[inspect.Parameter]:
    """One parameter for each field, with its type and its default."""
    kinds, defaults = get_type_hints(group, include_extras=True), group._field_defaults
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(name, inspect.Parameter.empty),
            annotation=kinds[name],
        )
        for name in group._fields
    ]
