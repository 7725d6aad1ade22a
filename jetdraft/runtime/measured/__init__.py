"""What was measured on this machine: pass times, width classes, acceptance."""
