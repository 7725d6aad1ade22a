"""What is known of speech before any of it is heard."""
