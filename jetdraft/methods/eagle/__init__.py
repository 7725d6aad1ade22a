"""EAGLE (2401.15077, 2503.01840) and MTP (2412.19437): heads on the target's states."""
