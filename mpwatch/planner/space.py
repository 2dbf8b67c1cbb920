"""The whole space at a glance: precision by N by sharding, the best choice of all else in a cell.

A cell holds the fastest plan that fits, else the one with the smallest peak. Only full training
with unquantised states, so that cells can be compared. Pure.
"""

from msgspec import Struct, structs

from mpwatch.planner.candidates import Split, Table, evaluate, setups
from mpwatch.planner.cards import Card
from mpwatch.planner.model import Model
from mpwatch.planner.numerics import EXACT, PURE_HALF
from mpwatch.planner.plans import Budget, Limits, family_of

ACCUMULATIONS = (1, 2, 4, 8, 16, 32, 64, 128)


class Cell(Struct, frozen=True, kw_only=True):
    """One place of the space."""

    precision: str
    sharding: str
    accumulation: int
    micro_batch: int
    exact_batch: bool
    """b N D is the batch asked for"""
    peak_bytes: float
    seconds: float
    """per sample; nan where unknown"""
    checkpointing: str
    attention: str
    fits: bool


def _splits(limits: Limits) -> list[Split]:
    """One split for each N that leaves at least one sample, rounded up where B is no multiple."""
    return [
        (max(1, -(-limits.batch // (n * limits.devices))), n)
        for n in ACCUMULATIONS
        if n * limits.devices <= max(limits.batch, limits.devices)
    ]


def _better(table: Table, row: int, other: int) -> bool:
    """Whether `row` is the better choice for a cell than `other`."""
    if bool(table.fits[row]) != bool(table.fits[other]):
        return bool(table.fits[row])
    key = table.seconds if table.fits[row] and table.seconds[row] == table.seconds[row] else None
    values = table.peak_bytes if key is None else key
    return bool(values[row] < values[other])


def space(model: Model, card: Card, budget: Budget, limits: Limits) -> list[Cell]:
    """All cells, by precision, sharding and N. Raises UsageError as a survey does."""
    limits = structs.replace(limits, families=(EXACT, PURE_HALF))
    choices = [setup for setup in setups(model, card, limits) if setup.optimizer.block is None]
    choices = [setup for setup in choices if family_of(setup) in (EXACT, PURE_HALF)]
    table = evaluate(choices, _splits(limits), card, budget)
    best: dict[tuple[str, str, int], int] = {}
    for row in range(len(table)):
        setup = choices[table.setup_index[row]]
        place = (setup.numerics.name, setup.sharding, int(table.accumulation[row]))
        if place not in best or _better(table, row, best[place]):
            best[place] = row
    return [_cell(table, best[place], limits) for place in sorted(best)]


def _cell(table: Table, row: int, limits: Limits) -> Cell:
    setup = table.setups[table.setup_index[row]]
    micro_batch, accumulation = int(table.micro_batch[row]), int(table.accumulation[row])
    return Cell(
        precision=setup.numerics.name,
        sharding=setup.sharding,
        accumulation=accumulation,
        micro_batch=micro_batch,
        exact_batch=micro_batch * accumulation * limits.devices == limits.batch,
        peak_bytes=float(table.peak_bytes[row]),
        seconds=float(table.seconds[row]),
        checkpointing=setup.checkpointing,
        attention=setup.attention,
        fits=bool(table.fits[row]),
    )
