"""The gateway: a reverse proxy with one OpenAI address over all attention instances.

settings    the gateway's settings (frozen)
upstreams   members and their health (pure);  routing  the choice of one (pure);  kv_load
pool        current members, their health and their running requests
admission   which requests run, wait or are refused;  counts  shared by the processes of a port
proxy       one request: forward, retry, relay;  stored  finds stored responses
headers, sse, errors   parts of HTTP (pure)
exposition  merges Prometheus texts (pure);  scrape, telemetry  the /metrics page
app, server the aiohttp application; serving, draining, stopping
listener, accept, connection, inherited   the port and its connections
main, loop  the role: registers with the control plane and serves
"""
