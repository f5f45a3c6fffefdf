"""The torch path ("Python V2"): gather and batched matmul over bounded windows of the context."""
