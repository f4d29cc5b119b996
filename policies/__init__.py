"""The policy language (schema, expressions, engine) and the shipped policies."""
