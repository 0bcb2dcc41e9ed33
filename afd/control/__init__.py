"""The control plane: membership, agreement on the contract, and operator commands.

It is off the data path: no step of a model uses it.

messages                 everything that is sent
registry, registration   state machines of server and member, without sockets
entries, admission, generations, recovery, moves, depths   parts of the registry
authority, seal, refusals   who may do what
server, client           the two ends;  channel, address, keys, local_keys, hosts   what both use
operator, main           called by the command line
"""
