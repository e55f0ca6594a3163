"""Benchmarks: `make bench` runs them and compares the figures with goals."""
