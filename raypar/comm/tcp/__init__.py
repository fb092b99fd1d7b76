"""Moves tensors between workers over TCP, or over Unix sockets inside one machine."""
