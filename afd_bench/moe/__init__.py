"""`afd bench moe`: times one MoE layer, computed as in an FFN instance."""
