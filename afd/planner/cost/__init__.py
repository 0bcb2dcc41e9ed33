"""What a decode step costs, disaggregated and colocated."""
