"""Which FFN instance holds which expert, and to which FFN instances a row is sent."""
