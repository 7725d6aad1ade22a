"""What was seen before: suffixes, trigrams, stored responses, similar requests."""
