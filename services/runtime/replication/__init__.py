"""Replica control: the election of a leader and the in-sync set of its followers."""
