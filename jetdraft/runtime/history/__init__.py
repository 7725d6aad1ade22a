"""Earlier texts to draft from: stored requests and their responses."""
