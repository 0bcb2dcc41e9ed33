"""Collectives inside one FFN instance: block formats and, one file each, the backends."""
