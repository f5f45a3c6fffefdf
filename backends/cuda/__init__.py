"""The compiled CUDA backend: how its sources become a binary, how that is found and launched.

`spec` says what is compiled, `toolchain` with which command line, `compile` runs it, and
`binary_cache` keeps the result. `abi` mirrors the C interface of csrc/, `launch` turns a call
into a launch, and `backend` is the place in the chain.
"""
