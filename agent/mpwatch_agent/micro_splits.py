"""Splits a batch into micro-batches along its first axis, whatever containers it comes in."""

import itertools
from typing import Any

import torch


def split(batch: Any, parts: int) -> list[Any]:
    """`batch` in at most `parts` pieces whose sizes differ by one at most.

    Tensors are split; lists, tuples and dicts of them item by item; anything else is repeated.

    Raises:
        ValueError: no tensor in it, or tensors of different first dimensions.
    """
    sizes = {tensor.shape[0] for tensor in _tensors(batch)}
    if len(sizes) != 1:
        raise ValueError(f"a batch to split needs one first dimension, found {sorted(sizes)}")
    (size,) = sizes
    parts = max(1, min(parts, size))
    edges = [size * part // parts for part in range(parts + 1)]
    return [_slice(batch, a, b) for a, b in itertools.pairwise(edges)]


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.dim() else []
    items = batch.values() if isinstance(batch, dict) else batch
    if not isinstance(batch, dict | list | tuple):
        return []
    return [tensor for item in items for tensor in _tensors(item)]


def _slice(batch: Any, begin: int, end: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[begin:end] if batch.dim() else batch
    if isinstance(batch, dict):
        return {key: _slice(item, begin, end) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        items = [_slice(item, begin, end) for item in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    return batch
