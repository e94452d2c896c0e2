"""What a plan's step will look like: who works when; and step times in closed form. Pure: no torch."""
