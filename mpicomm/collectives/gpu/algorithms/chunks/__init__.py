"""Ranks exchange chunks through slots with credits: messages of any size and kind."""
