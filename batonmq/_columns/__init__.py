"""Columns of many records or events at once, with numpy and pyarrow.

For the services and for Spark, which bring these packages; the client library does not import it.
"""
