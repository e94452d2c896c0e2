"""Measurements for those who work on gradwire: `gradwire bench` with --matrix, --predict, or any --what but methods."""
