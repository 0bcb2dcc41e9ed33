"""Attention and FFN roles without vLLM and torch: they register, say that they are ready, and wait.
A stand-in for vLLM's API server says that it is healthy.

Python imports this file at its start in every process that has this folder in PYTHONPATH.
"""

import importlib.abc
import importlib.util
import signal
import sys
import threading

_real = None  # afd_launch.role.run_role, once it is imported


def _healthy(address):  # type: ignore[no-untyped-def]
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):  # type: ignore[no-untyped-def]
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

    server = http.server.ThreadingHTTPServer((address, 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://{address}:{server.server_port}"


def _run(spec, file=None):  # type: ignore[no-untyped-def]
    if spec.role not in ("attention", "ffn"):
        return _real(spec, file)
    from afd.config.resolve import resolve
    from afd.control.connect import client_for

    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    client = client_for(spec, resolve(spec.deployment).contract)
    address = spec.deployment.transport.host
    url = _healthy(address) if spec.role == "attention" else ""
    client.join(addresses=(f"tcp:{address}:1:0",), api_url=url, deadline_s=30)
    client.set_state("ready")
    print(f"stand-in for {spec.id} on {spec.deployment.transport.host}", flush=True)
    stopped.wait()
    client.leave()
    client.close()
    return 0


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name != "afd_launch.role":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module) -> None:  # type: ignore[no-untyped-def]
            global _real
            execute(module)
            _real, module.run_role = module.run_role, _run

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Finder())
