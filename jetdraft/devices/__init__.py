"""Devices: profiles, detection, a cost model, execution providers."""
