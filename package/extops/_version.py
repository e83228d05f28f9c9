"""The version of extops, in this one place; all wheels but the release's add a label (`0.1.0+cu130`)."""

__version__ = "0.2.0"
