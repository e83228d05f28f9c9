"""The version of extops, in this one place; a wheel adds its variant's label (`0.1.0+cu130`)."""

__version__ = "0.1.0"
