"""One printed number and our value for it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """A number of the report. printed: its digits as text (no thousands separators); value: ours.

    unit: of both. where: "Table 2" or "Section 6"; row and column locate it there.
    """

    where: str
    row: str
    column: str
    printed: str
    value: float
    unit: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.where, self.row, self.column

    @property
    def agrees(self) -> bool:
        """Our value, rounded to the printed digits, reads the same."""
        return self.rounded == self.printed

    @property
    def rounded(self) -> str:
        """Our value with as many digits as the report prints."""
        mantissa, e, _ = self.printed.partition("e")
        decimals = len(mantissa.partition(".")[2])
        return f"{self.value:.{decimals}{'e' if e else 'f'}}"
