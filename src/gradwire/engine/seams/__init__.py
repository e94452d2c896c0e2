"""Everything that hooks or patches torch, and nothing else."""
