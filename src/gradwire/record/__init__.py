"""What a training run was: recorded inside an ordinary loop, written as one document, `run.json`."""
