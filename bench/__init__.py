"""What is measured, against what, in one run. `make bench` runs it; it is no test."""
