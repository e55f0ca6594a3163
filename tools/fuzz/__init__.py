"""Calls with arbitrary requests against a real cluster: `make fuzz`."""
