"""The cards people own: memory, compute capability, speeds, and what precision each can run.

Rows are vendor data-sheet figures (dense, no sparsity; matrix units accumulate in fp32), written
down, not measured: everything computed from them is labelled estimated. fp32 means full fp32, as
torch's default matmul precision `highest` runs it, not TF32.
"""

import difflib

from msgspec import Struct, structs

from mpwatch.errors import UsageError
from mpwatch.planner.units import parse_bytes


class Card(Struct, frozen=True, kw_only=True):
    """One device."""

    name: str
    memory_bytes: int
    """Nominal memory, GB = 10^9; the driver shows a few percent less or more (`--free` asks it)."""
    capability: tuple[int, int] | None
    """CUDA compute capability; None when only a size was given: no precision is filtered then."""
    fp32_flops: float
    """Peak fp32 FLOP/s."""
    half_flops: float
    """Peak fp16 or bf16 matrix FLOP/s with fp32 accumulation."""
    memory_bandwidth: float
    """Bytes per second of device memory."""
    link_bandwidth: float
    """Bytes per second and direction to the other devices (NVLink, else PCIe)."""
    timed: bool = True
    """False when only a size was given: the speeds are then a stand-in, good for ratios only."""


def _row(
    name: str,
    gigabytes: int,
    capability: tuple[int, int],
    fp32: float,
    half: float,
    memory: float,
    link: float,
) -> Card:
    """A table row: sizes in GB, speeds in TFLOP/s and GB/s."""
    return Card(
        name=name,
        memory_bytes=gigabytes * 10**9,
        capability=capability,
        fp32_flops=fp32 * 1e12,
        half_flops=half * 1e12,
        memory_bandwidth=memory * 1e9,
        link_bandwidth=link * 1e9,
    )


CARDS = {
    card.name.lower(): card
    for card in (
        _row("T4", 16, (7, 5), 8.1, 65.0, 320, 12),
        _row("V100", 16, (7, 0), 15.7, 125.0, 900, 150),
        _row("V100-32GB", 32, (7, 0), 15.7, 125.0, 900, 150),
        _row("2080Ti", 11, (7, 5), 13.4, 53.8, 616, 12),
        _row("3080", 10, (8, 6), 29.8, 59.5, 760, 25),
        _row("3090", 24, (8, 6), 35.6, 71.0, 936, 25),
        _row("4090", 24, (8, 9), 82.6, 165.2, 1008, 25),
        _row("5090", 32, (12, 0), 104.8, 209.5, 1792, 50),
        _row("A10", 24, (8, 6), 31.2, 125.0, 600, 25),
        _row("A30", 24, (8, 0), 10.3, 165.0, 933, 100),
        _row("A40", 48, (8, 6), 37.4, 149.7, 696, 56),
        _row("A6000", 48, (8, 6), 38.7, 154.8, 768, 56),
        _row("L4", 24, (8, 9), 30.3, 121.0, 300, 25),
        _row("L40S", 48, (8, 9), 91.6, 362.0, 864, 25),
        _row("A100", 40, (8, 0), 19.5, 312.0, 1555, 300),
        _row("A100-80GB", 80, (8, 0), 19.5, 312.0, 2039, 300),
        _row("H100", 80, (9, 0), 67.0, 989.0, 3350, 450),
        _row("H200", 141, (9, 0), 67.0, 989.0, 4800, 450),
    )
}
STAND_IN = CARDS["a100"]
"""Ranks plans where just a size is known; its seconds are never printed."""


def unnamed_card(name: str, memory_bytes: int) -> Card:
    """A device of which only the memory is known."""
    return structs.replace(
        STAND_IN, name=name, memory_bytes=memory_bytes, capability=None, timed=False
    )


def cpu_of(card: Card) -> Card:
    """The processor itself in that much memory: its speed is unknown, and whether 16 bits are
    faster than 32 on it as well."""
    return structs.replace(
        unnamed_card(card.name, card.memory_bytes),
        fp32_flops=1e12,
        half_flops=1e12,
        memory_bandwidth=50e9,
    )


def find_card(text: str) -> Card:
    """The card of that name, or an unnamed one of that many bytes (`24GB`).

    Raises:
        UsageError: neither a known name nor a size; the nearest names are listed.
    """
    key = text.strip().lower()
    for maker in ("nvidia", "geforce", "tesla", "rtx"):
        key = key.removeprefix(maker).strip(" -_")
    key = "-".join(key.split())
    if key in CARDS:
        return CARDS[key]
    if key.lstrip("+-.")[:1].isdigit() and key.endswith("b"):
        return unnamed_card(text.strip(), parse_bytes(text, "card"))
    if key.replace(".", "", 1).lstrip("+-").isdigit():
        parse_bytes(text, "card")  # raises: a number without a unit
    close = difflib.get_close_matches(key, CARDS, n=3, cutoff=0.5)
    names = ", ".join(CARDS[name].name for name in close or CARDS)
    raise UsageError(f"unknown card {text!r}: give a size such as 24GB, or one of: {names}")


def half_formats(card: Card) -> tuple[str, ...]:
    """16-bit formats worth planning with: bf16 needs sm_80 matrix units, fp16 needs sm_70.

    Turing (T4) and Volta run bf16 by emulation only, so fp16 with loss scaling is what is left.
    """
    if card.capability is None or card.capability >= (8, 0):
        return ("bf16", "fp16")
    return ("fp16",) if card.capability >= (7, 0) else ()
