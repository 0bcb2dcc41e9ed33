"""An FFN instance: expert weights, MoE backends, and the loop that serves attention instances."""
