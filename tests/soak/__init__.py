"""Faults by the hundred and steps by the thousand: `make soak`."""
