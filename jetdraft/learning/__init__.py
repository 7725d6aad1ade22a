"""What is learned from use: stores, lessons, and weights with the verdict on them."""
