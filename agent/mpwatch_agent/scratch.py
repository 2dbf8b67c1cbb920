"""Bytes that torch's CPU convolution kernels take below the dispatcher, where no mode sees them.

Read off the profiler's memory events: oneDNN reorders activations into its blocked layout, and the
fallback for 16-bit types on processors without 16-bit instructions unfolds the input into columns.
Which kernel runs depends on the processor; torch itself is asked. CUDA workspaces are not modelled.
"""

from collections.abc import Sequence
from typing import Any

import torch

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _columns(source: torch.Tensor, weight: torch.Tensor, spatial: Sequence[int]) -> int:
    """The unfolded input: a column of C * kernel values for each output position."""
    positions = source.shape[0]
    for size in spatial:
        positions *= size
    return positions * weight[0].numel() * source.element_size()


def _is_pointwise(weight: torch.Tensor, stride: Sequence[int]) -> bool:
    """1x1 kernels with stride 1 need no unfolding."""
    return all(size == 1 for size in (*weight.shape[2:], *stride))


def convolution_scratch(func: object, args: tuple[Any, ...]) -> int:
    """Extra bytes while this operator runs; 0 for everything but convolutions."""
    if func is _FORWARD:
        source, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
        gradient = None
    elif func is _BACKWARD:
        gradient, source, weight, bias, stride, padding, dilation, transposed = args[:8]
        output_padding, groups, bias = args[8], args[9], None
    else:
        return 0
    backend = torch._C._select_conv_backend(
        source, weight, bias, stride, padding, dilation, transposed, output_padding, groups, None
    ).name
    if backend == "Mkldnn":
        return 0 if gradient is None else _bytes(source) + _bytes(gradient)
    if backend != "Slow2d" or _is_pointwise(weight, stride):
        return 0
    spatial = [
        (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for size, pad, dil, kernel, step in zip(
            source.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True
        )
    ]
    return _columns(source, weight, spatial)
