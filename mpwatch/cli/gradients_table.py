"""The text of `show --gradients`: distributions by layer, forecast, headroom, updates. Pure."""

from collections.abc import Iterator

from mpwatch.cli.formats import number, scale, table
from mpwatch.events import ActivationsSampled, FormatShares, GradientsSampled, LayerGradients
from mpwatch.vocabulary import clean_text

BARS = " .:-=+*#%@"
# Columns of the little histogram: octaves from 2^-40 to 2^0, two to a column.
FIRST_OCTAVE, OCTAVES, COLUMNS = -40, 44, 22
MODULES_AT_MOST = 12


def gradients_text(
    gradients: GradientsSampled | None, activations: ActivationsSampled | None
) -> str:
    """All that is known of the newest sample; says so where there is none."""
    if gradients is None:
        lines = ["no gradients were sampled yet (--gradients-every, ctl RUN set_sampling)"]
    else:
        lines = [*_gradients(gradients)]
    if activations is not None and activations.modules:
        lines += ["", *_activations(activations)]
    return "\n".join(line.rstrip() for line in lines)


def _gradients(sampled: GradientsSampled) -> Iterator[str]:
    at = f"loss scale {scale(sampled.loss_scale)}" if sampled.loss_scale else "no loss scale"
    how = "every gradient counted" if sampled.exact else "sampled"
    yield f"gradients of step {sampled.step}, unscaled, stored as {sampled.stored_as}; {at}; {how}"
    if sampled.note:
        yield f"note: {clean_text(sampled.note, 500)}"
    yield ""
    axis = f"2^{FIRST_OCTAVE} to 2^{FIRST_OCTAVE + OCTAVES}"
    rows = [["layer", "values", axis, "max", "zeros", "fp16: zeroed", "sub-normal", "overflow"]]
    rows[0] += ["bf16 lost", "|dw|/|w|", "< 2^-8", "+-"]
    rows += [_row(layer) for layer in sampled.layers]
    yield from table(rows, numbers=frozenset({1, *range(3, 12)})).splitlines()
    yield ""
    yield from _formats(sampled)
    yield ""
    yield from _scales(sampled)


def _row(layer: LayerGradients) -> list[str]:
    fp16 = _share(layer, "fp16")
    bf16 = _share(layer, "bf16")
    return [
        clean_text(layer.name, 40),
        f"{layer.values:,}",
        _histogram(layer),
        number(layer.max_abs),
        percent(layer.zeros),
        percent(fp16.zeroed),
        percent(fp16.subnormal),
        percent(fp16.overflowed),
        percent(bf16.zeroed + bf16.overflowed),
        number(layer.update_median),
        percent(layer.update_small),
        percent(layer.error) if layer.error else "exact",
    ]


def _share(layer: LayerGradients, target: str) -> FormatShares:
    found = next((each for each in layer.shares if each.format == target), None)
    return found or FormatShares(format=target)


def _histogram(layer: LayerGradients) -> str:
    columns = [0] * COLUMNS
    for offset, count in enumerate(layer.counts):
        place = (layer.first_exponent + offset - FIRST_OCTAVE) * COLUMNS // OCTAVES
        columns[min(COLUMNS - 1, max(0, place))] += count
    most = max(columns, default=0) or 1
    steps = len(BARS) - 1
    return "".join(BARS[-(-count * steps // most)] for count in columns)


def _formats(sampled: GradientsSampled) -> Iterator[str]:
    whole = sampled.layers[0]
    rows = [["all of them as", "zeroed", "sub-normal", "overflow"]]
    rows += [
        [
            each.format,
            _with_error(each.zeroed, each.zeroed_error),
            _with_error(each.subnormal, each.subnormal_error),
            _with_error(each.overflowed, each.overflowed_error),
        ]
        for each in whole.shares
    ]
    yield from table(rows, numbers=frozenset({1, 2, 3})).splitlines()


def _scales(sampled: GradientsSampled) -> Iterator[str]:
    now = 1.0 if sampled.loss_scale is None else sampled.loss_scale
    mark = " (now: none)" if sampled.loss_scale is None else " (now)"
    yield (
        "what fp16 would lose of these gradients at another loss scale: a higher one keeps small"
        " gradients from zero, a lower one large ones from overflow"
    )
    rows = [["loss scale", "zeroed", "sub-normal", "overflow"]]
    rows += [
        [
            scale(now * 2.0**each.octaves) + ("" if each.octaves else mark),
            percent(each.zeroed),
            percent(each.subnormal),
            percent(each.overflowed),
        ]
        for each in sampled.forecast
        if each.octaves % 2 == 0
    ]
    yield from table(rows, numbers=frozenset({1, 2, 3})).splitlines()
    if sampled.limit_octave is not None:
        yield _fitting(sampled.best_octave, sampled.limit_octave)


def _fitting(best: int | None, limit: int) -> str:
    """Which scales fit, from the smallest to the largest power of two."""
    largest = scale(2.0**limit)
    if best is None:
        return (
            f"no scale fits these gradients: above {largest} the largest of them comes within a"
            " factor of 4 of overflow, and at that scale more than 1 in 1000 is zeroed; bf16 or"
            " fp32 would fit"
        )
    return (
        f"loss scales from {scale(2.0**best)} to {largest} fit these gradients: below, more than 1"
        " in 1000 is zeroed; above, the largest of them comes within a factor of 4 of overflow"
    )


def _activations(sampled: ActivationsSampled) -> Iterator[str]:
    yield f"activations of step {sampled.step}: the narrowest headroom below 65504 (fp16)"
    rows = [["module", "largest output", "octaves left", "since the first sample"]]
    rows += [
        [
            clean_text(module.name, 60),
            number(module.max_abs),
            "-" if module.octaves is None else f"{module.octaves:.1f}",
            "-" if module.trend_octaves is None else f"{module.trend_octaves:+.1f}",
        ]
        for module in sampled.modules[:MODULES_AT_MOST]
    ]
    yield from table(rows, numbers=frozenset({1, 2, 3})).splitlines()


def percent(share: float | None) -> str:
    """A share as a person reads it: never "0 %" where it is not."""
    if share is None:
        return "-"
    if not share:
        return "0"
    return f"{share * 100:.3g} %" if share >= 1e-6 else "< 0.0001 %"


def _with_error(share: float, error: float) -> str:
    return percent(share) + (f" +- {percent(error)}" if error else "")
