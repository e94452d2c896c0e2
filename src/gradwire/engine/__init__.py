"""The engine: executes plans for models and decides nothing."""
