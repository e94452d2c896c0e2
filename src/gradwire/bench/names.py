"""Checks the names of jobs, models, methods, policies and specs on the command line before torch is imported."""

import ast
import contextlib
import os
import re
from typing import Any

import msgspec

from gradwire.core import (
    QSGD,
    Cast,
    Delayed,
    ErrorFeedback,
    Identity,
    Spec,
    check_plain,
    installed_specs,
    parse,
    read,
    show,
    spec_from_dict,
    spec_from_text,
)
from gradwire.errors import FormatError
from gradwire.plan import AdaptiveBits, Policy, Uniform

JOB_NAMES = ("transformer", "mlp", "resnet", "embeddings", "bert")
DEVICES = ("cpu", "sleeping")
"""The devices of the bench's jobs: this machine's cores, or an accelerator whose computation is a timed sleep."""
PLAIN_METHODS = ("floor", "ddp", "ddp-again", "ddp-2mb", "ddp-fp16", "ddp-powersgd")
GRADWIRE_PREFIX = "gradwire:"
UNLIMITED = "unlimited"
_ALL_SCHEDULES = ("backward", "pipelined", "delayed")
DECIDING: dict[str, dict[str, Any]] = {
    "auto": {"plan": "auto", "accuracy": "safe"},
    "auto-exact": {"plan": "auto", "accuracy": "exact"},
    "auto-aggressive": {"plan": "auto", "accuracy": "aggressive"},
    "auto@all": {"plan": "auto", "accuracy": "safe", "schedules": _ALL_SCHEDULES},
    "auto@local": {"plan": "auto", "accuracy": "safe", "schedules": ("backward", "local")},
    "auto-exact@all": {"plan": "auto", "accuracy": "exact", "schedules": _ALL_SCHEDULES},
    "auto-aggressive@all": {"plan": "auto", "accuracy": "aggressive", "schedules": _ALL_SCHEDULES},
    "adaptive": {"plan": AdaptiveBits()},
    "adaptive-time": {"plan": AdaptiveBits(rule="time")},
}
"""The deciding methods behind `gradwire:`, with their arguments of `gw.parallelize`."""
MOST_DECIDING_STEPS = 70
"""The most steps of a deciding method before its warm-up: a trial, a second look at the choice, a few under the choice."""
_SCHEDULED = re.compile(
    r"(?P<policy>.+)@(?:(?P<word>backward|pipelined|delayed)|"
    r"delayed(?P<k>[1-9][0-9]{0,3}|none)(?P<whole>-unstaggered)?(?:\+(?P<correction>.+))?)",
    re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None}
_QUANTISER = re.compile(r"qsgd(?P<bits>[0-9]{1,3})(?P<feedback>-ef)?")


def check_job(name: str) -> str:
    """Return the name of a job. Raises `FormatError` if no job has this name."""
    if name not in JOB_NAMES:
        raise FormatError(f"there is no job {name!r}. The jobs are {', '.join(JOB_NAMES)}.")
    return name


def check_device(name: str) -> str:
    """Return the name of a device. Raises `FormatError` if there is none of this name."""
    if name not in DEVICES:
        raise FormatError(f"there is no device {name!r}. The devices are {', '.join(DEVICES)}.")
    return name


class GivenModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that the options of the command line name.

    >>> given = GivenModel(model="transformers:GPT2LMHeadModel", config="n_layer=2,activation_function=relu", input="8x64")
    >>> given.keywords(), given.shape()
    ({'n_layer': 2, 'activation_function': 'relu'}, (8, 64))
    """

    model: str
    """MODULE:NAME of a class or function that returns a `torch.nn.Module`; timm:NAME of one of timm's models."""
    config: str = ""
    """Keywords for NAME. For a model of transformers: keywords for the class of its config."""
    input: str
    """The shape of a rank's batch."""

    @classmethod
    def of(cls, model: str | None, config: str | None, shape: str | None) -> "GivenModel | None":
        """Return the model of --model, --config and --input; None without them. Raises `FormatError` for a wrong text."""
        if model is None:
            if config is not None or shape is not None:
                named = " and ".join(
                    f"--{name} {text}" for name, text in (("config", config), ("input", shape)) if text is not None
                )
                raise FormatError(f"{named} without --model: there is no model to describe. Name it by --model.")
            return None
        if shape is None:
            raise FormatError(
                f"--model {model} needs the shape of a rank's batch: add --input, such as 8x3x64x64 for images or 8x128 for "
                "tokens."
            )
        given = cls(model=model, config=config or "", input=shape)
        module, colon, name = model.partition(":")
        if not (colon and module and name):
            raise FormatError(f"--model {model!r} is not MODULE:NAME. Write it such as torchvision.models:resnet18.")
        given.keywords(), given.shape()
        return given

    def keywords(self) -> dict[str, Any]:
        """Return the keywords. Values are Python literals, or true, false and null; other values are texts."""
        problem = f"--config {show(self.config)} is no list of keywords. Write it such as n_layer=4,activation='gelu'."
        source = f"f({self.config})"
        try:
            call = ast.parse(source, mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise FormatError(problem) from error
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise FormatError(problem)
        found: dict[str, Any] = {}
        for keyword in call.keywords:
            if keyword.arg is None or keyword.arg in found:
                raise FormatError(
                    f"--config {show(self.config)} has {keyword.arg or '**'} where it may not. Give each keyword once."
                )
            text = ast.get_source_segment(source, keyword.value) or ""
            found[keyword.arg] = _WORDS.get(text, text)
            with contextlib.suppress(ValueError):
                found[keyword.arg] = ast.literal_eval(keyword.value)
        return found

    def shape(self) -> tuple[int, ...]:
        extents = self.input.split("x")
        if not all(extent.isascii() and extent.isdigit() and int(extent) for extent in extents):
            raise FormatError(
                f"--input {self.input!r} is no shape. Write numbers above 0 with x between them: 8x3x64x64 for 8 images, 8x128 "
                "for 8 rows of 128 tokens."
            )
        return tuple(map(int, extents))


def check_method(name: str) -> str:
    """Return the name of a method. Raises `FormatError` or `SpecError` if no method has this name.

    >>> check_method("gradwire:qsgd4-ef")
    'gradwire:qsgd4-ef'
    """
    if name in PLAIN_METHODS:
        return name
    if not name.startswith(GRADWIRE_PREFIX):
        raise FormatError(
            f"there is no method {name!r}. The methods are {', '.join(PLAIN_METHODS)} and gradwire:POLICY, such as "
            "gradwire:qsgd4."
        )
    arguments_of(name.removeprefix(GRADWIRE_PREFIX))
    return name


def arguments_of(text: str) -> dict[str, Any]:
    """Return the arguments of `gw.parallelize` for the text behind `gradwire:`, a name of DECIDING or a policy.

    >>> arguments_of("auto-exact")
    {'plan': 'auto', 'accuracy': 'exact'}
    """
    return DECIDING[text] if text in DECIDING else {"plan": parse_policy(text)}


def parse_policy(text: str) -> Policy | str:
    """Read a `plan=` of `gw.parallelize`: a short name, a spec, a policy as JSON, or the path of a policy or plan file.

    A suffix sets the schedule of a policy: @pipelined, @delayed, @delayed2 (k=2), @delayednone (k=None), @delayed5+qsgd8
    (k=5, corrections in 8 bits) or @delayed5-unstaggered (every fifth step corrects all buckets).

    >>> parse_policy("qsgd4")
    Policy(default=QSGD(bits=4, block=128), exempt_vectors=False)
    >>> parse_policy("identity@delayed2").schedule
    Delayed(k=2)

    Raises `FormatError` for any other text, `SpecError` for a spec with an impossible value.
    """
    if match := _SCHEDULED.fullmatch(text):
        if match["policy"] in DECIDING:
            raise FormatError(
                f"{text!r} sets a schedule for {match['policy']}, which takes none. Write auto@all, which also tries pipelined "
                "and delayed, or a policy with a schedule, such as qsgd4@pipelined."
            )
        policy = parse_policy(match["policy"])
        if isinstance(policy, str):
            raise FormatError(f"{text[:300]!r} sets a schedule, but the plan file already has one. Leave out the @ part.")
        if match["word"]:
            return msgspec.structs.replace(policy, schedule=match["word"])
        k = None if match["k"] == "none" else int(match["k"])
        correction = parse_spec(match["correction"]) if match["correction"] else None
        delayed = Delayed(k=k, correction=correction, stagger=match["whole"] is None)
        return msgspec.structs.replace(policy, schedule=delayed)
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
        "with @all, for all schedules), adaptive, adaptive-time, identity, fp16, qsgd2 to qsgd8, qsgd4-ef (with error feedback), "
        'a spec in Python or JSON such as ErrorFeedback(TopK(0.01)), a policy such as {"default":{"id":"qsgd","bits":4},"scheme":'
        '"allgather"}, or the path of a policy or plan file. Append @pipelined or @delayed5 to a policy to set its schedule.'
    )


def parse_spec(text: str) -> Spec:
    """Read a spec in Python, in JSON, or by a short name.

    >>> parse_spec("qsgd4") == parse_spec('{"id":"qsgd","bits":4}') == parse_spec("QSGD(bits=4)")
    True

    Raises `FormatError` or `SpecError` for any other text.
    """
    if text in DECIDING:
        raise FormatError(f"{text!r} is no spec: it chooses specs while a job runs. Write one of them, such as QSGD(bits=4).")
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
