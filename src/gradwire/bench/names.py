"""The names of jobs, methods, policies and specs on the command line, checked before torch is imported."""

import os
import re
from typing import Any

import msgspec

from gradwire.core import QSGD, Cast, Delayed, ErrorFeedback, Identity, spec_from_dict
from gradwire.core.checks import show
from gradwire.core.repository import from_repository
from gradwire.core.specs import Spec, installed_specs, spec_from_text
from gradwire.core.strict import check_plain, parse, read
from gradwire.errors import FormatError
from gradwire.planner.adaptive import AdaptiveBits
from gradwire.planner.policy import Policy, Uniform

JOB_NAMES = ("transformer", "mlp", "resnet", "embeddings")
PLAIN_METHODS = ("floor", "ddp", "ddp-again", "ddp-2mb", "ddp-fp16", "ddp-powersgd")
GRADWIRE_PREFIX = "gradwire:"
WRONG_PREFIX = "wrong-on-purpose:"
"""The prefix of methods that leave out a part of each step, to time the rest. They train wrongly, so the bench keeps neither
their loss nor their speedup."""
UNLIMITED = "unlimited"
_ALL_SCHEDULES = ("backward", "pipelined", "delayed")
DECIDING: dict[str, dict[str, Any]] = {
    "auto": {"plan": "auto", "accuracy": "safe"},
    "auto-exact": {"plan": "auto", "accuracy": "exact"},
    "auto-aggressive": {"plan": "auto", "accuracy": "aggressive"},
    "auto@all": {"plan": "auto", "accuracy": "safe", "schedules": _ALL_SCHEDULES},
    "auto-exact@all": {"plan": "auto", "accuracy": "exact", "schedules": _ALL_SCHEDULES},
    "auto-aggressive@all": {"plan": "auto", "accuracy": "aggressive", "schedules": _ALL_SCHEDULES},
    "adaptive": {"plan": AdaptiveBits()},
}
"""The deciding methods behind `gradwire:`, with their arguments of `gw.parallelize`. A decision takes at most 15 steps. Use as
many warm-up steps to measure only the chosen plan."""
_SCHEDULED = re.compile(
    r"(?P<policy>.+)@(?:(?P<word>backward|pipelined|delayed)|delayed(?P<k>[1-9][0-9]{0,3}|none)(?:\+(?P<correction>.+))?)",
    re.DOTALL,
)
_QUANTISER = re.compile(r"qsgd(?P<bits>[0-9]{1,3})(?P<feedback>-ef)?")


def check_job(name: str) -> str:
    """Return the name of a job. Raises `FormatError` if no job has this name."""
    if name not in JOB_NAMES:
        raise FormatError(f"there is no job {name!r}. The jobs are {', '.join(JOB_NAMES)}.")
    return name


def check_method(name: str) -> str:
    """Return the name of a method. Raises `FormatError` or `SpecError` if no method has this name.

    >>> check_method("gradwire:qsgd4-ef")
    'gradwire:qsgd4-ef'
    """
    if name in PLAIN_METHODS:
        return name
    if name.startswith(WRONG_PREFIX):
        from_repository("campaigns.parts", f"the method {name[:300]!r}").check_part(name)
        return name
    if not name.startswith(GRADWIRE_PREFIX):
        raise FormatError(
            f"there is no method {name!r}. The methods are {', '.join(PLAIN_METHODS)} and gradwire:POLICY, such as "
            "gradwire:qsgd4."
        )
    arguments_of(name.removeprefix(GRADWIRE_PREFIX))
    return name


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of `gw.parallelize` for the text behind `gradwire:`, a name of DECIDING or a policy.

    >>> arguments_of("auto-exact")
    {'plan': 'auto', 'accuracy': 'exact'}
    """
    return DECIDING[text] if text in DECIDING else {"plan": parse_policy(text)}


def parse_policy(text: str) -> Policy | str:
    """Read a `plan=` of `gw.parallelize`: a short name, a spec, a policy as JSON, or the path of a policy or plan file.

    A suffix sets the schedule of a policy: @pipelined, @delayed, @delayed2 (k=2), @delayednone (k=None) or @delayed5+qsgd8
    (k=5, corrections in 8 bits).

    >>> parse_policy("qsgd4")
    Policy(default=QSGD(bits=4, block=128), exempt_vectors=False)
    >>> parse_policy("identity@delayed2").schedule
    Delayed(k=2)

    Raises `FormatError` for any other text, `SpecError` for a spec with an impossible value.
    """
    if match := _SCHEDULED.fullmatch(text):
        policy = parse_policy(match["policy"])
        if isinstance(policy, str):
            raise FormatError(
                f"{text[:300]!r} sets a schedule, but the plan file already has one. Leave out the @ part."
            )
        k = None if match["k"] == "none" else int(match["k"] or 0)
        correction = parse_spec(match["correction"]) if match["correction"] else None
        return msgspec.structs.replace(policy, schedule=match["word"] or Delayed(k=k, correction=correction))
    if text == "identity":
        return Uniform(Identity())
    if text == "fp16":
        return Uniform(Cast("float16"))
    if match := _QUANTISER.fullmatch(text):
        quantiser = QSGD(bits=int(match["bits"]))
        return Uniform(ErrorFeedback(quantiser) if match["feedback"] else quantiser)
    if text.startswith("{"):
        data: Any = parse(text, show(text))
        check_plain(data)
        return Policy.from_dict(data) if "default" in data else Uniform(spec_from_dict(data))
    if os.path.isfile(text):
        return Policy.load(text) if _is_policy(text) else text
    if "(" in text or text in {cls.__name__ for cls in installed_specs().values()}:
        return Uniform(spec_from_text(text))
    raise FormatError(
        f"{text[:300]!r} is no policy, and no file of that name exists. Write auto, auto-exact or auto-aggressive (each also "
        "with @all, for all schedules), adaptive, identity, fp16, qsgd2 to qsgd8, qsgd4-ef (with error feedback), a spec in "
        'Python or JSON such as ErrorFeedback(TopK(0.01)), a policy such as {"default":{"id":"qsgd","bits":4},"scheme":'
        '"allgather"}, or the path of a policy or plan file. Append @pipelined or @delayed5 to a policy to set its schedule.'
    )


def parse_spec(text: str) -> Spec:
    """Read a spec in Python, in JSON, or by a short name.

    >>> parse_spec("qsgd4") == parse_spec('{"id":"qsgd","bits":4}') == parse_spec("QSGD(bits=4)")
    True

    Raises `FormatError` or `SpecError` for any other text.
    """
    policy = parse_policy(text)
    if isinstance(policy, str) or policy != Uniform(policy.default):
        raise FormatError(f"{text[:300]!r} is no spec. Write a spec in Python or JSON, such as QSGD(bits=4).")
    spec: Spec = policy.default
    return spec


def _is_policy(path: str) -> bool:
    try:
        data, _ = read(path)
    except FormatError:
        return False  # the reader of plans reports the error
    return isinstance(data, dict) and "default" in data


def split_names(text: str) -> list[str]:
    """Split a comma-separated list. Commas inside braces and parentheses do not separate.

    >>> split_names('ddp,gradwire:{"id":"qsgd","bits":4}')
    ['ddp', 'gradwire:{"id":"qsgd","bits":4}']
    """
    names: list[str] = []
    depth = start = 0
    for position, letter in enumerate(text):
        depth += (letter in "{(") - (letter in "})")
        if letter == "," and depth == 0:
            names.append(text[start:position])
            start = position + 1
    names.append(text[start:])
    return list(dict.fromkeys(name.strip() for name in names if name.strip()))
