"""Kernels of speculation on CPUs that vLLM 0.30 lacks.

vLLM puts functions in place of Triton's kernels (cpu_model_runner.py: _postprocess_triton). In 0.30
it forgets the one that verifies greedy drafts, and puts the one that moves on to the next draft
where nobody looks. So the first draft, or the second of a step, ends the engine, also without AFD.
"""

from importlib import import_module
from typing import Any


def put_draft_kernels() -> None:
    """Call it for the versions with ``Layout.cpu_draft_kernels_missing`` only."""
    kernels = import_module("vllm.utils.cpu_triton_utils")
    sampler = import_module("vllm.v1.sample.rejection_sampler")
    sampler._rejection_greedy_sample.kernel = kernels.rejection_greedy_sample_kernel
    call = kernels._eagle_step_slot_mapping_metadata_kernel_impl

    # vLLM binds arguments by their names, and its own function calls the stride otherwise.
    def next_draft(
        positions: Any,
        block_table: Any,
        block_table_stride: int,
        seq_lens: Any,
        out_clamped_positions: Any,
        out_slot_mapping: Any,
        block_size: int,
        max_model_len: int,
        n_blocks_per_req: int,
        PAD_ID: int,
        batch_size: int,
    ) -> None:
        call(
            positions, block_table, block_table_stride, seq_lens, out_clamped_positions,
            out_slot_mapping, block_size, max_model_len, n_blocks_per_req, PAD_ID, batch_size,
        )  # fmt: skip

    drafts = import_module("vllm.v1.spec_decode.utils")
    drafts._eagle_step_slot_mapping_metadata.kernel = kernels._FuncWrapper(next_draft)
