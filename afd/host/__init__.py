"""Resources of the host: cores, ports, logs and package data."""
