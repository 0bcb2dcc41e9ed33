"""The one OpenAI address of a deployment: a reverse proxy over its attention instances.

settings    what the gateway is told (frozen)
upstreams   members, health, and the choice between them (pure)
pool        the live table: who is there, who is healthy, who runs which request
proxy       one request: choose, forward, retry, relay
headers, sse, errors   pieces of HTTP, each pure
exposition  merging Prometheus texts (pure);  scrape, telemetry  the /metrics page
app, server the aiohttp application; listening, draining, stopping
main        the role: joins the control plane and serves
"""
