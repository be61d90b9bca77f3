"""Dispatch of collective calls: reads a call, chooses who carries it out, and keeps the engines that do."""
