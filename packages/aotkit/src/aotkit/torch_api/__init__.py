"""Torch's own signatures, over the driver."""
