"""Casts what a root's forward returned in a 16-bit format to fp32, whatever it is packed in.

Tensors in lists, tuples, named tuples and dicts (also of a subclass, as libraries return them).
What else holds tensors is left as it is and named: a loss computed from it runs in 16 bits.
"""

import copy
from typing import Any

import torch

HALVES = frozenset({torch.float16, torch.bfloat16})
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


def to_fp32(output: Any, left: set[str]) -> Any:
    """`output` with its 16-bit tensors as fp32; names of classes left alone go into `left`."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in HALVES else output
    if isinstance(output, list):
        return [to_fp32(item, left) for item in output] if type(output) is list else output
    if isinstance(output, tuple):
        items = [to_fp32(item, left) for item in output]
        if hasattr(output, "_fields"):
            return type(output)(*items)
        return tuple(items) if type(output) is tuple else type(output)(items)
    if isinstance(output, dict):
        return _mapping(output, left)
    if not isinstance(output, _PLAIN):
        left.add(type(output).__name__)
    return output


def _mapping(output: dict[Any, Any], left: set[str]) -> Any:
    changed = {}
    for key, value in output.items():
        cast = to_fp32(value, left)
        if cast is not value:
            changed[key] = cast
    if not changed:
        return output
    # A copy of the same class with the values put in: model outputs keep attributes in step.
    made = copy.copy(output)
    for key, value in changed.items():
        made[key] = value
    return made
