"""The preparation of a rank alone, before ranks compare notes: the parameters, and a plan that fits them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from gradwire._version import __version__
from gradwire.core import Plan, Spec, TensorInfo, error_words
from gradwire.engine.buffers import ModelBuffers, shared_parameters
from gradwire.engine.registry import REGISTRY
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import embeddings_of, golden_digests, info_of, plan_for, warn_of_embeddings
from gradwire.plan import Policy
from gradwire.transport import KERNELS


class Prepared(NamedTuple):
    """A model and a plan that belong together."""

    parameters: dict[str, torch.nn.Parameter]
    """The trainable ones by name, in registration order."""
    tensors: list[TensorInfo]
    plan: Plan
    policy: Policy | None
    """The policy from which the plan was made, and will be made again."""


def prepare(
    model: Any, plan: Any, ranks: int, ranks_per_node: int | None = 1, ours: Collection[torch.nn.Parameter] = ()
) -> Prepared:
    """Raises PlanError or StepStateError where model and plan cannot be run. `ours` may belong to a handle already."""
    if not isinstance(model, torch.nn.Module):
        raise PlanError(f"model is a {type(model).__name__}: pass the torch.nn.Module whose gradients are synchronised.")
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise PlanError(
            "model is wrapped in DistributedDataParallel, which would send gradients too. Pass model.module, or keep DDP and "
            "call model.register_comm_hook(gw.DDPState(plan=gw.QSGD(bits=4)), gw.ddp_hook)."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise PlanError(
            "model is a TorchScript model: torch runs no hook of it, and gradwire finds the begin of a step by one. Pass the "
            "module that was scripted or traced, and use torch.compile for speed."
        )
    check_memory(model)
    _check_frozen(model)
    parameters = {name: p for name, p in shared_parameters(model) if p.requires_grad}
    if not parameters:
        raise PlanError("no parameter of the model is trainable, so there is nothing to synchronise.")
    known = {id(parameter) for parameter in ours}
    for name, parameter in parameters.items():
        if REGISTRY.owns(parameter) and id(parameter) not in known:
            raise StepStateError(
                f"parameter {name!r} belongs to a model that is parallelized already, or that trains in an elastic job or on "
                "islands: its gradient would be averaged twice. Keep the first handle; or call its detach(), or leave() of the "
                "job, before."
            )
        if type(parameter.data) is not torch.Tensor:
            raise PlanError(
                f"parameter {name!r} is a {type(parameter.data).__name__}: it is sharded already, and gw.parallelize takes whole "
                "tensors. In FSDP2 call gradwire.integrations.fsdp2.compress(model, gw.QSGD(bits=4)) instead."
            )
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise PlanError(
            f"the model's parameters lie on {', '.join(devices)}, and a handle works on one device. Call "
            "model.to(device) before the optimizer is made."
        )
    embeddings = embeddings_of(model)
    tensors = [info_of(name, parameter, id(parameter) in embeddings) for name, parameter in parameters.items()]
    # before the first step the best guess is that gradients come in the reverse order of registration
    made, policy = plan_for(plan, tensors[::-1], ranks, ranks_per_node)
    warn_of_embeddings(tensors, made, policy)
    if made.schedule.word != "local":  # whose exchanges are of weights
        _check_gradients(parameters)
    return Prepared(parameters, tensors, made, policy)


def _check_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    for name, parameter in parameters.items():
        dtype = getattr(parameter, "grad_dtype", None)  # torch 2.8 has none; None is any
        if dtype not in (None, parameter.dtype):
            raise PlanError(
                f"the gradient of {name!r} is kept as {dtype} (grad_dtype), and the parameter is {parameter.dtype}: means have "
                "the dtype of their parameter, and torch would refuse them in the first backward. Leave grad_dtype as it is, or "
                "keep the parameter in float32 and compute under torch.autocast."
            )


def check_memory(model: torch.nn.Module) -> None:
    """Raises PlanError for a parameter or a buffer whose values cannot be sent."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor) or tensor.is_meta:
            cure = "Run a batch through the model" if is_lazy(tensor) else "Load it, or call to_empty(device=...),"
            raise PlanError(f"{name!r} has no memory yet ({type(tensor).__name__}, meta). {cure} first.")
        if tensor.is_quantized:
            raise PlanError(f"{name!r} is quantized, and gradwire cannot send such tensors from rank 0. Keep it outside.")


def _check_frozen(model: torch.nn.Module) -> None:
    for name, parameter in shared_parameters(model):
        if not parameter.requires_grad and type(parameter.data) is not torch.Tensor:
            raise PlanError(
                f"the frozen parameter {name!r} is a {type(parameter.data).__name__}, and gradwire cannot send such tensors from "
                "rank 0. Load the same values on every rank, and leave them out of what ranks share: "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [names])."
            )


def what_changed(model: torch.nn.Module, owned: Collection[int], buffers: ModelBuffers) -> str | None:
    """The first trainable parameter whose id is not in `owned`, or "a buffer"."""
    # in every forward: names are made where they are needed
    if not all(id(each) in owned for module in model.modules() for each in module._parameters.values() if _trains(each)):
        for name, parameter in shared_parameters(model):
            if _trains(parameter) and id(parameter) not in owned:
                if not isinstance(parameter, torch.nn.Parameter):
                    return None  # torch.func.functional_call: others stand in for this one forward
                return repr(name)
    return "a buffer" if buffers.changed(model) else None


def same_parameters(before: Mapping[str, torch.nn.Parameter], now: Mapping[str, torch.nn.Parameter]) -> set[str]:
    """The names that are of the same parameter before and after a change of the model. A new head may have the name and the size
    of the old one; what is kept of the old one is not the new one's."""
    return {name for name, parameter in now.items() if before.get(name) is parameter}


def _trains(parameter: torch.nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def facts(prepared: Prepared | None, problem: BaseException | None, others: Sequence[Spec] = ()) -> dict[str, Any]:
    """The facts that ranks compare, the most important first. `others`: specs that may follow those of the plan."""
    if prepared is None:
        assert problem is not None
        return {"error": error_words(problem)}
    plan, policy, parameters = prepared.plan, prepared.policy, list(prepared.parameters.values())
    return {
        "gradwire version": __version__,
        "torch version": torch.__version__,
        "model": [[t.name, list(t.shape), t.dtype, t.device] for t in prepared.tensors],
        "model's memory formats": [[name, list(p.stride())] for name, p in prepared.parameters.items()],
        "plan": f"{plan.digest()[:16]} {plan.buckets[0].main_spec!r}" if policy is None else policy.to_json(None),
        "plan that this build makes of it": plan.digest()[:16],
        KERNELS: golden_digests(plan, [p.dtype for p in parameters], parameters[0].device, others),
    }


def check_one_optimizer(optimizers: Sequence[torch.optim.Optimizer], prepared: Prepared, many: str, others: str) -> None:
    """Raises PlanError for more than one optimizer, and for one that steps other tensors. The words are why not."""
    if len(optimizers) > 1:
        raise PlanError(
            f"{len(optimizers)} optimizers were passed, and {many}. Use one optimizer with several param_groups, or "
            "schedule='backward'."
        )
    ours = {id(parameter) for parameter in prepared.parameters.values()}
    foreign = [p for group in optimizers[0].param_groups for p in group["params"] if p.requires_grad and id(p) not in ours]
    if foreign:
        raise PlanError(
            f"the optimizer steps {len(foreign)} tensors that are none of the model's trainable parameters, the first of shape "
            f"{tuple(foreign[0].shape)}. {others}. Give them an optimizer of their own, which is not passed."
        )
