"""Everything that hooks or patches torch, and nothing else."""

__all__: list[str] = []
