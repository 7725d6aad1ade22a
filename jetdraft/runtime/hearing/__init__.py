"""From a sound to what an encoder hears, and from timestamps to segments."""
