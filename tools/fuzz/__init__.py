"""Calls drawn at random, compared with float64, with eager PyTorch, with torch's module, and with themselves."""
