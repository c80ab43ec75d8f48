"""On the path of every vLLM process of these tests: makes torchvision importable without CUDA.

The torchvision that vLLM's CPU build depends on is a CUDA build; importing it needs two
operators that its library, which does not load, would define. No test calls them.
"""

import importlib.abc
import importlib.machinery
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
