"""The engine: executes plans for models and decides nothing."""

from gradwire.engine.control import checksums
from gradwire.engine.prepare import Prepared, check_memory, facts, prepare
from gradwire.engine.reducer import Observer, Observers
from gradwire.engine.registry import REGISTRY, Keeps
from gradwire.engine.saving import SET, load_state, state_of, state_of_decision, told_by_all
from gradwire.engine.schedules.base import ClipsGradients, EndsLater, ShardsOptimizer
from gradwire.engine.schedules.factory import check_optimizers
from gradwire.engine.schedules.local import OuterOptimizer
from gradwire.engine.second_moment import lower_second_moments
from gradwire.engine.session import Driver, GradientWatcher, Session, ValueWatcher, compiled
from gradwire.engine.torch_hooks.hooks import (
    GradientHooks,
    ModelHook,
    Patch,
    StepHook,
    in_reentrant_backward,
    kept_nodes,
    leave_hooks_behind,
    tensors_in,
)
from gradwire.engine.torch_hooks.loss_scale import CountingHook, LossScale
from gradwire.engine.torch_hooks.optimizer_step import PassedOptimizers, hear, hear_no_more
from gradwire.engine.witness import TrainedJob, Witness, WitnessedJob

__all__ = [
    "REGISTRY", "SET", "ClipsGradients", "CountingHook", "Driver", "EndsLater", "GradientHooks", "GradientWatcher", "Keeps",
    "LossScale", "ModelHook", "Observer", "Observers", "OuterOptimizer", "PassedOptimizers", "Patch", "Prepared", "Session",
    "ShardsOptimizer", "StepHook", "TrainedJob", "ValueWatcher", "Witness", "WitnessedJob", "check_memory", "check_optimizers",
    "checksums", "compiled", "facts", "hear", "hear_no_more", "in_reentrant_backward", "kept_nodes", "leave_hooks_behind",
    "load_state", "lower_second_moments", "prepare", "state_of", "state_of_decision", "tensors_in", "told_by_all",
]  # fmt: skip
