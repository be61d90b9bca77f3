"""The ways of collective calls: which one a call goes, and engines with one face that carry it out."""
