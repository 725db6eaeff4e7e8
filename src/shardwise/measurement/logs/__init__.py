"""Logs of training runs, read: one file for each framework that writes them."""
