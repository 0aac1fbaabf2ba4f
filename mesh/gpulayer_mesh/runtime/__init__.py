"""The asyncio shell around `core`. Modules here never import each other; `agent` wires them."""
