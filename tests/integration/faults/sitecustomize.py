"""Faults that a test switches on in a running deployment; Python imports this file at its start.

The file AFD_TEST_FAULT holds "KIND MEMBER AMOUNT", or nothing. Every member reads it before each
expert call or message:

sleep ffn-1 0.004     each expert call of ffn-1 takes so many seconds more
skew ffn-1 0          all rows of all attention instances go to the upper half of the experts

With AFD_TEST_RELAY=PORT, ffn-1 registers this port in place of its own and writes its own to the
file AFD_TEST_RELAY_TO, so that a relay can delay what it receives.
"""

import importlib.abc
import importlib.util
import os
import sys
import time
from pathlib import Path

_FAULT = Path(os.environ["AFD_TEST_FAULT"])


def _fault(kind: str) -> list[str]:
    try:
        words = _FAULT.read_text().split()
    except OSError:
        return []
    return words[1:] if words[:1] == [kind] else []


def _patch_experts(module) -> None:  # type: ignore[no-untyped-def]
    forward = module.FfnModel.forward

    def slow(self, *args):  # type: ignore[no-untyped-def]
        words = _fault("sleep")
        if words and _member() == words[0]:
            time.sleep(float(words[1]))
        return forward(self, *args)

    module.FfnModel.forward = slow


def _patch_send(module) -> None:  # type: ignore[no-untyped-def]
    import torch

    send = module.RemoteExperts.send

    def skewed(self, layer, micro_batch, hidden, ids, weights):  # type: ignore[no-untyped-def]
        if _fault("skew"):
            half, top_k = int(os.environ["AFD_TEST_EXPERTS"]) // 2, ids.shape[1]
            first = ids[:, :1] % (half - top_k + 1)  # a row's experts stay different ones
            there = first + torch.arange(top_k, dtype=ids.dtype) + half
            ids = torch.where(ids < 0, ids, there)
        return send(self, layer, micro_batch, hidden, ids, weights)

    module.RemoteExperts.send = skewed


def _patch_join(module) -> None:  # type: ignore[no-untyped-def]
    join = module.ControlClient.join

    def relayed(self, *, addresses=(), **named):  # type: ignore[no-untyped-def]
        if _member() == "ffn-1":
            own = next(one for one in addresses if one.startswith("tcp:")).split(":")
            Path(os.environ["AFD_TEST_RELAY_TO"]).write_text(own[2])
            own[2] = os.environ["AFD_TEST_RELAY"]
            addresses = (":".join(own),)
        return join(self, addresses=addresses, **named)

    module.ControlClient.join = relayed


def _member() -> str:
    """The member that this process is, from the role file's name on its command line."""
    return next((Path(word).stem for word in sys.orig_argv if word.endswith(".json")), "")


_PATCHES = {
    "ffn_worker.experts.model": _patch_experts,
    "attention_worker.remote.host": _patch_send,
    "afd.control.client": _patch_join,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):  # type: ignore[no-untyped-def]
        if name not in _PATCHES:
            return None
        patch = _PATCHES.pop(name)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module) -> None:  # type: ignore[no-untyped-def]
            execute(module)
            patch(module)

        spec.loader.exec_module = executed
        return spec


sys.meta_path.insert(0, _Finder())
