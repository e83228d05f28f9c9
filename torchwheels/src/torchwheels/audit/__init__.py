"""The audit: the rules that a wheel must keep, and the report of what they found."""

from torchwheels.audit import reports

__all__ = ["reports"]
