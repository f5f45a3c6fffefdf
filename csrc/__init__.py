"""The CUDA sources, shipped as package data (this file makes the editable install find them)."""
