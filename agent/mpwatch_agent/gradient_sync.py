"""The one place where the synchronisation of gradients between processes will be held back.

Several processes need their gradients summed once per update, not once per micro-batch, and
DistributedDataParallel looks at `require_backward_grad_sync` in the forward: setting it afterwards
is too late. Nothing is held back yet, which is right and slower; both kinds of accumulation call
here before each training forward.
"""

from typing import Any


def before_forward(modules: tuple[Any, ...], *, needed: bool) -> None:
    """`modules` are about to run forward; `needed`: their gradients complete an update."""
