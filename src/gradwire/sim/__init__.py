"""What a plan's step will look like: who works when. Pure: no torch."""
