"""The tables and derived figures of the Step-3 report, recomputed from the planner's facts.

``cells()`` returns all figures. ``DIFFERENCES`` explains those that differ from the report.
"""

from afd_planner.paper.cells import Cell
from afd_planner.paper.differences import DIFFERENCES
from afd_planner.paper.sections import section_cells
from afd_planner.paper.tables import table_cells

__all__ = ["DIFFERENCES", "Cell", "cells"]


def cells() -> tuple[Cell, ...]:
    """Returns Tables 2 to 7, sections 4 to 7, and the extrapolations of Table 8."""
    return (*table_cells(), *section_cells())
