"""The attention side: a vLLM plugin with our layer pipeline and the client of the FFN instances."""
