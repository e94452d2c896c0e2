"""The names a user may write on the command line, checked before anything heavy is imported."""

import re
from pathlib import Path

from gradwire.errors import FormatError

__all__ = ["GRADWIRE_PREFIX", "JOB_NAMES", "PLAIN_METHODS", "UNLIMITED", "check_job", "check_method", "split_names"]

JOB_NAMES = ("transformer", "mlp", "resnet")
PLAIN_METHODS = ("floor", "ddp", "ddp-2mb", "ddp-fp16", "ddp-powersgd")
GRADWIRE_PREFIX = "gradwire:"
UNLIMITED = "unlimited"
SHORT_SPEC = re.compile(r"identity|fp16|qsgd(?P<bits>[2-8])(?P<feedback>-ef)?")
"""What may follow `gradwire:` besides a JSON spec and the path of a plan."""


def check_job(name: str) -> str:
    """`name` itself if there is such a job. Raises `FormatError` naming it otherwise."""
    if name not in JOB_NAMES:
        raise FormatError(f"there is no job {name!r}. Jobs are {', '.join(JOB_NAMES)}.")
    return name


def check_method(name: str) -> str:
    """`name` itself if it is a method that can be built. Raises `FormatError` naming it otherwise.

    >>> check_method("gradwire:qsgd4-ef")
    'gradwire:qsgd4-ef'
    """
    if name in PLAIN_METHODS:
        return name
    policy = name.removeprefix(GRADWIRE_PREFIX)
    if policy == name:
        raise FormatError(
            f"there is no method {name!r}. Methods are {', '.join(PLAIN_METHODS)}, and gradwire:SPEC, "
            "for example gradwire:qsgd4."
        )
    if SHORT_SPEC.fullmatch(policy) or policy.startswith("{") or Path(policy).is_file():
        return name
    raise FormatError(
        f"{policy!r} in method {name!r} is no policy. Write identity, fp16, qsgd2 to qsgd8, qsgd4-ef (with error "
        'feedback), a JSON spec such as {"id":"qsgd","bits":4}, or the path of a plan file that exists.'
    )


def split_names(text: str) -> list[str]:
    """The names in a comma-separated list. Commas inside braces belong to a JSON spec and do not separate.

    >>> split_names('ddp,gradwire:{"id":"qsgd","bits":4}')
    ['ddp', 'gradwire:{"id":"qsgd","bits":4}']
    """
    names: list[str] = []
    depth = start = 0
    for position, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if letter == "," and depth == 0:
            names.append(text[start:position])
            start = position + 1
    names.append(text[start:])
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))
