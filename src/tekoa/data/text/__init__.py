"""Text for language models: vocabularies, token streams, documents."""
