"""A farm of wheels: many projects of others, each version and target built once, and one index of them all."""

from torchwheels.farm import command

__all__ = ["command"]
