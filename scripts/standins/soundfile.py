"""Stands in for soundfile, which SGLang's HTTP server imports for speech; nothing of it is called."""
