"""Text models inside a checkpoint with an image encoder: Llama 4 and Step-3.

Names, dtypes and keys: config.json of the checkpoint that each function names, and the loaders of
vLLM 0.26 (models/mllama4.py, models/step3_vl.py). Of the image encoder there are only a few
tensors: it is not loaded.
"""

from afd_demo.sizes import Sizes
from afd_demo.weights import Config, Sink, attention, common_config, frame, mlp, step3


def llama4(w: Sink, s: Sizes, dtype: str) -> Config:
    """meta-llama/Llama-4-Maverick-17B-128E-Instruct: every other layer has experts."""
    outer = "language_model."
    frame(w, s, outer)
    for i in range(s.layers):
        layer = f"{outer}model.layers.{i}."
        attention(w, s, f"{layer}self_attn.")
        ffn = f"{layer}feed_forward."
        if (i + 1) % 2:
            mlp(w, ffn, s.hidden, s.dense_intermediate)
            continue
        w.router(f"{ffn}router.weight", s.experts, s.hidden)
        w.projection(f"{ffn}experts.gate_up_proj", s.experts, s.hidden, 2 * s.intermediate)
        w.projection(f"{ffn}experts.down_proj", s.experts, s.intermediate, s.hidden)
        mlp(w, f"{ffn}shared_expert.", s.hidden, s.intermediate)
    _image_encoder(w, s, "multi_modal_projector.linear_1")
    text = common_config(s, dtype) | {
        "model_type": "llama4_text",
        "attention_chunk_size": s.max_positions,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        "head_dim": s.head_dim,
        "interleave_moe_layer_step": 2,
        "intermediate_size": s.intermediate,
        "intermediate_size_mlp": s.dense_intermediate,
        "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(s.layers)],
        "num_experts_per_tok": 1,
        "num_key_value_heads": s.kv_heads,
        "num_local_experts": s.experts,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "use_qk_norm": False,
    }
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "model_type": "llama4",
        "boi_token_index": 3,
        "eoi_token_index": 4,
        "image_token_index": 5,
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": _vision("llama4_vision_model")
        | {
            "norm_eps": 1e-5,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 64,
            "rope_theta": 10000,
        },
        "torch_dtype": dtype,
    }


def step3_vl(w: Sink, s: Sizes, dtype: str) -> Config:
    """stepfun-ai/step3: its tensors have the names of the text model."""
    text = step3(w, s, dtype)
    _image_encoder(w, s, "vit_large_projector")
    return {
        "architectures": ["Step3VLForConditionalGeneration"],
        "model_type": "step3_vl",
        "text_config": {**text, "architectures": ["Step3TextForCausalLM"]},
        "vision_config": _vision("step3_vision_encoder") | {"output_hidden_size": 64},
        "understand_projector_stride": 2,
        "projector_bias": False,
        "image_token_id": 5,
        "hidden_size": s.hidden,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }


def _image_encoder(w: Sink, s: Sizes, projector: str) -> None:
    w.projection(f"{projector}.weight", s.hidden, 64)
    w.norm("vision_model.layernorm_post.weight", 64)


def _vision(model_type: str) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": 64,
        "image_size": 56,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_channels": 3,
        "num_hidden_layers": 1,
        "patch_size": 14,
    }
