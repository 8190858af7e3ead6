"""Older TensorFlow APIs over the same objects: signatures and conversions, no rules."""
