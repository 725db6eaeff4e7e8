"""Layouts, and the communication that is derived from them."""
