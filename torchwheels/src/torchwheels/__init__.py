"""Builds wheels of PyTorch extensions for a torch, a CUDA and a Python, from untouched sources."""

__version__ = "0.1.0"
