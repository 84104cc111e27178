"""Measurements: ratios against a named baseline and a roofline, from one run on one device."""
