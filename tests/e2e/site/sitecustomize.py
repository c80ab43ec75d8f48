"""On the path of every vLLM process of these tests: makes torchvision importable without CUDA.

With TRITON_INTERPRET=1 there is a Triton for CPUs, which vLLM's second model runner asks for: the
interpreter runs its kernels, and no compiler is called.

The torchvision that vLLM's CPU build depends on is a CUDA build; importing it needs two
operators that its library, which does not load, would define. No test calls them.
"""

import importlib.abc
import importlib.machinery
import os
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is not None:
                return None
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(
                    f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            sys.modules["_torchvision_operators_of_the_tests"] = library
        return None


sys.meta_path.insert(0, _BeforeTorchvision())


def have_triton_for_cpus():
    from triton.backends import Backend, backends
    from triton.backends.driver import DriverBase

    class Driver(DriverBase):
        is_active = staticmethod(lambda: True)

    backends.clear()
    backends["cpu"] = Backend(None, Driver)


if os.environ.get("TRITON_INTERPRET") == "1":
    have_triton_for_cpus()
