"""The registries of MoE and all-reduce backends: cheap to import, complete, loadable."""

import subprocess
import sys
from pkgutil import resolve_name

import pytest

from afd.config.choices import choices
from ffn_worker.allreduce import registry as allreduce
from ffn_worker.allreduce.formats_table import FORMATS
from ffn_worker.moe import registry as moe


def test_config_choices_load_without_numpy_or_torch():
    code = (
        "import sys; from afd.config.choices import choices;"
        "choices('moe_backend'), choices('reduce_format');"
        "sys.exit(bool({'numpy', 'torch', 'triton', 'vllm'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_choices_are_the_registered_names():
    backends = choices("moe_backend")
    assert list(backends) == ["auto", *moe.BACKENDS]
    assert backends["vllm_cpu"].devices == ("cpu",) and backends["triton"].devices == (
        "cuda",
        "rocm",
    )
    assert backends["auto"].devices == backends["torch"].devices == ()
    assert list(choices("reduce_format")) == ["exact", "int8", "int6", "int4", "fp4"]
    assert set(choices("reduce_format")) - {"exact"} <= set(FORMATS)


@pytest.mark.parametrize("name", moe.BACKENDS)
def test_a_moe_backend_can_be_imported(name: str):
    base = pytest.importorskip("ffn_worker.moe.base", reason="torch is not installed")
    assert issubclass(moe.BACKENDS[name].load(), base.MoeBackend)
    assert moe.BACKENDS[name].schemes


@pytest.mark.parametrize("name", allreduce.BACKENDS)
def test_an_all_reduce_backend_can_be_imported(name: str):
    if name == "quickreduce":
        pytest.importorskip("triton", reason="triton is not installed")
    pytest.importorskip("torch")
    module = resolve_name(allreduce.BACKENDS[name].target.partition(":")[0])
    kinds = [kind for kind in vars(module).values() if isinstance(kind, type)]
    named = {kind.name for kind in kinds if hasattr(kind, "all_reduce") and hasattr(kind, "name")}
    assert callable(module.make) and name in named
