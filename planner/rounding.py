"""From a solution of the linear relaxation to a choice that fits: the search's first plan where it cannot see far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hilore.planner.greedy import greedy
from hilore.planner.tables import Tables

# How many regions of a group (first key) take a configuration (second).
Shares = Mapping[tuple[int, int], float]


def rounded(tables: Tables, groups: Sequence[Sequence[int]], shares: Shares, start: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers of regions per configuration, the others as in ``start``, then as greedy goes on from there.

    ``start`` must fit. Where the whole numbers do not fit together, the regions with the largest share of what breaks
    go back to ``start`` one by one.
    """
    choice = list(start)
    for at, group in enumerate(groups):
        taken = ((share, k) for (g, k), share in shares.items() if g == at and tables.usable[group[0], k])
        free = list(group)
        for share, k in sorted(taken, key=lambda pair: (-pair[0], pair[1])):
            count = min(len(free), math.floor(share + 1e-6))
            for region in free[:count]:
                choice[region] = k
            free = free[count:]
    return greedy(tables, _repaired(tables, choice, start))


def _repaired(tables: Tables, choice: Sequence[int], start: Sequence[int]) -> tuple[int, ...]:
    found = list(choice)
    while not tables.fits(found):
        changed = [r for r, (mine, first) in enumerate(zip(found, start, strict=True)) if mine != first]
        excess = tables.excess(found)
        worst = int(excess.argmax())
        if int(excess[worst]) > 0:
            row = tables.row(worst)
            spared = {r: int(row[r, found[r]] - row[r, start[r]]) for r in changed}
        else:
            spared = {r: int(tables.risk[r, found[r]] - tables.risk[r, start[r]]) for r in changed}
        back = max(changed, key=lambda r: (spared[r], -r))
        found[back] = start[back]
    return tuple(found)
