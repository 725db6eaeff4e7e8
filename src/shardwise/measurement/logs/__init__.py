"""Logs of training runs, read: a file for each framework that writes them, and for each kind of file that they are in."""
