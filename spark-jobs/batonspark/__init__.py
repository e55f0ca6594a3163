"""Answers from the streams that BatonMQ's services tell of themselves, by Spark."""
