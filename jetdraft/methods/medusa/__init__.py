"""Medusa (2401.10774) and Hydra (2402.05109): heads on the target's last state."""
