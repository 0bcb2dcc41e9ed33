"""`afd bench moe`: one MoE layer, as an FFN instance computes it."""
