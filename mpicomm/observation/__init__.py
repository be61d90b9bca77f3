"""Observation: puts records of calls into a communicator, where the environment asks for them.

It gives the objects of one communicator subclasses of their classes, once. So a program that asks for no records runs
the same code as if this room did not exist.

- `calls`: which methods are recorded, and the arguments and buffers of a call.
- `subclasses`: subclasses whose methods record, for communicators, requests, symmetric arrays and shared events.
- `inside`: subclasses of the parts of a communicator that know the algorithm of a call and enqueue its work.
"""
