"""The Triton backend: split-KV paged attention, every layout through one addressing.

`tile` folds tiles of keys into a tile of query rows; `kernels` are its users: decode rows, split
over the context, the merge of the splits, and prefill rows, tiled over the queries. `strides`
says where a layout keeps what, `tuning` holds measured tile sizes, `overlap` and `fast_launch`
shorten the launches, `kernel_cache` fills in a problem's constants, `launch` turns a call into
launches, and `backend` is the chain's side. Only `backend` can be imported without Triton.
"""
