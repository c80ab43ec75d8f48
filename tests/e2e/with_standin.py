"""Runs a script with the stand-in for CUDA's driver, where neither is installed.

    python with_standin.py LIBRARY BINDINGS SCRIPT ARGUMENTS...

BINDINGS is a directory that has cuda-bindings.
"""

import ctypes
import runpy
import sys

_, library, bindings, *sys.argv = sys.argv
ctypes.CDLL(library)  # whatever asks for libcuda.so.1 from now on gets this one
sys.path.append(bindings)
runpy.run_path(sys.argv[0], run_name="__main__")
