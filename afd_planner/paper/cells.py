"""One printed number and the recomputed value."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A number of the report.

    Attributes:
        where: "Table 2" or "Section 6"; ``row`` and ``column`` locate the number there.
        printed: The digits as text, without thousands separators.
        value: The recomputed value.
        unit: Unit of both.
        given: Whether the value is an input that we took from the report, not computed.
    """

    where: str
    row: str
    column: str
    printed: str
    value: float
    unit: str
    given: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.where, self.row, self.column

    @property
    def agrees(self) -> bool:
        """Whether the recomputed value, rounded to the printed digits, equals the printed one."""
        return self.rounded == self.printed

    @property
    def rounded(self) -> str:
        """The recomputed value with as many digits as the report prints."""
        mantissa, e, _ = self.printed.partition("e")
        decimals = len(mantissa.partition(".")[2])
        return f"{self.value:.{decimals}{'e' if e else 'f'}}"
