"""The cost model: time and memory of a decode step, disaggregated and colocated."""
