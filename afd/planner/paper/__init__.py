"""The Step-3 report's tables and derived figures, recomputed from this package's facts.

``cells()`` lists every one of them; ``DIFFERENCES`` names those that do not come out, and why.
"""

from afd.planner.paper.cells import Cell
from afd.planner.paper.differences import DIFFERENCES
from afd.planner.paper.sections import section_cells
from afd.planner.paper.tables import table_cells

__all__ = ["DIFFERENCES", "Cell", "cells"]


def cells() -> tuple[Cell, ...]:
    """Tables 2 to 7, sections 4 to 6, and Table 8's extrapolations, in the report's order."""
    return (*table_cells(), *section_cells())
