"""Decoder models over a paged KV pool: layers, operators, weights, sampling, tokenizer."""
