"""The operators' Python functions, one module each: input checks, choice of path, gradients, shapes for tracing."""
