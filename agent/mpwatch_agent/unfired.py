"""Why an injected fault never fired: what was missing where it was due, as far as it was seen.

Owns these notes only; `faulting` writes them and has them said when the interpreter ends.
"""

from mpwatch.faults import Fault, text_of


class Unfired:
    """Notes on the faults of one rank, by their position in its list."""

    def __init__(self) -> None:
        self._missing: dict[int, str] = {}
        self._last_micro: dict[int, int] = {}

    def missing(self, index: int, what: str) -> None:
        """Fault `index` was due and had nothing to act on."""
        self._missing[index] = what

    def saw(self, index: int, micro: int) -> None:
        """Micro-batch `micro` came by while fault `index` was due."""
        self._last_micro[index] = max(micro, self._last_micro.get(index, 0))

    def line(self, index: int, fault: Fault, steps: int) -> str:
        """What is said of a fault that did not fire in a run of `steps` steps."""
        return f"--inject {text_of(fault)} never fired: {self._why(index, fault, steps)}"

    def _why(self, index: int, fault: Fault, steps: int) -> str:
        if index in self._missing:
            return self._missing[index]
        if steps < fault.first_step:
            return f"the run ended after step {steps}"
        seen = self._last_micro.get(index)
        if fault.micro is not None and seen is not None and fault.micro > seen:
            return f"no micro-batch {fault.micro} there, the last one was {seen} (from 0)"
        if fault.phase not in (None, "forward"):
            return f"phase {fault.phase} was not seen to begin there"
        return "no moment to fire at was seen there"
