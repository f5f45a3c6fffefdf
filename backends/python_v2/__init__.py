"""The torch path ("Python V2"): gather and batched products over bounded windows of the context.

It runs wherever torch does and is the floor of every chain. Two roads lead through it:
`host_road` where the lengths are host data (a CPU), `device_road` where reading them would
synchronise with a device.
"""

from pagedattn.backends.python_v2.backend import TorchBackend

__all__ = ["TorchBackend"]
