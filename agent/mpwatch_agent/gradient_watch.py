"""The distribution of a step's gradients and the size of its update, now and then.

Looks when a window is whole, before unscale and clip, and again after the step. Numbers leave the
device in one read; the arithmetic is `distribution`'s. Called by `observing`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mpwatch.events import GradientsSampled
from mpwatch_agent.arrival import Arrival
from mpwatch_agent.exponents import Counts, exact, places_of, sampled, take
from mpwatch_agent.finiteness import values_of
from mpwatch_agent.gradient_report import Reading, report
from mpwatch_agent.layers import grouped
from mpwatch_agent.naming import Names
from mpwatch_agent.sampling import Sampling, carries_scale
from mpwatch_agent.tracks import OptimizerTrack
from mpwatch_agent.witness import Witness

if TYPE_CHECKING:
    from mpwatch_agent.loop import Loop
    from mpwatch_agent.roots import Roots

# Elements looked at per layer: shares are then known to one or two percent.
PER_LAYER = 4096
# Of each of these steps one more is taken, so that a short run shows something as well.
EARLY_STEP = 1
# Weights looked at per tensor for the size of an update.
WEIGHTS = 256


@dataclass
class Sample:
    """One step's numbers, on their way."""

    step: int
    counts: Counts
    layers: dict[str, list[int]]
    scale: float | None
    exact: bool
    stored_as: str
    autocast: bool
    weights: list[tuple[Any, torch.Tensor | None, torch.Tensor]]


class GradientWatch:
    """Distributions of the leading optimizer's gradients, at `sampling.gradients_every` steps."""

    def __init__(self, loop: "Loop", roots: "Roots", sampling: Sampling, witness: Witness) -> None:
        self._witness = witness
        self._loop = loop
        self._roots = roots
        self._sampling = sampling
        self._generators: dict[torch.device, torch.Generator] = {}
        self._open: Sample | None = None
        self._arriving: list[tuple[Sample, Arrival]] = []

    @property
    def busy(self) -> bool:
        """Whether a sample is under way."""
        return self._open is not None or bool(self._arriving)

    def gradients_whole(self, track: OptimizerTrack, optimizer: Any) -> None:
        """Look at the gradients of a whole window."""
        parameters = [
            (parameter, values)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and (values := values_of(parameter.grad)) is not None
        ]
        if not parameters or not self._may_look([values for _, values in parameters]):
            return
        names = Names(self._roots.modules())
        owners = [names.of(p, 0, i).module or "(unnamed)" for i, (p, _) in enumerate(parameters)]
        layers = grouped(owners)
        gradients = [values for _, values in parameters]
        scale = self._scale(optimizer)
        carried = scale if scale and carries_scale(self._loop, optimizer) else 1.0
        counts = self._count(gradients, layers, 1.0 / carried)
        stored = sorted({str(values.dtype).removeprefix("torch.") for values in gradients})
        self._open = Sample(
            step=0,
            counts=counts,
            layers=layers,
            scale=scale,
            exact=self._sampling.gradients_exact,
            stored_as=", ".join(stored),
            autocast=self._witness.autocast,
            weights=[self._weights_of(parameter) for parameter, _ in parameters],
        )

    def step_concluded(self, applied: bool, step: int) -> None:
        """The step is over: how far did it move the weights? The numbers leave for the host."""
        sample, self._open = self._open, None
        if sample is None:
            return
        sample.step = step
        rows = sample.counts.rows
        if applied:
            rows = torch.cat([rows, _updates(sample.weights).to(rows)], dim=1)
        sample.weights = []
        self._arriving.append((sample, Arrival(rows)))

    def arrived(self) -> list[GradientsSampled]:
        """The samples whose numbers are on the host, in their order."""
        found = []
        while self._arriving and self._arriving[0][1].ready():
            sample, arrival = self._arriving.pop(0)
            found.append(report(Reading.of(arrival.numbers(), sample), sample))
        return found

    # --- parts ------------------------------------------------------------------------------

    def _may_look(self, gradients: list[torch.Tensor]) -> bool:
        """Counting on a device has no deterministic way: a script that asks for it goes first."""
        devices = {gradient.device.type for gradient in gradients}
        if len({gradient.device for gradient in gradients}) > 1:
            return False
        return devices == {"cpu"} or not torch.are_deterministic_algorithms_enabled()

    def _count(
        self, gradients: list[torch.Tensor], layers: dict[str, list[int]], factor: float
    ) -> Counts:
        if self._sampling.gradients_exact:
            return exact(gradients, factor)
        draws = [0] * len(gradients)
        for positions in layers.values():
            sizes = [gradients[position].numel() for position in positions]
            for position, size in zip(positions, sizes, strict=True):
                draws[position] = -(-PER_LAYER * size // sum(sizes))
        return sampled(gradients, draws, self._generator(gradients[0].device), factor)

    def _generator(self, device: torch.device) -> torch.Generator:
        if device not in self._generators:
            # Its own, always the same one: two runs of the same script look at the same places.
            self._generators[device] = torch.Generator(device=device).manual_seed(0)
        return self._generators[device]

    def _weights_of(self, parameter: Any) -> tuple[Any, torch.Tensor | None, torch.Tensor]:
        values = parameter.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        places = places_of(values, WEIGHTS, self._generator(values.device))
        return values, places, take(values, places).float().clone()

    def _scale(self, optimizer: Any) -> float | None:
        reading = self._loop.window_scale()
        return reading if isinstance(reading, float) else None


@torch.no_grad()
def _updates(weights: list[tuple[Any, torch.Tensor | None, torch.Tensor]]) -> torch.Tensor:
    """Per tensor: the median of |dw| / |w|, and the shares below 2^-8 and 2^-11."""
    rows = []
    for values, places, before in weights:
        after = take(values, places).float()
        ratio = (after - before).abs() / before.abs()
        # A weight of zero has no ulp to get lost in; one that did not move has lost its update.
        ratio = torch.where(before == 0, torch.where(after == 0, 0.0, torch.inf), ratio)
        small = [(ratio < 2.0**-8).float().mean(), (ratio < 2.0**-11).float().mean()]
        rows.append(torch.stack([ratio.median(), *small]))
    return torch.stack(rows)
