"""Earlier tokens to draft from: suffixes, trigrams, stored responses."""
