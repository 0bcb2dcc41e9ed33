"""Which arguments of ``attention.vllm_args`` break an attention instance. Data and pure functions.

vLLM itself takes them: an instance with another port, for example, starts and is never found.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

_SET = "which AFD sets"
_UNSUPPORTED = "which attention instances do not support"
_INSTANCES = f"{_UNSUPPORTED}; use attention.instances"
_LORA = f"{_UNSUPPORTED} (LoRA adapters outside attention); remove it"
_DRAFT = f"{_SET}; use attention.speculation"
_TRANSFER = f"{_SET}; use the section prefill"
_OFFLOAD = f"{_UNSUPPORTED} (KV offloading, transfer of encoder outputs); remove it"
_QUANTISED = f"{_UNSUPPORTED} (quantised attention weights); for experts use ffn.weights"
_GRAPHS = f"{_SET} to what both sides capture; use pipeline.graphs and attention.max_num_seqs"
_PLAIN_HTTP = "but the gateway speaks plain HTTP with attention instances; put TLS in front of it"

BENCH_CONNECTOR = "DecodeBenchConnector"
"""vLLM's KV connector that may be passed: it fills prompts for benchmarks and transfers nothing."""

REFUSED = MappingProxyType(
    {
        "--config": "a file whose arguments cannot be checked; list them in attention.vllm_args",
        "--cudagraph-capture-sizes": _GRAPHS,
        "--data-parallel-*": _INSTANCES,
        "--default-mm-loras": _LORA,
        "--dtype": f"{_SET}; use attention.dtype",
        "--ec-transfer-config": _OFFLOAD,
        "--enable-prefix-caching": f"{_SET}; use attention.enable_prefix_caching",
        "--enable-ssl-refresh": _PLAIN_HTTP,
        "--host": f"{_SET}; use attention.host",
        "--kv-cache-memory-bytes": f"{_SET}; use attention.kv_cache_gib",
        "--kv-offloading-*": _OFFLOAD,
        "--kv-transfer-config": _TRANSFER,
        "--load-format": f"{_SET}; remove it, or use ffn.load for dummy experts",
        "--enable-tower-connector-lora": _LORA,
        "--lora-target-modules": f"{_SET} to the attention projections; remove it",
        "--max-cudagraph-capture-size": _GRAPHS,
        "--max-model-len": f"{_SET}; use attention.max_model_len",
        "--max-num-batched-tokens": f"{_SET}; use attention.max_num_batched_tokens",
        "--max-num-seqs": f"{_SET}; use attention.max_num_seqs",
        "--model": f"{_SET}; use model",
        "--nnodes": _INSTANCES,
        "--node-rank": _INSTANCES,
        "--no-enable-prefix-caching": f"{_SET}; use attention.enable_prefix_caching",
        "--pipeline-parallel-size": _INSTANCES,
        "--port": f"{_SET}; use attention.port",
        "--quantization": _QUANTISED,
        "--root-path": "but the gateway requests paths without a prefix; remove it",
        "--served-model-name": f"{_SET}; use served_model_name",
        "--spec-*": _DRAFT,
        "--speculative-config": _DRAFT,
        "--ssl-*": _PLAIN_HTTP,
        "--tensor-parallel-size": f"{_SET}; use attention.tp",
        "--uds": "but the gateway connects over TCP; remove it",
        "--worker-cls": f"{_SET}; remove it",
    }
)
"""Argument of vLLM -> why it is refused, and the remedy. A name that ends in * is a prefix."""

SHORT = MappingProxyType(
    {
        "-dp": "--data-parallel-size",
        "-dpa": "--data-parallel-address",
        "-dpb": "--data-parallel-backend",
        "-dpe": "--data-parallel-external-lb",
        "-dph": "--data-parallel-hybrid-lb",
        "-dpl": "--data-parallel-size-local",
        "-dpm": "--data-parallel-multi-port-external-lb",
        "-dpn": "--data-parallel-rank",
        "-dpp": "--data-parallel-rpc-port",
        "-dpr": "--data-parallel-start-rank",
        "-n": "--nnodes",
        "-pp": "--pipeline-parallel-size",
        "-q": "--quantization",
        "-r": "--node-rank",
        "-sc": "--speculative-config",
        "-tp": "--tensor-parallel-size",
    }
)
"""Short names of vLLM's arguments that are refused."""


def refusal(arguments: Iterable[str]) -> str | None:
    """Returns the first argument that is refused, why, and the remedy; None if all may be passed.

    Args:
        arguments: command line of vLLM: ``--x=1``, ``--x 1``, ``--x.key=1``, ``_`` for ``-``, and
            abbreviations, as vLLM's parser accepts them.
    """
    listed = list(arguments)
    for argument, following in zip(listed, [*listed[1:], ""], strict=False):
        name = _long_name(argument)
        reason = next((why for known, why in REFUSED.items() if _names(name, known)), None)
        fills = reason is _TRANSFER and BENCH_CONNECTOR in argument + following
        if reason is not None and not fills:
            return f"{argument.partition('=')[0]}, {reason}"
    return None


def _names(name: str, known: str) -> bool:
    """True if the option ``name`` is the argument ``known`` of the table, or abbreviates it.

    No argument that may be passed is the beginning of a refused one.
    """
    if not name.startswith("--") or name == "--":
        return False
    prefix = known.removesuffix("*")
    return prefix.startswith(name) or (prefix != known and name.startswith(prefix))


def _long_name(argument: str) -> str:
    """Returns the name of an option without its value; for a refused short name, the long one."""
    name = argument.partition("=")[0]
    if name.startswith("--"):
        return name.partition(".")[0].replace("_", "-")
    shorts = [short for short in SHORT if name == short or _joined(name, short)]
    return SHORT[max(shorts, key=len)] if shorts else name


def _joined(name: str, short: str) -> bool:
    """True for a short name with its number attached, such as -tp2."""
    return name.startswith(short) and name.removeprefix(short).isdigit()


def checks_api_key(arguments: Iterable[str]) -> bool:
    """Whether these arguments make attention instances check the client's key themselves."""
    return "--api-key" in {item.partition("=")[0].replace("_", "-") for item in arguments}
