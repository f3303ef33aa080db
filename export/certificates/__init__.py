"""Certificates: that a bundle's rounds give the target's own law, shown on its own graphs.

Each is about the target as built. How far that target is from its checkpoint is measured elsewhere
(the build's gates, `python -m calibration compare`) and is never part of these.
"""
