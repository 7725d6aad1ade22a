"""An answer becomes a token: choosing, penalties, verifiers."""
