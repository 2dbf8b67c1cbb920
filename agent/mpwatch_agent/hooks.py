"""The table of every function of torch that is replaced, and by which wrapper.

The wrappers carry the originals' names; a traceback of the script shows one frame of ours where
the script passed through one.
"""

import os
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import dataloader

from mpwatch_agent import hooks_backward, hooks_edges, hooks_optimizer, hooks_scaler
from mpwatch_agent.patches import PatchTable
from mpwatch_agent.wrapping import Wrap

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


def install(table: PatchTable, agent: "Agent") -> list[str]:
    """Put every hook on; returns the names this version of torch does not have."""
    grad_scaler = torch.amp.GradScaler
    optimizer = torch.optim.Optimizer
    scheduler = torch.optim.lr_scheduler.LRScheduler
    iterator = dataloader._BaseDataLoaderIter
    clip_grad = torch.nn.utils.clip_grad
    # Inside the clip where this torch allows it: around it, a warning would name our frame.
    norm = "_get_total_norm" if "_get_total_norm" in vars(clip_grad) else "clip_grad_norm_"
    places: list[tuple[Any, str, Wrap]] = [
        (torch.autograd, "backward", hooks_backward.backward(agent)),
        (scheduler, "__init__", hooks_optimizer.scheduler_made(agent)),
        (optimizer, "__init__", hooks_optimizer.optimizer_made(agent)),
        (optimizer, "profile_hook_step", hooks_optimizer.profile_hook_step(agent)),
        (optimizer, "zero_grad", hooks_optimizer.zero_grad(agent)),
        (torch.nn.Module, "zero_grad", hooks_optimizer.module_zero_grad(agent)),
        (torch.nn.Module, "__getstate__", hooks_edges.module_state(agent)),
        (grad_scaler, "scale", hooks_scaler.scale(agent)),
        (grad_scaler, "unscale_", hooks_scaler.unscale(agent)),
        (grad_scaler, "step", hooks_scaler.scaler_step(agent)),
        (grad_scaler, "update", hooks_scaler.update(agent)),
        (grad_scaler, "load_state_dict", hooks_scaler.state_loaded(agent)),
        (clip_grad, norm, hooks_scaler.clip_norm(agent)),
        (clip_grad, "clip_grad_value_", hooks_scaler.clip_value(agent)),
        (iterator, "__next__", hooks_backward.loader_next(agent)),
        (torch, "compile", hooks_edges.compile(agent)),
        (torch.jit, "script", hooks_edges.jit(agent, "torch.jit.script")),
        (torch.jit, "trace", hooks_edges.jit(agent, "torch.jit.trace")),
        (torch.export, "export", hooks_edges.jit(agent, "torch.export.export")),
        (os, "closerange", hooks_edges.closerange(agent)),
        (TorchDispatchMode, "__enter__", hooks_edges.mode(agent)),
        (TorchFunctionMode, "__enter__", hooks_edges.mode(agent)),
    ]
    missing = [name for owner, name, make in places if not table.replace(owner, name, make)]
    for name in {"clip_grad_norm_", "clip_grad_value_"} & {place[1] for place in places}:
        table.put(torch.nn.utils, name, vars(clip_grad)[name])
    return missing
