"""Records of training runs: made inside an ordinary training loop, written as one document, `run.json`."""

__all__: list[str] = []  # `handle.record` is the interface
