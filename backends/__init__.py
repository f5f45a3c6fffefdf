"""One implementation each. A backend imports neither the dispatcher nor another backend.

What they share: `protocol` (the call they receive), `facts` (the machine they run on),
`errors`, `layouts` (how a cache is laid out) and `states` (the one merge).
"""
