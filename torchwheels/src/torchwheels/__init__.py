"""Builds wheels of PyTorch extensions for a torch, a CUDA and a Python, from unmodified sources."""

__version__ = "0.1.0"
