"""Options, launch and report that the command lines share."""
