"""The way of targets to wheels and of wheels to tests: on this machine or in containers."""

from torchwheels.run import engines, pipeline, testing
from torchwheels.run.engines import Engine
from torchwheels.run.pipeline import Order

__all__ = ["Engine", "Order", "engines", "pipeline", "testing"]
