"""The control plane: who is a member, whether they agree, and what the operator wants.

Off the data path: nothing here is touched between two steps of a model.
messages, contract   what is said            registry, session   state machines, no sockets
server, client       the two ends            channel, address, keys, hosts   what they stand on
operator, main       what the command line calls
"""
