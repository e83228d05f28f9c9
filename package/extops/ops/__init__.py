"""The operators' Python faces, one module each: input checks, choice of path, gradients, shapes for tracing."""
