"""`afd bench gateway`: the gateway beside a direct connection, over a stand-in upstream.

cli       the command: cases, turns, table, records
upstream  the stand-in for an attention instance's API server
clients   the load generator
caching   the stand-in of `afd bench routing`
serve     one gateway process, of this checkout or another
"""
