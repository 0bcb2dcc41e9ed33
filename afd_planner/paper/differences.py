"""Cells that differ from the printed digits, with the reason. A test checks the list."""

DIFFERENCES: dict[tuple[str, str, str], str] = {
    ("Table 5", "h800", "USD per FLOP"): (
        "2 USD / 3600 s / 1.98e15 FLOP/s is 2.806e-19; the report truncates to 2.80. Its Table "
        "6 follows from the unrounded value, as does ours."
    ),
    ("Section 6", "L20", "FFN MB per layer"): (
        "864 GB/s x 50 % x 272 us is 117.5 MB; the report truncates to 117 and continues with it."
    ),
    ("Section 7.3", "scaled to 600B", "micro-batch rows"): (
        "3 x H bytes per row, 272 us and 400 Gbit/s x 8 allow 5,060 rows per FFN instance. The "
        "report states no other input for its 3,072. If three attention instances send every row "
        "to four FFN instances at the 40 GB/s per NIC of section 5.4, the result is 3,036."
    ),
}
