"""The compiled CUDA backend.

`abi` mirrors the C interface of csrc/, and `launch` turns a call into a launch.
"""
