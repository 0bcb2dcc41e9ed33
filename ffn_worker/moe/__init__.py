"""MoE backends: how an FFN instance computes its routed experts. Imports nothing by itself."""
