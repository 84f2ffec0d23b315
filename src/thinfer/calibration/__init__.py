"""Calibration: text in seeded token windows, and observers of what the layers see."""
