"""Settings of vLLM that attention instances refuse when they load their model."""

from types import SimpleNamespace

import pytest

from afd.errors import ConfigError

pytest.importorskip("vllm.config")
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from attention_worker.vllm_hooks import support


@pytest.fixture
def config() -> SimpleNamespace:
    """What is supported, of a model with linear attention."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            world_size=1,
            tensor_parallel_size=1,
            decode_context_parallel_size=1,
            enable_expert_parallel=False,
            data_parallel_size=1,
        ),
        speculative_config=None,
        kv_transfer_config=None,
        attention_config=SimpleNamespace(backend=None),
        cache_config=SimpleNamespace(cache_dtype="fp8", enable_prefix_caching=True),
        model_config=SimpleNamespace(
            is_hybrid=True, get_num_kv_heads=lambda parallel: 2, get_head_size=lambda: 128
        ),
    )


def test_one_latent_head_of_the_mqa_kernel(config: SimpleNamespace) -> None:
    support.check_supported(config)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    with pytest.raises(ConfigError, match="one key/value head, this one has 2"):
        support.check_supported(config)


def test_what_has_another_key_is_named(config: SimpleNamespace) -> None:
    config.parallel_config.data_parallel_size = 2
    config.speculative_config = SimpleNamespace(method="medusa")
    config.cache_config.enable_prefix_caching = False
    named = r"use attention\.instances\); speculative decoding other than n-gram, MTP and EAGLE;"
    with pytest.raises(ConfigError, match=named) as refused:
        support.check_supported(config)
    assert "KV connector" not in str(refused.value)


def test_linear_attention_with_speculation_on_cpus(
    config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would end: with n-gram at once or later, and with prefix caching at the first step."""
    on_cpu = True
    monkeypatch.setattr(support.current_platform, "is_cpu", lambda: on_cpu)
    config.speculative_config = SimpleNamespace(method="ngram")
    with pytest.raises(ConfigError, match=r"set attention\.speculation\.method to mtp, or remove"):
        support.check_supported(config)
    config.speculative_config = SimpleNamespace(method="mtp")
    with pytest.raises(ConfigError, match=r"set attention\.enable_prefix_caching: false"):
        support.check_supported(config)
    config.cache_config.enable_prefix_caching = False
    support.check_supported(config)
    config.cache_config.enable_prefix_caching, on_cpu = True, False
    support.check_supported(config)
    on_cpu, config.model_config.is_hybrid = True, False
    support.check_supported(config)
