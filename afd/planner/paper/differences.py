"""Cells that do not come out at the printed digits, each with the reason; tests hold it exact."""

DIFFERENCES: dict[tuple[str, str, str], str] = {
    ("Table 5", "h800", "USD per FLOP"): (
        "2 USD / 3600 s / 1.98e15 FLOP/s is 2.806e-19; the report cuts to 2.80. Its Table 6 "
        "follows from the unrounded value, as ours does."
    ),
    ("Section 6", "L20", "FFN MB per layer"): (
        "864 GB/s x 50 % x 272 us is 117.5 MB; the report cuts to 117 and goes on with that."
    ),
    ("Section 7.3", "scaled to 600B", "micro-batch rows"): (
        "3 x H bytes per row, 272 us and 400 Gbit/s x 8 allow 5,060 rows per FFN instance. The "
        "report states no further input for its 3,072. With every row sent to four FFN instances "
        "from three attention instances, at the 40 GB/s per NIC of section 5.4, it is 3,036."
    ),
}
