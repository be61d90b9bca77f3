"""Epilogues as the arguments of a call give them: a collective applies one to its result before it stores it."""
