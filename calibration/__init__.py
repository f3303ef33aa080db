"""Calibration: how weights become few bits, and what that does to acceptance."""
