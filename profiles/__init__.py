"""Measured device and model profiles, and the code that measures them."""
