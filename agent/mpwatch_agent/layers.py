"""Which parameters make one layer of a report: a module's own, or a whole branch's.

Pure. Where a model has more modules than a person reads, branches are put together from the
leaves up until few enough are left.
"""

from collections.abc import Sequence

MOST = 40


def grouped(modules: Sequence[str], most: int = MOST) -> dict[str, list[int]]:
    """Positions of parameters by the name of their layer, in order of first sight.

    Args:
        modules: for each parameter the path of the module that owns it ("blocks.3.attention.q").
    """
    depth = max((name.count(".") + 1 for name in modules), default=1)
    while depth > 1 and len({_cut(name, depth) for name in modules}) > most:
        depth -= 1
    groups: dict[str, list[int]] = {}
    for position, name in enumerate(modules):
        groups.setdefault(_cut(name, depth), []).append(position)
    if len(groups) > most:
        kept = list(groups)[: most - 1]
        rest = [position for name in list(groups)[most - 1 :] for position in groups[name]]
        groups = {**{name: groups[name] for name in kept}, "others": sorted(rest)}
    return groups


def _cut(name: str, depth: int) -> str:
    return ".".join(name.split(".")[:depth]) or "(root)"
