"""Bridges to other libraries, one file each."""
