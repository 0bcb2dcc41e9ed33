"""The vLLM plugin of an attention instance: worker, runner, layer loop, remote experts."""
