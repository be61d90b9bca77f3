"""The options, the launch and the report that all command lines share."""
