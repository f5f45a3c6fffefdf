"""One implementation each. A backend imports neither the dispatcher nor another backend.

What they share: `protocol` (the call they receive), `facts` (the machine they run on),
`platform_rules` (what a device's name means), `errors`, `layouts` (how a cache is laid out),
`kv_write` (the write into it), `states` (the one merge) and `cache_folder` (where binaries and
verdicts are kept).
"""
