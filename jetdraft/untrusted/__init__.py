"""What others wrote: JSON that is read with limits, text that is shown safely."""
