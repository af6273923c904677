"""attnlens."""
