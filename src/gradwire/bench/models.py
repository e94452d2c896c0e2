"""Makes a job of any model, with random weights and made-up data, and measures the model's profile on this machine.

The model is a `torch.nn.Module` that takes one tensor, or token ids as `input_ids`. The loss is the model's own if it computes
one, else the mean of the squares of its output. So steps are real, and the trained model is worth nothing.
"""

import inspect
import os
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire as gw
from gradwire.bench.jobs import Batch, Job
from gradwire.bench.names import GivenModel
from gradwire.core import Costs, Profile, Spec, near, show
from gradwire.errors import FormatError
from gradwire.profiler import Recorder, measure_codecs, profile_from

LEARNING_RATE = 1e-4
"""A small rate, because the loss of random weights on made-up data must stay finite."""

PROFILED_STEPS = 10


class ModelJob(Job):
    """A given model, trained on random tensors or random tokens.

    Raises FormatError if the model cannot be imported, built, or trained for one step on a batch of the given shape.
    """

    def __init__(self, given: GivenModel, seed: int = 0) -> None:
        super().__init__(seed)
        self.name, self._given, self._shape = given.model, given, given.shape()
        self.batch_size = self._shape[0]
        self._make = _maker(given)
        model = self.make_model(0)
        takes = inspect.signature(model.forward).parameters
        self._vocabulary = _vocabulary(model, given) if "input_ids" in takes else None
        self._labelled = "labels" in takes and self._vocabulary is not None
        self._try(model)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        if self._vocabulary is None:
            return _loss_of(model(inputs), self.name)
        labels = {"labels": targets} if self._labelled else {}
        return _loss_of(model(input_ids=inputs, **labels), self.name)

    def _model(self) -> nn.Module:
        try:
            model = self._make()
        except Exception as error:
            config = f" with --config {self._given.config}" if self._given.config else ""
            raise FormatError(
                f"--model {self.name} cannot be built{config}: {type(error).__name__}: {error}. Check the keywords of --config."
            ) from error
        if not isinstance(model, nn.Module) or not any(each.requires_grad for each in model.parameters()):
            raise FormatError(
                f"--model {self.name} made {show(model)}: it must return a torch.nn.Module that has parameters to train."
            )
        return model

    def _draw(self, rank: int, world_size: int, generator: torch.Generator) -> Batch:
        if self._vocabulary is None:
            inputs = torch.randn(self._shape, generator=generator)
        else:
            inputs = torch.randint(self._vocabulary, self._shape, generator=generator)
        return inputs, inputs

    def _try(self, model: nn.Module) -> None:
        """Run one backward. If the model's labels are no tokens, as in a classifier of texts, try again without labels."""
        batch = self.batch(0, 1, 0)
        try:
            self.loss(model, batch).backward()
        except FormatError:
            raise
        except Exception as error:
            if self._labelled:
                self._labelled = False
                self._try(model)
                return
            raise FormatError(
                f"--model {self.name} cannot be trained on a batch of --input {self._given.input}: {type(error).__name__}: "
                f"{error}. Check the shape, and that the model takes one tensor or input_ids."
            ) from error


def measure_model(given: GivenModel, specs: Sequence[Spec], costs: Costs | None) -> tuple[Profile, Costs]:
    """Measure the profile of the model and, unless given, the costs of the codecs, on this machine's processor.

    The model trains alone, for a few steps, with torch's number of threads.

    Raises FormatError if `ModelJob` cannot be made.
    """
    job = ModelJob(given)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        model = job.make_model(seed=0)
        optimizer = job.make_optimizer(model)
        handle = gw.parallelize(model, optimizer, plan=gw.Uniform(gw.Identity()))
        recorder = Recorder(handle.session, PROFILED_STEPS)
        for step in range(recorder.wanted):
            job.loss(model, job.batch(0, 1, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.remove()
        profile = profile_from(recorder, handle.session, recorder.rows(quiet=True), recorder.rows(quiet=False))
        handle.detach()
        return profile, measure_codecs(specs, torch.device("cpu")) if costs is None else costs
    finally:
        dist.destroy_process_group()


def _maker(given: GivenModel) -> Callable[[], Any]:
    """Return a function that builds the model. Modules in the current directory are found."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module_name, _, name = given.model.partition(":")
    keywords = given.keywords()
    try:
        module = import_module(module_name)
    except Exception as error:
        raise FormatError(
            f"--model {given.model}: the module {module_name!r} cannot be imported: {type(error).__name__}: {error}. Install "
            f"it, or start from the folder that has it, not from {os.getcwd()}."
        ) from error
    if module_name == "timm":
        return lambda: module.create_model(name, **keywords)
    try:
        found = reduce(getattr, name.split("."), module)
    except AttributeError as error:
        raise FormatError(f"--model {given.model}: {error}{near(name, dir(module))}. Check the name.") from error
    if not callable(found):
        raise FormatError(f"--model {given.model} is {show(found)}: it must be a class or function that returns a model.")
    config_class = getattr(found, "config_class", None)  # of transformers
    if config_class is None:
        return lambda: found(**keywords)
    known = dir(config_class()) if keywords else []  # the class itself takes any keyword
    for wrong in (keyword for keyword in keywords if keyword not in known):
        raise FormatError(
            f"--config has {wrong}={show(keywords[wrong])}, and {config_class.__name__} has no {wrong!r}{near(wrong, known)}. "
            "Correct the keyword, or leave it out."
        )
    return lambda: found(config_class(**keywords))


def _vocabulary(model: nn.Module, given: GivenModel) -> int:
    """Return the number of tokens, from the model's config or from its first embedding."""
    if len(given.shape()) != 2:
        raise FormatError(
            f"--input {given.input} has {len(given.shape())} extents, and {given.model} takes token ids: give batch x length, "
            "such as 8x128."
        )
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not isinstance(size, int) and not embeddings:
        raise FormatError(
            f"--model {given.model} takes input_ids, but has neither config.vocab_size nor an nn.Embedding, so no token ids can "
            "be made up. Add one of them."
        )
    return size if isinstance(size, int) else embeddings[0]


def _loss_of(output: Any, name: str) -> Tensor:
    """Return the output's own loss, or else the mean of squares of its logits, or of each of its float tensors."""
    own, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if isinstance(own, Tensor):
        return own
    outputs = [logits] if isinstance(logits, Tensor) else output if isinstance(output, tuple) else [output]
    floats = [each for each in outputs if isinstance(each, Tensor) and each.is_floating_point()]
    if not floats:
        raise FormatError(
            f"--model {name} returned {type(output).__name__}: it must return a tensor, a tuple of tensors, or an object with "
            ".loss or .logits. Choose a class with a head, such as GPT2LMHeadModel for GPT2Model."
        )
    return torch.stack([each.float().square().mean() for each in floats]).sum()
