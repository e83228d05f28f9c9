"""Around a call of an operator: autocast, gradients, checks, errors, and what torch's tools ask of it."""
