"""What every role shares: configuration, topology, schedule, wire format, control plane, gateway.

Imports no torch and no vLLM, so the planner, the gateway and the control plane run anywhere.
"""
