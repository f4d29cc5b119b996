"""The actors of one server, their messages, and `system`, which composes them."""
