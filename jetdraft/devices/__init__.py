"""What a device can do: profiles, detection, planning, execution providers."""
