"""Columns of many records at once, with numpy.

For the services and for Spark, which bring numpy; the client library does not import it.
"""
