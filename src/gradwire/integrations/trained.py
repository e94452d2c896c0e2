"""The parameters that a job trains: those that were trainable at its start. And the optimizers that step them."""

import weakref
from collections.abc import Iterable

import torch
from torch.distributed.tensor import DTensor

from gradwire.engine import PassedOptimizers, hear, hear_no_more
from gradwire.errors import StepStateError

__all__ = ["StepWatch", "TrainedParameters"]


class TrainedParameters:
    """The trainable parameters of a model, which do not become more."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = weakref.ref(model)
        self.parameters = {name: each for name, each in model.named_parameters() if each.requires_grad}
        # kept, so that no other parameter gets the id of one of them
        self._ids = {id(each) for each in self.parameters.values()}

    def check(self) -> None:
        """Raises StepStateError where a parameter of the model trains now, and did not at the start."""
        model = self._model()
        # in every step: names are made only where something is new
        if model is None or not any(self._is_new(each) for module in model.modules() for each in module._parameters.values()):
            return
        for name, each in model.named_parameters():
            if not self._is_new(each) or isinstance(self.parameters.get(name), DTensor):  # fully_shard puts others in its place
                continue
            if not isinstance(each, torch.nn.Parameter):
                return  # torch.func.functional_call: others stand in for this one forward
            raise StepStateError(
                f"parameter {name!r} was thawed, added or replaced after the job began. The job averages the parameters that "
                "were trainable at its start, so the models of its members would differ. Let all parameters that ever train be "
                "trainable at the start, and freeze them then; or end the job on all members and begin another one."
            )

    def _is_new(self, parameter: torch.Tensor | None) -> bool:
        return parameter is not None and parameter.requires_grad and id(parameter) not in self._ids


class StepWatch:
    """Refuses steps of these parameters by other optimizers than those that the job was given."""

    def __init__(self, trained: TrainedParameters, optimizers: Iterable[torch.optim.Optimizer], counts: str, cure: str) -> None:
        """counts: who counts steps, and where optimizers were passed. cure: what to do for a new optimizer."""
        self._names = {id(each): name for name, each in trained.parameters.items()}
        self._passed, self._counts, self._cure = PassedOptimizers(optimizers), counts, cure
        hear(self)

    @classmethod
    def of_members(cls, trained: TrainedParameters, optimizers: Iterable[torch.optim.Optimizer]) -> "StepWatch":
        """The watch of a job of members that come and go."""
        counts = "the job counts the steps of those that gw.elastic got"
        return cls(trained, optimizers, counts, "end the job on all members, and begin another one")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The script asks for a step of any optimizer of the process."""
        has = (each for group in optimizer.param_groups for each in group["params"])
        named = ((name, each) for each in has if (name := self._names.get(id(each))) is not None)
        self._passed.check(optimizer, named, self._counts, self._cure)

    def remove(self) -> None:
        """Refuse nothing any more."""
        hear_no_more(self)
