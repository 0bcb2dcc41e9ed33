"""The gateway: a reverse proxy with one OpenAI address over all attention instances.

settings    the gateway's settings (frozen)
upstreams   members, their health, and the choice of one (pure)
pool        current members, their health and their running requests
proxy       one request: choose, forward, retry, relay
headers, sse, errors   parts of HTTP (pure)
exposition  merges Prometheus texts (pure);  scrape, telemetry  the /metrics page
app, server the aiohttp application; listening, draining, stopping
main        the role: registers with the control plane and serves
"""
