"""Mechanism without scheduling rules: actors, runtimes, supervisor, arbiter, devices, trace."""
