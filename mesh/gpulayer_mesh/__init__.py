"""The GPUlayer agent and its client: membership, placement, the job engine.

This package never imports `gpulayer` or torch. `core` is pure; `runtime` is the asyncio shell.
"""

__version__ = "0.1.0"
