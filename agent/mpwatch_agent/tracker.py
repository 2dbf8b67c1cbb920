"""Exact bytes of live tensor storages by a dispatch mode: what is alive, its peak, whose it is.

Used by the tracking child on fake tensors, and made to be used on a live step as well: it only
looks at storages, keeps weak references to them, and leaves compiled code alone. What kernels
allocate below the dispatcher (oneDNN scratch, generated code) is not seen.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WEIGHTS, MASTER, GRADIENTS, STATES = "weights", "master", "gradients", "states"
ACTIVATIONS, LOGITS, CASTS, DATA, OLDER = "activations", "logits", "casts", "data", "older"
TRANSIENT, SCRATCH = "optimizer transient", "scratch"

Scratch = Callable[[object, tuple[Any, ...]], int]
"""Bytes that an operator is known to take while it runs, though no tensor shows them."""

_TO_COPY = torch.ops.aten._to_copy.default


class _Record:
    """One live storage."""

    __slots__ = ("nbytes", "owner", "reference")

    def __init__(self, nbytes: int, reference: "weakref.ref[Any]", owner: str) -> None:
        self.nbytes, self.reference, self.owner = nbytes, reference, owner


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples and mappings; other containers are not entered."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


class ByteTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts bytes of storages while it is entered; `owner` names what is born meanwhile.

    Example:
        >>> tracker = ByteTracker()
        >>> tracker.claim(model.parameters(), WEIGHTS)
        >>> with tracker:
        ...     loss = model(batch).mean()
        >>> tracker.peak_bytes
    """

    def __init__(self, scratch: Scratch | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scratch = scratch
        self.owner = ACTIVATIONS
        """who owns storages born from now on"""
        self.live_bytes = 0
        self.peak_bytes = 0
        self.peak_owners: dict[str, int] = {}
        """bytes by owner at the moment of the peak"""
        self._live: dict[int, _Record] = {}
        self._owners: dict[str, int] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled functions compiled: a plain mode would disable their code for good."""
        return True

    @property
    def owners(self) -> dict[str, int]:
        """Live bytes by owner."""
        return {name: nbytes for name, nbytes in self._owners.items() if nbytes}

    def reset_peak(self) -> None:
        """Start a new phase: the peak is what is alive now."""
        self.peak_bytes = self.live_bytes
        self.peak_owners = self.owners

    def claim(self, tensors: Iterable[torch.Tensor | None], owner: str) -> None:
        """Count these storages, known or not, as the owner's from now on."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = tensor.untyped_storage()
            record = self._live.get(storage._cdata)
            if record is None:
                self._book(storage, owner)
            elif record.owner != owner:
                self._owners[record.owner] -= record.nbytes
                self._owners[owner] = self._owners.get(owner, 0) + record.nbytes
                record.owner = owner
        if self.live_bytes > self.peak_bytes:
            self.reset_peak()

    def _book(self, storage: torch.UntypedStorage, owner: str) -> None:
        """Take a storage into the account until it is really freed."""
        key, nbytes = storage._cdata, storage.nbytes()
        self._live[key] = _Record(nbytes, weakref.ref(storage, self._forget(key)), owner)
        self.live_bytes += nbytes
        self._owners[owner] = self._owners.get(owner, 0) + nbytes

    def _forget(self, key: int) -> Callable[[object], None]:
        """The callback that runs when the storage behind `key` is freed."""
        books = weakref.ref(self)

        def freed(_: object) -> None:
            tracker = books()
            record = tracker._live.pop(key, None) if tracker is not None else None
            if tracker is not None and record is not None:
                tracker.live_bytes -= record.nbytes
                tracker._owners[record.owner] -= record.nbytes

        return freed

    def _owner_of_result(self, func: object, args: tuple[Any, ...]) -> str:
        """Autocast's copy of a weight is its own kind; all else belongs to the current owner."""
        if func is _TO_COPY and args and self.owner in (ACTIVATIONS, LOGITS):
            record = self._live.get(args[0].untyped_storage()._cdata)
            if record is not None and record.owner == WEIGHTS:
                return CASTS
        return self.owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then book the storages that it created."""
        live = self._live
        for tensor in tensors_in(args):
            # Older than the tracker: an operator that returns a view would make it look new.
            storage = tensor.untyped_storage()
            if storage._cdata not in live:
                self._book(storage, OLDER)
        result = func(*args, **(kwargs or {}))
        owner = self._owner_of_result(func, args)
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage._cdata not in live:
                self._book(storage, owner)
        extra = self._scratch(func, args) if self._scratch is not None else 0
        if self.live_bytes + extra > self.peak_bytes:
            self.reset_peak()
            self.peak_bytes += extra
            self.peak_owners[SCRATCH] = extra
        return result
